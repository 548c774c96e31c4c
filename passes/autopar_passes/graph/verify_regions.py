"""Checks the regions of a graph: nesting, what they read, how often they run.

A region is the body of a loop or the branches of a ``cond``: all operators from
the first boundary operator of an equation to the last operator, ``until``.
"""

from __future__ import annotations

import dataclasses
import math

from autopar_passes.graph.errors import failure
from autopar_passes.graph.operators import (
    BOUNDARIES,
    Operator,
    OperatorGraph,
    producers,
)


@dataclasses.dataclass(slots=True)
class _Region:
    """One region, or the whole step.

    Attributes:
      equation: the equation that it belongs to.
      until: its last operator.
      outer: the region around it; None for the whole step.
      outer_trips: how often its equation runs; None where that is not known yet.
      inner_trips: how often its operators run; None likewise.
    """

    equation: int
    until: int
    outer: _Region | None
    outer_trips: float | None = None
    inner_trips: float | None = None


def check_regions(graph: OperatorGraph) -> None:
    """Checks the regions of a graph.

    * Regions are nested; their boundary operators agree where they end.
    * A value is made before it is read, but for the end of an iteration, which a
      carry reads before the body makes it.
    * A region reads what its boundary operators hand in, and inputs of the step.
    * Trips are finite and not negative (a loop may run no iteration at all), and
      operators of one region run equally often.

    Raises:
      GraphError: one of them does not hold.
    """
    regions = _find_regions(graph)
    _check_reads(graph, regions)
    for k, op in enumerate(graph.operators):
        _check_trips(graph, k, op, regions[k])


def _find_regions(graph: OperatorGraph) -> list[_Region]:
    """Returns the region of each operator; a boundary operator is in its own."""
    here = _Region(-1, len(graph.operators) - 1, None, 1.0, 1.0)
    out: list[_Region] = []
    ended: set[int] = set()
    for k, op in enumerate(graph.operators):
        while k > here.until and here.outer is not None:
            ended.add(here.equation)
            here = here.outer
        if op.kind not in BOUNDARIES:
            if op.until != -1:
                raise failure(graph, k, f"it has no region, but ends one at {op.until}")
        elif op.equation != here.equation:
            if op.equation in ended or not k <= op.until <= here.until:
                raise failure(
                    graph, k, f"its region ends at {op.until}, the outer one at "
                    f"{here.until}",
                )  # fmt: skip
            here = _Region(op.equation, op.until, here)
        elif op.until != here.until:
            raise failure(graph, k, f"its region ends at {op.until} and {here.until}")
        out.append(here)
    return out


def _check_reads(graph: OperatorGraph, regions: list[_Region]) -> None:
    made_by = producers(graph.operators)
    for k, op in enumerate(graph.operators):
        for slot, value in enumerate(op.inputs):
            if value is None:
                continue
            maker = made_by.get(value)
            if maker is None:
                raise failure(graph, k, f"%{value} is made by no operator")
            ends = op.kind == "carry" and slot == 1
            if maker.index > op.until if ends else maker.index >= k:
                raise failure(
                    graph, k, f"%{value} is read before {maker.index} makes it"
                )
            known = _made_in(maker, value, regions[maker.index])
            wanted = _read_in(op, slot, regions[k])
            if known is not wanted and maker.kind != "input":
                raise failure(
                    graph, k, f"%{value} of {maker.index} is not in its region"
                )


def _made_in(maker: Operator, value: int, region: _Region) -> _Region | None:
    """Returns the region that knows a value."""
    match maker.kind:
        case "stack_step" | "merge":
            return region.outer
        case "carry":
            return region.outer if value == maker.outputs[-1] else region
        case _:
            return region


def _read_in(reader: Operator, slot: int, region: _Region) -> _Region | None:
    """Returns the region in which an operand is read."""
    match reader.kind:
        case "enter" | "slice_step":
            return region.outer
        case "carry":
            return region.outer if slot == 0 else region
        case _:
            return region


def _check_trips(graph: OperatorGraph, k: int, op: Operator, region: _Region) -> None:
    if len(op.input_trips) != len(op.inputs):
        raise failure(graph, k, f"it has {len(op.input_trips)} trips of its operands")
    if not all(0 <= trips < math.inf for trips in (op.trips, *op.input_trips)):
        raise failure(
            graph, k, f"it runs {op.trips} times, reads {op.input_trips} times"
        )
    outer, inner, reads = _trips(op, region)
    if op.input_trips != reads:
        raise failure(
            graph, k, f"it runs {op.trips} times, reads {op.input_trips} times"
        )
    if op.kind in BOUNDARIES:
        assert region.outer is not None
        _agree(graph, k, region.outer, "inner_trips", outer)
        _agree(graph, k, region, "outer_trips", outer)
    _agree(graph, k, region, "inner_trips", inner)


def _trips(
    op: Operator, region: _Region
) -> tuple[float | None, float | None, tuple[float, ...]]:
    """Returns how often an operator's equation and body run, and its reads."""
    every = (op.trips,) * len(op.inputs)
    match op.kind:
        case "enter":
            return op.trips, None, every
        case "carry":
            return op.trips, op.input_trips[1], (op.trips, op.input_trips[1])
        case "slice_step":
            return op.input_trips[0], op.trips, (op.input_trips[0],)
        case "stack_step":
            return None, op.trips, every
        case "merge":
            return op.trips, op.trips, every
        case _:
            return None, op.trips, every


def _agree(
    graph: OperatorGraph, k: int, region: _Region, name: str, trips: float | None
) -> None:
    """Checks, or notes, how often a region runs."""
    known = getattr(region, name)
    if known is None:
        setattr(region, name, trips)
    elif trips is not None and trips != known:
        raise failure(graph, k, f"it runs {trips} times, its region {known} times")
