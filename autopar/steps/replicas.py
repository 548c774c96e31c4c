"""The analysis of one replica of a step whose microbatches are dealt out to several.

Every replica has the whole program and a loop of its own number of turns
(`autopar_passes.replay.replicas`).
"""

from __future__ import annotations

import dataclasses

from autopar.errors import PlanError
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import Operator
from autopar_passes.jax_effects import is_ordered
from autopar_passes.microbatches.facts import Combine
from autopar_passes.program.equations import Equation, walk
from autopar_passes.replay.replicas import can_add_up
from autopar_passes.rules import manual


def check_can_be_dealt_out(analysis: Analysis) -> None:
    """Checks that replicas may run unequal numbers of a step's microbatches.

    Args:
      analysis: of the step in its microbatches.

    Raises:
      PlanError: they may not, with the reason.
    """
    name = analysis.pytrees.name
    if analysis.split is None or analysis.pytrees.loop is None:
        raise PlanError(
            f"{name}: microbatches are dealt out to replicas of unequal devices, and "
            "the batch is not split. Say microbatches='auto', or a number."
        )
    program = analysis.split.traced.program
    for crossing in analysis.split.crossings:
        dtype = program.values[crossing.value].dtype
        if crossing.combine is Combine.ROWS and not can_add_up(dtype):
            raise PlanError(
                f"{name}: it returns random keys for each row ({dtype}), which "
                "replicas of unequal devices cannot put together."
            )
    repeated = walk(_loop(analysis).regions[0])
    if any(is_ordered(e.source) for e in repeated):
        raise PlanError(
            f"{name}: it calls the host in order, and replicas of unequal devices run "
            "at the same time. Give ordered=False."
        )
    if any(e.primitive == manual.PRIMITIVE for e in repeated):
        raise PlanError(
            f"{name}: it has a shard_map of its own, over all devices of a mesh; "
            "replicas of unequal devices each run a part of them."
        )


def with_turns(analysis: Analysis, turns: int) -> Analysis:
    """Returns the analysis of a replica that runs so many of the microbatches.

    What runs for each microbatch runs less often; all else stays, sizes too. It has the
    sums over replicas behind the loop (`autopar.cost.replicas`).

    Args:
      analysis: of the step in its microbatches.
      turns: how many of them the replica runs.
    """
    count, loop = analysis.microbatches, _loop(analysis)
    inside = {e.index for e in walk(loop.regions[0])}
    operators = tuple(
        _scale_operator(op, turns / count)
        if op.equation in inside
        else _at_boundary(op, count, turns)
        if op.equation == loop.index
        else op
        for op in analysis.graph.operators
    )
    graph = dataclasses.replace(analysis.graph, operators=operators)
    return dataclasses.replace(analysis.with_operators(graph), turns=turns)


def _loop(analysis: Analysis) -> Equation:
    """The equation that goes through the microbatches."""
    index = analysis.pytrees.loop
    return next(e for e in analysis.program.body.equations if e.index == index)


def _scale_operator(op: Operator, factor: float) -> Operator:
    return dataclasses.replace(
        op,
        trips=op.trips * factor,
        input_trips=tuple(trips * factor for trips in op.input_trips),
    )


def _at_boundary(op: Operator, count: int, turns: int) -> Operator:
    """An operator at the loop's boundary: it runs once, or in each turn."""

    def trips(before: float) -> float:
        return float(turns) if before == count else before

    return dataclasses.replace(
        op, trips=trips(op.trips), input_trips=tuple(map(trips, op.input_trips))
    )
