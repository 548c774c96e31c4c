"""Finds deferrals: follows partial gradients to the values that need their sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from autopar_passes.graph.operators import Operator, OperatorGraph, producers, readers
from autopar_passes.graph.roles import Role
from autopar_passes.graph.verify import GraphError, invariant_error, verifies
from autopar_passes.program.equations import Program, Region, Scalar, walk
from autopar_passes.rules import shardy
from autopar_passes.sums.stacked import (
    ADDITIONS,
    ADDITIVE,
    CONTRACTIONS,
    SCALING,
    UNARY,
    Deferral,
)

# Checks that deferrals are consistent with their graph.


def verify_deferrals(graph: OperatorGraph, deferrals: Sequence[Deferral]) -> None:
    """Checks the invariants of the deferrals of a graph.

    * Contributions are contractions of the backward pass. Members are floating-point
      values that are results of operators.
    * From each contribution a path leads through members, each with a single reader. It
      leads exactly to the ends that ``reach`` lists for the contribution.
    * All members outside of these paths are in loops, between the carry and the
      addition of a sum that is moved out of the loop.
    * ``ends`` lists exactly the ends of these paths, in program order. Gradients are
      among the ends.
    * Deferrals have no value in common.

    Raises:
      GraphError: one of these invariants does not hold.
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
        inside = self.loop_sums(reached)
        if frozenset(reached | inside) != deferral.members:
            left = sorted(deferral.members ^ (reached | inside))
            raise GraphError(f"nothing leads to the members {left} of the deferral")

    def check_members(self, deferral: Deferral) -> None:
        for value in deferral.members:
            if value not in self.made_by:
                raise GraphError(f"member %{value} of the deferral is made by nothing")
            if not self.graph.values[value].floating:
                raise self.error(
                    self.made_by[value].index, f"member %{value} is no float"
                )
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
        """Follows a contribution to its ends; returns the values on the path."""
        if not 0 <= position < len(self.graph.operators):
            raise GraphError(f"there is no operator {position} to contribute")
        maker = self.graph.operators[position]
        if maker.kind not in CONTRACTIONS or maker.role is not Role.BACKWARD:
            raise self.error(position, "it makes no partial gradients")
        met: set[int] = set()
        left = [maker.outputs[0]]
        while left:
            value = left.pop()
            if value not in deferral.members:
                raise self.error(position, f"it leads to %{value}, no member")
            if value not in met and value not in ends:
                left.extend(self.following(value))
            met.add(value)
        if not met.issuperset(ends):
            raise self.error(position, f"it does not lead to all of {ends}")
        return met

    def following(self, value: int) -> tuple[int, ...]:
        """Returns the results of a partial value's only reader."""
        reader = self.only_reader(value)
        return reader.outputs[-1:] if reader.kind == "carry" else reader.outputs

    def error(self, position: int, what: str) -> GraphError:
        return invariant_error(self.graph, position, what)

    def only_reader(self, value: int) -> Operator:
        found = self.read_by.get(value, [])
        if len(found) != 1:
            what = f"{len(found)} operators read the partial %{value}"
            raise self.error(self.made_by[value].index, what)
        return found[0][0]

    def loop_sums(self, reached: set[int]) -> set[int]:
        """Returns the values in loops from the carry to the addition of a sum."""
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
                    raise self.error(reader.index, f"it does not add %{inner}")
                inner = reader.outputs[0]
        return out


def find_deferrals(program: Program, graph: OperatorGraph) -> tuple[Deferral, ...]:
    """Returns the deferrals of a program, in program order."""
    deferrals = _Finder(program, graph).run()
    if verifies():
        verify_deferrals(graph, deferrals)
    return deferrals


class _Path(NamedTuple):
    """The values on the path of one operator's partial result, and its ends."""

    maker: int
    members: set[int]
    ends: set[int]


def _meeting(paths: Iterable[_Path]) -> list[list[_Path]]:
    """Groups the paths that share values."""
    groups: dict[int, list[_Path]] = {}
    group_of: dict[int, int] = {}
    joined: list[int] = []

    def root(group: int) -> int:
        while joined[group] != group:
            joined[group] = group = joined[joined[group]]
        return group

    for number, path in enumerate(paths):
        met = sorted({root(group_of[v]) for v in path.members if v in group_of})
        groups[number] = [*(p for g in met for p in groups.pop(g)), path]
        joined.append(number)
        for group in met:
            joined[group] = number
        group_of.update(dict.fromkeys(path.members, number))
    return list(groups.values())


class _Finder:
    def __init__(self, program: Program, graph: OperatorGraph) -> None:
        self.program = program
        self.graph = graph
        self.sources = program.by_index()
        self.inside = _nested_equations(program.body)
        # Products of two partial values. Such a product is not linear, so its operands
        # must be summed first.
        self.products: set[int] = set()
        # Operators of the update that only add gradients, or scale gradients before
        # they are added.
        self.joins: frozenset[int] = frozenset()
        self.outputs = frozenset(graph.outputs)
        self.readers = readers(graph.operators)
        self.producer = producers(graph.operators)

    def run(self) -> tuple[Deferral, ...]:
        makers = [
            op
            for op in self.graph.operators
            if op.role is Role.BACKWARD and self.contributes(op)
        ]
        self.joins = self.adding_up(self.partial(makers))
        partial = self.partial(makers)
        self.products.update(
            op.index
            for op in self.graph.operators
            if op.kind == "mul" and partial.issuperset(op.inputs)
        )
        found = [self.deferral(paths) for paths in _meeting(map(self.path, makers))]
        return tuple(sorted(found, key=lambda d: self.producer[d.ends[0]].index))

    def partial(self, makers: Sequence[Operator]) -> set[int]:
        """Returns the values on the paths of partial results from all makers."""
        return set[int]().union(*(self.path(op).members for op in makers))

    def deferral(self, paths: Sequence[_Path]) -> Deferral:
        order = self.position
        members = set[int]().union(*(p.members for p in paths))
        ends = sorted(set[int]().union(*(p.ends for p in paths)), key=order)
        reach = {p.maker: tuple(sorted(p.ends, key=order)) for p in paths}
        hoisted = any(self.producer[v].kind == "carry" for v in members)
        members.update(self.carried_in(members))
        return Deferral(
            tuple(ends),
            tuple(sorted(reach.items())),
            frozenset(members),
            hoisted,
            frozenset(v for v in ends if self.is_gradient(v)),
        )

    def position(self, value: int) -> tuple[int, int]:
        """Returns the operator that computes a value, and the place in its results."""
        op = self.producer[value]
        return op.index, op.outputs.index(value)

    def is_gradient(self, value: int) -> bool:
        """Returns whether only the update or the caller reads a backward value."""
        if self.is_nested(self.producer[value]):
            return False
        readers = [op for op, _ in self.readers.get(value, [])]
        roles = {op.role for op in readers if op.kind != "return"}
        return Role.UPDATE in roles or (bool(readers) and not roles)

    def is_nested(self, op: Operator) -> bool:
        """Returns whether an operator's results are computed inside a loop or branch.

        The result of a loop itself belongs to the region that contains the loop.
        """
        return op.equation in self.inside

    def contributes(self, op: Operator) -> bool:
        """Returns whether an operator can produce partial sums, shard by shard."""
        if op.kind not in CONTRACTIONS or op.rule.reduction != "sum":
            return False
        if len(op.outputs) != 1 or not op.rule.reduced_factors:
            return False
        if not self.graph.values[op.outputs[0]].floating:
            return False
        eqn = self.sources[op.equation]
        if op.kind == "conv_general_dilated":
            return not shardy.is_grouped(eqn.params)
        return op.kind != "scatter-add" or self.is_zero(eqn.inputs[0])

    def is_zero(self, atom: int | Scalar) -> bool:
        """Returns whether all elements of a value are zero."""
        if isinstance(atom, Scalar):
            return bool(atom.value == 0)
        op = self.producer[atom]
        if op.kind not in ("broadcast_in_dim", "convert_element_type", "copy"):
            return False
        return self.is_zero(self.sources[op.equation].inputs[0])

    def path(self, maker: Operator) -> _Path:
        """Follows the result of an operator to the values that need its sum."""
        members: set[int] = set()
        ends: set[int] = set()
        left = [maker.outputs[0]]
        while left:
            value = left.pop()
            members.add(value)
            following = self.next(value)
            left.extend(following)
            if not following:
                ends.add(value)
        return _Path(maker.index, members, ends)

    def next(self, value: int) -> tuple[int, ...]:
        """Returns the values that become partial with a value.

        The result is () if the value must be summed before its reader.
        """
        readers = self.readers.get(value, [])
        if len(readers) != 1:
            return ()
        op, slot = readers[0]
        if op.kind == "carry":
            return op.outputs[-1:] if self.accumulates(op, value) else ()
        if op.kind == "stack_step":
            return op.outputs
        return op.outputs if self.passes(op, slot) else ()

    def passes(self, op: Operator, slot: int) -> bool:
        """Returns whether a forward or backward operator is linear in an operand."""
        joins = op.role is Role.BACKWARD or op.index in self.joins
        if not self.is_nested(op) and not joins:
            return False
        if any(self.leaves(v) for v in op.outputs):
            return False
        if not self.graph.values[op.outputs[0]].floating:
            return False
        if op.kind in ADDITIVE:
            return True
        if op.kind in UNARY:
            return slot == 0
        if op.kind == "select_n":
            return slot > 0
        if op.kind == "mul":
            return op.index not in self.products
        padding = op.kind == "pad" and slot == 0
        return padding and self.is_zero(self.sources[op.equation].inputs[1])

    def leaves(self, value: int) -> bool:
        """Returns whether the program returns a value that must not be partial.

        Only a sum over microbatches may be partial: it leaves the program as a running
        sum.
        """
        return value in self.outputs and value not in self.graph.accumulated

    def adding_up(self, partial: set[int]) -> frozenset[int]:
        """Returns the operators after the backward pass that add up partial values.

        A step that runs microbatches one by one adds their gradients. A step with
        several losses adds gradients too. An operator that scales a gradient by a
        constant is included if its result is added.

        Args:
          partial: the values on the paths through the backward pass.
        """
        linear, scaling = set(partial), dict[int, int]()
        out: set[int] = set()
        for op in self.graph.operators:
            if op.role is Role.BACKWARD or len(op.outputs) != 1 or self.is_nested(op):
                continue
            known = [v for v in op.inputs if v is not None]
            if op.kind in ADDITIONS:
                # If a value has other readers, its sum over devices is computed before
                # this operator.
                alone = {v for v in known if v in linear and len(self.readers[v]) == 1}
                if alone and all(v in alone or self.is_zero(v) for v in known):
                    linear.add(op.outputs[0])
                    out.add(op.index)
            elif op.kind in SCALING and len(known) == 1 and known[0] in linear:
                linear.add(op.outputs[0])
                scaling[op.outputs[0]] = op.index
        for value, index in reversed(scaling.items()):
            readers = {op.index for op, _ in self.readers.get(value, [])}
            if readers and readers <= out:
                out.add(index)
        return frozenset(out)

    def accumulates(self, carry: Operator, end: int) -> bool:
        """Returns whether a loop only adds to a carry that nothing else reads.

        Only additions may lead from the carry's value at the start of an iteration to
        its value at the end. No other operator may read a value in between, and the
        condition of a `while` may not either. A loop that is expected to run less than
        once keeps its sums, because one sum after the loop would be computed more
        often.
        """
        outside, inside = carry.input_trips
        if inside < outside:
            return False
        if carry.inputs[-1] != end or len(set(carry.inputs)) != len(carry.inputs):
            return False
        inner, *tested, _ = carry.outputs
        if any(self.readers.get(v) for v in tested):
            return False
        value = inner
        while value != end:
            readers = self.readers.get(value, [])
            if len(readers) != 1:
                return False
            op, _ = readers[0]
            if op.kind not in ADDITIONS or not self.is_nested(op):
                return False
            value = op.outputs[0]
        return True

    def carried_in(self, members: set[int]) -> Iterator[int]:
        """Yields the values of an iteration from a carry to the addition to this carry.

        A deferral moves this sum out of the loop.
        """
        for value in list(members):
            op = self.producer[value]
            if op.kind != "carry" or value != op.outputs[-1]:
                continue
            inner = op.outputs[0]
            while inner not in members:
                yield inner
                ((reader, _),) = self.readers[inner]
                inner = reader.outputs[0]


def _nested_equations(body: Region) -> set[int]:
    """Returns the equations inside other equations."""
    top = {e.index for e in body.equations}
    return {e.index for e in walk(body)} - top
