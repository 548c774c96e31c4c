"""The best pipeline found so far, and the choice of layers that a pipeline recomputes.

A pipeline's schedule is simulated only if the pipeline may be better than the best
pipeline so far.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_solver.stages.check import (
    evaluate_pipeline,
    is_possible,
    lower_bound_s,
    task_seconds,
)
from autopar_solver.stages.entries import kept_microbatches
from autopar_solver.stages.problem import Pipeline, PipelineCost, StageProblem
from autopar_solver.stages.recompute import choose_recomputed
from autopar_solver.stages.schedules.order import ScheduleKind, make_table
from autopar_solver.stages.schedules.play import count_alive


class PipelineIncumbent:
    """Keeps the pipeline with the shortest step among those that were offered."""

    def __init__(self, problem: StageProblem, below_s: float = math.inf) -> None:
        """Starts without a pipeline. Steps of ``below_s`` or more are ignored."""
        self.problem, self.below_s = problem, below_s
        self.pipeline: Pipeline | None = None
        self.cost: PipelineCost | None = None
        self._seen = set[Pipeline]()

    @property
    def step_s(self) -> float:
        """The shortest step found; ``below_s`` before a pipeline is found."""
        return self.below_s if self.cost is None else self.cost.step_s

    def offer(self, pipeline: Pipeline) -> None:
        """Simulates a new pipeline if it may be better; keeps the better pipeline."""
        if pipeline in self._seen:
            return
        self._seen.add(pipeline)
        seconds = task_seconds(self.problem, pipeline)
        if not is_possible(seconds) or lower_bound_s(pipeline, seconds) >= self.step_s:
            return
        cost = evaluate_pipeline(self.problem, pipeline)
        if cost.fits and cost.step_s < self.step_s:
            self.pipeline, self.cost = pipeline, cost


def complete_pipeline(problem: StageProblem, pipeline: Pipeline) -> Pipeline | None:
    """Adds the least recomputation that makes a pipeline fit; None if it cannot fit.

    More recomputation never shortens a step, so each stage recomputes as few seconds as
    it can.
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
    """The layers of one stage that must be recomputed; None if the stage cannot fit."""
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
        # This adds the maxima of the chunks, although they occur at different times.
        held = count_alive(table, stage).held.max(axis=0)
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
