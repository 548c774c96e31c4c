"""The buffers of one step on one device, without those of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autopar.cost.brought import Brought
from autopar.cost.joined_sums import sending_times
from autopar.cost.local import Buffer, local_bytes
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.steps.lifetimes import Lifetimes
from autopar.steps.widening import WIDER, is_narrow
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import Role


def buffers(
    assignment: Assignment, life: Lifetimes, only: Sequence[int] | None = None
) -> list[Buffer]:
    """Lists the buffers of one step, without those of the inputs.

    Args:
      assignment: strategies as layouts.
      life: when values are made and last needed.
      only: the operators that count, as makers and as readers; None: all of them.
    """
    graph = assignment.graph
    among = graph.operators if only is None else [graph.operators[k] for k in only]
    sent = sending_times(assignment, life, among)
    together: dict[int, list[int]] = {}
    for value, time in sent.items():
        together.setdefault(time, []).append(value)
    messages = tuple(map(life.replacing.together, together.values()))
    brought = Brought(assignment, life, messages)
    for op in among:
        for reading in assignment.analysis.readings.of[op.index]:
            brought.read(op, reading)
    homes = _Homes(assignment, life, brought.ends, sent)
    made = (b for op in among for b in homes.of(op))
    return [*brought.buffers(), *made]


@dataclasses.dataclass(frozen=True, slots=True)
class _Homes:
    """The buffers of results, before and after their reduction.

    Attributes:
      assignment: strategies as layouts.
      life: when values are made and last needed.
      ends: when each value is last read.
      sent: when the message runs that carries a sum (`autopar.cost.joined_sums`).
      replaced: results that take the place of inputs.
      kept: results of the step.
    """

    assignment: Assignment
    life: Lifetimes
    ends: Mapping[int, int]
    sent: Mapping[int, int]
    replaced: frozenset[int | None] = dataclasses.field(init=False)
    kept: frozenset[int | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Looks at the outputs of the program."""
        graph = self.assignment.graph
        places = (graph.outputs[i.output] for i in graph.inputs if i.output >= 0)
        object.__setattr__(self, "replaced", frozenset(places))
        object.__setattr__(self, "kept", frozenset(graph.outputs))

    def of(self, op: Operator) -> Iterator[Buffer]:
        """The buffers of what an operator makes."""
        for slot, value in enumerate(op.outputs):
            if value in self.life.written and value not in self.replaced:
                yield from self._result(op, slot)

    def _result(self, op: Operator, slot: int) -> Iterator[Buffer]:
        value = op.outputs[slot]
        start, end = self.life.starts(op, value), self._end(op, value)
        if value in self.assignment.graph.accumulated:
            yield self._accumulator(value, end)
            end = start
        elif value in self.sent:
            yield from self._waiting(op, slot, end)
            return
        home = self.assignment.home_layout(value)
        part = self.life.rounded.part(value)
        nbytes = part * self._bytes(value, home)
        yield Buffer(value, nbytes, start, end, self._kind(op, value, end))
        if op.class_index in self.assignment.contraction.node_of:
            own = self.assignment.layout(op, op.rule.results[slot])
            sizes = self.assignment.sizes
            same = shards(own, sizes) == shards(home, sizes)
            partial = self.assignment.partial(op)
            if not same or partial:
                # Sums over devices are taken before the result is rounded.
                nbytes = (1.0 if partial else part) * self._bytes(value, own)
                yield Buffer(value, nbytes, start, start, "collective buffers")

    def _end(self, op: Operator, value: int) -> int:
        """When a result is last needed where and as it was made."""
        last = len(self.assignment.graph.operators) - 1
        start = self.life.time[op.index]
        end = last if value in self.kept else max(start, self.ends.get(value, start))
        if value in self.life.widened.operands:
            # It is widened after it is made.
            end = max(end, min(start + 1, last))
        return max(end, held_until(op, self.life))

    def _waiting(self, op: Operator, slot: int, end: int) -> Iterator[Buffer]:
        """A gradient that waits for the message of its sum, and the sum.

        The message brings all of the sum to every device, where it is to be split, too.
        """
        value = op.outputs[slot]
        sent = self.sent[value]
        own = self.assignment.layout(op, op.rule.results[slot])
        nbytes = local_bytes(self.assignment, value, own, tiled=self.life.tiled)
        if self.life.widens and is_narrow(self.assignment.graph, value):
            nbytes *= WIDER
        start = self.life.starts(op, value)
        yield Buffer(value, nbytes, start, sent, "collective buffers")
        yield Buffer(value, nbytes, sent, max(sent, end), "gradients")

    def _accumulator(self, value: int, end: int) -> Buffer:
        """What the microbatches of a step add to, from the first of them on."""
        held = self.assignment.stacked(value)
        layout = self.assignment.home_layout(value) if held is None else held[1]
        return Buffer(value, self._bytes(value, layout), 0, end, "gradients")

    def _bytes(self, value: int, layout: tuple[tuple[int, ...], ...]) -> float:
        """Bytes of a result on one device, in the type that it lies in."""
        nbytes = local_bytes(self.assignment, value, layout, tiled=self.life.tiled)
        return WIDER * nbytes if value in self.life.widened.held else nbytes

    def _kind(self, op: Operator, value: int, end: int) -> str:
        """What a result is for that lives until some time."""
        if value in self.kept:
            return "results"
        summing = self.assignment.independent.summing
        if op.role is Role.BACKWARD and op.class_index in summing:
            return "gradients"
        last = self.assignment.graph.operators[self.life.order[end]]
        if op.role is Role.FORWARD and last.role is not op.role:
            return "activations"
        return "temporaries"


def held_until(op: Operator, life: Lifetimes) -> int:
    """The end of the region whose carry or stacked result an operator makes."""
    return -1 if op.kind == "slice_step" else life.until[op.index]
