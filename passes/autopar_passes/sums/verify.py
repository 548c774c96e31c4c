"""Checks that deferrals lie in their graph as they say."""

from __future__ import annotations

from collections.abc import Sequence

from autopar_passes.graph.errors import GraphError, failure
from autopar_passes.graph.operators import Operator, OperatorGraph, producers, readers
from autopar_passes.graph.roles import Role
from autopar_passes.sums.deferral import Deferral
from autopar_passes.sums.linear import ADDITIONS, CONTRACTIONS


def verify_deferrals(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> None:
    """Checks the invariants of the deferrals of a graph.

    * Contributions are contractions of the backward pass; all members are
      floating-point values that some operator makes.
    * From each contribution, single readers lead through members to the ends of
      its reach, and to no other value.
    * Other members lie in loops, between the carry and the addition of a hoisted
      sum.
    * Ends, and what is reached, are the same values, in program order; gradients
      are among them.
    * Deferrals have no value in common.

    Raises:
      GraphError: one of them does not hold.
    """
    view = _View(graph)
    taken: set[int] = set()
    for deferral in deferrals:
        view.check(deferral)
        if common := taken & deferral.members:
            raise GraphError(f"%{min(common)} is in two deferrals")
        taken |= deferral.members


class _View:
    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.made_by = producers(graph.operators)
        self.read_by = readers(graph.operators)

    def check(self, deferral: Deferral) -> None:
        self.check_members(deferral)
        self.check_ends(deferral)
        reached: set[int] = set()
        for position, ends in deferral.reach:
            reached |= self.check_path(deferral, position, ends)
        inside = self.accumulated(reached)
        if frozenset(reached | inside) != deferral.members:
            left = sorted(deferral.members ^ (reached | inside))
            raise GraphError(f"nothing leads to the members {left} of the deferral")

    def check_members(self, deferral: Deferral) -> None:
        for value in deferral.members:
            if value not in self.made_by:
                raise GraphError(f"member %{value} of the deferral is made by nothing")
            if not self.graph.values[value].floating:
                position = self.made_by[value].index
                raise failure(self.graph, position, f"member %{value} is no float")
        hoisted = any(self.made_by[v].kind == "carry" for v in deferral.members)
        if deferral.hoisted != hoisted:
            raise GraphError(f"the sums of {deferral.ends} are hoisted: {hoisted}")

    def check_ends(self, deferral: Deferral) -> None:
        ends = set(deferral.ends)
        if not deferral.ends or not ends <= deferral.members:
            raise GraphError(f"the ends {deferral.ends} of the deferral are no members")
        if not deferral.gradients <= ends:
            raise GraphError(f"the gradients {set(deferral.gradients)} are no ends")
        if ends != {end for _, some in deferral.reach for end in some}:
            raise GraphError(f"no contribution reaches all of the ends {deferral.ends}")
        for values in (deferral.ends, *(some for _, some in deferral.reach)):
            if list(values) != sorted(set(values), key=self.place):
                raise GraphError(f"the ends {values} are not in program order")

    def place(self, value: int) -> tuple[int, int]:
        op = self.made_by[value]
        return op.index, op.outputs.index(value)

    def check_path(
        self, deferral: Deferral, position: int, ends: tuple[int, ...]
    ) -> set[int]:
        """Follows a contribution to its ends; returns the values that it meets."""
        if not 0 <= position < len(self.graph.operators):
            raise GraphError(f"there is no operator {position} to contribute")
        maker = self.graph.operators[position]
        if maker.kind not in CONTRACTIONS or maker.role is not Role.BACKWARD:
            raise failure(self.graph, position, "it makes no partial gradients")
        met: set[int] = set()
        left = [maker.outputs[0]]
        while left:
            value = left.pop()
            if value not in deferral.members:
                raise failure(self.graph, position, f"it leads to %{value}, no member")
            if value not in met and value not in ends:
                left.extend(self.following(value))
            met.add(value)
        if not met.issuperset(ends):
            raise failure(self.graph, position, f"it does not lead to all of {ends}")
        return met

    def following(self, value: int) -> tuple[int, ...]:
        """Returns the values that the only reader of a partial one makes."""
        reader = self.only_reader(value)
        return reader.outputs[-1:] if reader.kind == "carry" else reader.outputs

    def only_reader(self, value: int) -> Operator:
        found = self.read_by.get(value, [])
        if len(found) != 1:
            position = self.made_by[value].index
            raise failure(
                self.graph,
                position,
                f"{len(found)} operators read the partial %{value}",
            )
        return found[0][0]

    def accumulated(self, reached: set[int]) -> set[int]:
        """What loops hand from one iteration to the next, up to where it is added."""
        out: set[int] = set()
        for value in reached:
            op = self.made_by[value]
            if op.kind != "carry":
                continue
            inner = op.outputs[0]
            while inner not in reached:
                out.add(inner)
                reader = self.only_reader(inner)
                if reader.kind not in ADDITIONS:
                    raise failure(self.graph, reader.index, f"it does not add %{inner}")
                inner = reader.outputs[0]
        return out
