"""Completes a pipeline by the layers that must be computed again to fit."""

import dataclasses

import numpy as np

from autopar_solver.stages.entries import kept_microbatches
from autopar_solver.stages.problem import StageProblem
from autopar_solver.stages.recompute import choose_recomputed
from autopar_solver.stages.schedules.check import alive
from autopar_solver.stages.schedules.order import make_table
from autopar_solver.stages.schedules.tasks import ScheduleKind
from autopar_solver.stages.solution import Pipeline


def complete(problem: StageProblem, pipeline: Pipeline) -> Pipeline | None:
    """The pipeline that computes least again and fits; None if none fits.

    A step never gets shorter by computing more again, so each device group takes the
    fewest seconds on its own.
    """
    again = list[int]()
    for stage in range(pipeline.stages):
        chosen = _layers_again(problem, pipeline, stage)
        if chosen is None:
            return None
        again.extend(chosen)
    return dataclasses.replace(pipeline, recomputed=tuple(sorted(again)))


def _layers_again(
    problem: StageProblem, pipeline: Pipeline, stage: int
) -> tuple[int, ...] | None:
    """The layers of one device group that must be computed again; None if in vain."""
    costs = problem.costs_of(pipeline.microbatches)
    option, layers = pipeline.options[stage], pipeline.layers(stage)
    resident = float(costs.resident_bytes[list(layers), option].sum())
    for shared in problem.shared:
        if shared.target in layers and shared.source not in layers:
            resident += float(shared.copy_bytes[option])
    schedule, count = pipeline.schedule, pipeline.microbatches
    weights: list[int] | None = None
    if schedule.kind is ScheduleKind.INTERLEAVED:
        table = make_table(schedule, pipeline.stages, count)
        # The most of each chunk, though not all chunks have their most at once.
        held = alive(table, stage).held.max(axis=0)
        sizes = np.diff(pipeline.cuts)[stage :: pipeline.stages]
        weights = np.repeat(held, sizes).tolist()
        fixed = [(resident, 1.0)]
    else:
        later = pipeline.stages - stage
        kept = kept_microbatches(schedule, count, later, pipeline.stages)
        pending = float(costs.pending[list(layers), option].sum())
        fixed = [(resident + wait * pending, float(held)) for held, wait in kept]
    found = choose_recomputed(problem, costs, layers, option, fixed, weights)
    return None if found is None else found.layers
