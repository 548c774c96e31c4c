"""The best pipeline found so far; pipelines are played only if they may be better."""

import math

from autopar_solver.stages.check import (
    evaluate_pipeline,
    is_possible,
    lower_bound_s,
    task_seconds,
)
from autopar_solver.stages.problem import StageProblem
from autopar_solver.stages.solution import Pipeline, PipelineCost


class PipelineIncumbent:
    """Keeps the shortest step of the pipelines that it was offered."""

    def __init__(self, problem: StageProblem, below_s: float = math.inf) -> None:
        """Nothing is found yet; steps of ``below_s`` or more are of no interest."""
        self.problem, self.below_s = problem, below_s
        self.pipeline: Pipeline | None = None
        self.cost: PipelineCost | None = None
        self._seen = set[Pipeline]()

    @property
    def step_s(self) -> float:
        """The shortest step; before there is one, that below which it must be."""
        return self.below_s if self.cost is None else self.cost.step_s

    def offer(self, pipeline: Pipeline) -> None:
        """Plays a pipeline that is new and may be shorter, and keeps the better."""
        if pipeline in self._seen:
            return
        self._seen.add(pipeline)
        seconds = task_seconds(self.problem, pipeline)
        if not is_possible(seconds) or lower_bound_s(pipeline, seconds) >= self.step_s:
            return
        cost = evaluate_pipeline(self.problem, pipeline)
        if cost.fits and cost.step_s < self.step_s:
            self.pipeline, self.cost = pipeline, cost
