"""The communication of an assignment, collective by collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.planner.assignment import Assignment
from autopar.planner.layout import Layout, Step, reshard_steps
from autopar.planner.nodes import MIN_ELEMENTS
from autopar.planner.price import Pricer
from autopar_passes.graph import Operator


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a planned step.

    Attributes:
      step: what is done; `Step.fraction` times ``nbytes`` is its charged size.
      nbytes: bytes of the whole, unsharded array.
      trips: how often it runs in a step.
      value: the array.
      operator: the operator that makes the partial result, or the first to
        read the resharded one.
    """

    step: Step
    nbytes: int
    trips: float
    value: int
    operator: int

    def seconds(self, pricer: Pricer) -> float:
        """Seconds of all its runs in one step."""
        return self.trips * pricer.step_s(self.step, self.nbytes)

    def sent_bytes(self, pricer: Pricer) -> float:
        """Bytes that one device sends for it in one step."""
        return self.trips * pricer.step_bytes(self.step, self.nbytes)


def traffic(assignment: Assignment) -> list[Collective]:
    """Lists the collectives of one step, in program order."""
    graph = assignment.graph
    out: list[Collective] = []
    seen: set[tuple[object, ...]] = set()
    for op in graph.operators:
        if op.kind == "return" or op.class_index not in assignment.contraction.node_of:
            continue
        for slot, value in enumerate(op.inputs):
            if value is not None:
                layout = assignment.layout(op, op.rule.operands[slot])
                trips = op.input_trips[slot]
                out.extend(_reading(assignment, seen, op, value, layout, trips))
        for slot, value in enumerate(op.outputs):
            nbytes = graph.values[value].nbytes
            out.extend(
                Collective(step, nbytes, op.trips, value, op.index)
                for step in assignment.result_steps(op, slot)
                if step.kind != "slice"
            )
    last = graph.operators[-1]
    for position, value in enumerate(graph.outputs):
        layout = assignment.output(position)
        if value is not None and layout is not None:
            out.extend(_reading(assignment, seen, last, value, layout, 1.0))
    return out


def _reading(
    assignment: Assignment,
    seen: set[tuple[object, ...]],
    op: Operator,
    value: int,
    layout: Layout,
    trips: float,
) -> Iterator[Collective]:
    """The collectives that bring a value to one reader, each form made once."""
    backward = assignment.is_backward(op)
    for source, wanted in sources_of(assignment, value, layout):
        for name, start, target, _ in assignment.legs(source, wanted, backward):
            key = (source, name, target)
            if key in seen or start == target:
                continue
            seen.add(key)
            nbytes = assignment.graph.values[source].nbytes
            for step in reshard_steps(start, target, (), "", assignment.sizes):
                if step.kind != "slice":
                    yield Collective(step, nbytes, trips, source, op.index)


def sources_of(
    assignment: Assignment, value: int, layout: Layout
) -> list[tuple[int, Layout]]:
    """Looks through floating values: the values with a home that a reader needs."""
    graph, contraction = assignment.graph, assignment.contraction
    if graph.values[value].size < MIN_ELEMENTS:
        return []
    if value not in contraction.floating:
        return [(value, layout)] if value in contraction.homes else []
    op = contraction.producer[value]
    given = _axes_of(op.rule.results[0], layout)
    out: list[tuple[int, Layout]] = []
    for operand, dims in zip(op.inputs, op.rule.operands, strict=True):
        if operand is not None:
            inner = tuple(given.get(d[0], ()) if d else () for d in dims)
            out.extend(sources_of(assignment, operand, inner))
    return out


def _axes_of(dims: Sequence[tuple[int, ...]], layout: Layout) -> dict[int, tuple[int, ...]]:
    return {d[0]: axes for d, axes in zip(dims, layout, strict=True) if d}
