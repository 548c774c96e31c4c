"""Our plan beside expert plans, under one cost model."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.planner.candidate import SearchResult
from autopar.planner.experts import Expert, expert_plans
from autopar.planner.search import search
from autopar.steps.analysis import Analysis


def compare(
    analysis: Analysis, cluster: Cluster, *, seconds: float | None = None
) -> tuple[SearchResult, list[Expert]]:
    """Plans a step and solves every expert plan; experts warm-start our search.

    Every expert plan is a point of our search space, so the search starts from
    the best of them and its result is never slower.

    Args:
      analysis: the step.
      cluster: what to plan for.
      seconds: time limit of the solver, for each mesh and plan.
    """
    experts = expert_plans(analysis, cluster, seconds=seconds)
    starts = [e.candidate for e in experts if e.candidate is not None]
    return search(analysis, cluster, seconds=seconds, starts=starts), experts
