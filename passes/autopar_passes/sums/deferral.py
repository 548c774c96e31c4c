"""Finds reductions that can wait: partial gradients on their way to their reader.

An operator that contracts a factor which the plan splits leaves a *partial*
result on each device. Where that result only flows through linear operators and
is added up, in a loop or with others, the sum over devices may wait until
somebody reads it in earnest: then it is taken once, and, for a gradient, in
whatever form the plan wants to send it. A `Deferral` is such a way, a tree of
values that ends in the one where the sum is due.

Which ways exist depends on the program only; whether a plan may take one
depends on its layouts (`autopar.planner.deferred`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Constant, Program, Region, walk
from autopar_passes.rules import convolution

# Operators that make partial results when a factor they reduce is split.
CONTRACTIONS = frozenset(
    {"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add"}
)
# Linear in every operand together.
ADDITIVE = frozenset({"add", "add_any", "sub", "concatenate"})
# Linear in their first operand, the others only say how.
UNARY = frozenset(
    {
        "neg", "transpose", "reshape", "convert_element_type", "reduce_sum", "copy",
        "squeeze", "expand_dims", "rev", "slice", "split", "div",
    }
)  # fmt: skip


# Of these, and products, with a constant.
_SCALING = frozenset({"mul", "div", "neg", "convert_element_type"})


@dataclasses.dataclass(frozen=True, slots=True)
class Deferral:
    """Ways of partial results that meet, up to the values where their sums are due.

    Attributes:
      ends: the values whose sums are due, in program order.
      reach: the operators that make the partial results, each with the ends that
        its result flows into.
      members: every value on the way, the ends among them.
      hoisted: whether a sum would otherwise be taken more often, in a loop that
        accumulates it.
      gradients: those ends that the update reads of the backward pass, once in a
        step.
    """

    ends: tuple[int, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...]
    members: frozenset[int]
    hoisted: bool
    gradients: frozenset[int]

    @property
    def contributions(self) -> tuple[int, ...]:
        """The operators that make the partial results."""
        return tuple(op for op, _ in self.reach)

    def sharing(self, end: int) -> int:
        """How many operators contribute to an end."""
        return sum(end in ends for _, ends in self.reach)


def find_deferrals(program: Program, graph: OperatorGraph) -> tuple[Deferral, ...]:
    """Returns the ways of a program, in program order."""
    return _Finder(program, graph).run()


class _Finder:
    def __init__(self, program: Program, graph: OperatorGraph) -> None:
        self.program = program
        self.graph = graph
        self.sources = {e.index: e for e in walk(program.body)}
        self.inside = _nested(program.body)
        # Products of two partial values: a product of sums is no sum of products.
        self.products: set[int] = set()
        # Operators of the update that only add gradients up, or scale them for that.
        self.joins: frozenset[int] = frozenset()
        self.readers: dict[int, list[tuple[Operator, int]]] = {}
        self.producer: dict[int, Operator] = {}
        for op in graph.operators:
            self.producer.update((v, op) for v in op.outputs)
            for slot, value in enumerate(op.inputs):
                if value is not None:
                    self.readers.setdefault(value, []).append((op, slot))

    def run(self) -> tuple[Deferral, ...]:
        makers = [
            op
            for op in self.graph.operators
            if op.role is Role.BACKWARD and self.contributes(op)
        ]
        partial = set[int]().union(*(self.way(op)[0] for op in makers))
        self.joins = self.adding_up(partial)
        partial = set[int]().union(*(self.way(op)[0] for op in makers))
        self.products.update(
            op.index
            for op in self.graph.operators
            if op.kind == "mul" and partial.issuperset(op.inputs)
        )
        ways = [(op.index, *self.way(op)) for op in makers]
        groups: list[list[tuple[int, set[int], set[int]]]] = []
        for way in ways:
            met = [g for g in groups if any(way[1] & other[1] for other in g)]
            rest = [g for g in groups if g not in met]
            groups = [*rest, [*(w for g in met for w in g), way]]
        found = [self.deferral(g) for g in groups]
        return tuple(sorted(found, key=lambda d: self.producer[d.ends[0]].index))

    def deferral(self, ways: Sequence[tuple[int, set[int], set[int]]]) -> Deferral:
        order = self.position
        members = set[int]().union(*(m for _, m, _ in ways))
        ends = sorted(set[int]().union(*(e for _, _, e in ways)), key=order)
        hoisted = any(self.producer[v].kind == "carry" for v in members)
        members.update(self.carried_in(members))
        return Deferral(
            tuple(ends),
            tuple((op, tuple(sorted(e, key=order))) for op, _, e in sorted(ways)),
            frozenset(members),
            hoisted,
            frozenset(v for v in ends if self.is_gradient(v)),
        )

    def position(self, value: int) -> tuple[int, int]:
        """Where a value is made: its operator, and its place among the results."""
        op = self.producer[value]
        return op.index, op.outputs.index(value)

    def is_gradient(self, value: int) -> bool:
        """Whether only the update, or the caller, reads a value of the backward."""
        if self.nested(self.producer[value]):
            return False
        readers = [op for op, _ in self.readers.get(value, [])]
        roles = {op.role for op in readers if op.kind != "return"}
        return Role.UPDATE in roles or (bool(readers) and not roles)

    def nested(self, op: Operator) -> bool:
        """Whether an operator's results are made inside a loop or branch.

        What a loop hands out is made where the loop stands.
        """
        return op.equation in self.inside

    def contributes(self, op: Operator) -> bool:
        """Whether the operator can run shard by shard and leave partial sums."""
        if op.kind not in CONTRACTIONS or op.rule.reduction != "sum":
            return False
        if len(op.outputs) != 1 or not op.rule.reduced:
            return False
        value = self.graph.values[op.outputs[0]]
        extended = jax_compat.is_extended(value.dtype)
        if extended or not jnp.issubdtype(value.dtype, jnp.floating):
            return False
        eqn = self.sources[op.equation]
        if op.kind == "conv_general_dilated":
            return not convolution.is_grouped(eqn.params)
        return op.kind != "scatter-add" or self.is_zero(eqn.inputs[0])

    def is_zero(self, atom: int | Constant) -> bool:
        """Whether a value is made of zeros only."""
        if isinstance(atom, Constant):
            return bool(atom.value == 0)
        op = self.producer[atom]
        if op.kind not in ("broadcast_in_dim", "convert_element_type", "copy"):
            return False
        return self.is_zero(self.sources[op.equation].inputs[0])

    def way(self, op: Operator) -> tuple[set[int], set[int]]:
        """The values that an operator's result flows into, and where it ends."""
        members: set[int] = set()
        ends: set[int] = set()
        left = [op.outputs[0]]
        while left:
            value = left.pop()
            members.add(value)
            following = self.next(value)
            left.extend(following)
            if not following:
                ends.add(value)
        return members, ends

    def next(self, value: int) -> tuple[int, ...]:
        """The values that take a partial one up whole; none where its sum is due."""
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
        """Whether an operator is linear in an operand and not yet the update."""
        joins = op.role is Role.BACKWARD or op.index in self.joins
        if not self.nested(op) and not joins:
            return False
        if any(v in self.graph.outputs for v in op.outputs):
            return False
        dtype = self.graph.values[op.outputs[0]].dtype
        if jax_compat.is_extended(dtype) or not jnp.issubdtype(dtype, jnp.floating):
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

    def adding_up(self, partial: set[int]) -> frozenset[int]:
        """The operators behind the backward pass that add partial values to others.

        A step that goes through microbatches one by one adds their gradients up, and
        so does one with several losses. What scales a gradient by a constant belongs
        to it where the result is added up.

        Args:
          partial: the values on the ways through the backward pass.
        """
        linear, scaling = set(partial), dict[int, int]()
        out: set[int] = set()
        for op in self.graph.operators:
            if op.role is Role.BACKWARD or len(op.outputs) != 1 or self.nested(op):
                continue
            known = [v for v in op.inputs if v is not None]
            if op.kind in ("add", "add_any"):
                # What is read elsewhere too is summed before.
                alone = {v for v in known if v in linear and len(self.readers[v]) == 1}
                if alone and all(v in alone or self.is_zero(v) for v in known):
                    linear.add(op.outputs[0])
                    out.add(op.index)
            elif op.kind in _SCALING and len(known) == 1 and known[0] in linear:
                linear.add(op.outputs[0])
                scaling[op.outputs[0]] = op.index
        for value, index in reversed(scaling.items()):
            readers = {op.index for op, _ in self.readers.get(value, [])}
            if readers and readers <= out:
                out.add(index)
        return frozenset(out)

    def accumulates(self, carry: Operator, end: int) -> bool:
        """Whether a loop only adds to a carry, which nothing else reads.

        The first value inside must run into the last by additions and be read
        by nothing else on its way, nor by the condition of a `while`.
        """
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
            if op.kind not in ("add", "add_any") or not self.nested(op):
                return False
            value = op.outputs[0]
        return True

    def carried_in(self, members: set[int]) -> Iterator[int]:
        """What a loop hands from one iteration to the next, up to where it is added."""
        for value in list(members):
            op = self.producer[value]
            if op.kind != "carry" or value != op.outputs[-1]:
                continue
            inner = op.outputs[0]
            while inner not in members:
                yield inner
                ((reader, _),) = self.readers[inner]
                inner = reader.outputs[0]


def _nested(body: Region) -> set[int]:
    """The equations inside of others."""
    top = {e.index for e in body.equations}
    return {e.index for e in walk(body)} - top


def contributions_of(
    deferrals: Sequence[Deferral],
) -> dict[int, Deferral]:
    """The deferral of each contributing operator."""
    return {op: d for d in deferrals for op, _ in d.reach}
