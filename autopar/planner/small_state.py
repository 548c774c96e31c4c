"""Solves the mesh of the best plan again, its small state free to be split.

The search keeps biases and scales whole (`autopar.planner.problem.small_state`), for
each would be a decision more on every mesh. Where they are many bytes beside the rest
of an update, a plan that splits them is a little faster. So at the end the best mesh
is solved again without that rule, from the plan that is known.
"""

from __future__ import annotations

import dataclasses
import time

from autopar.cost.overlap import discounts
from autopar.garbage import collector_paused
from autopar.planner.candidate import Candidate, candidate_of, choices_of
from autopar.planner.hiding import Weights, best_weights, plane_of
from autopar.planner.problem import Restriction, formulate, small_state
from autopar.planner.ties import tie_broken
from autopar.steps.analysis import Analysis
from autopar_solver import Status, solve

# Problems solved, and the part of the time of a mesh that the solver has for each.
_PROBLEMS, _SHARE = 2, 0.1
# A part of a step that is rounding: a plan that saves no more is the same.
_ROUNDING = 1e-9


@collector_paused()
def with_small_state_split(
    analysis: Analysis,
    found: Candidate,
    restriction: Restriction | None = None,
    seconds: float | None = None,
) -> Candidate:
    """Returns a plan whose small state may be split; the one known if none is faster.

    A plan that is not proved is returned as it is: what it may be short of is more
    than small state can save.

    Args:
      analysis: the step.
      found: the plan that is known.
      restriction: says which strategies are allowed on its mesh.
      seconds: time limit of a mesh; None: none.

    Returns:
      A plan with the bound of all plans of its mesh, those with split small state
      among them; or the plan that is known, with its own bound.
    """
    memory = float(found.pricer.cluster.memory_bytes)
    small = small_state(analysis.graph, analysis.contraction, memory)
    proved = found.report.status is Status.OPTIMAL or found.settled
    if not small or not proved:
        return found
    known = found.pricer.cluster.device.calibrated
    planes = [plane_of(found.step_s, found.timelines, known)]
    tried: list[Weights | None] = []
    best, bound_s = found, 0.0
    for _ in range(_PROBLEMS):
        weights = best_weights(planes, known) if known.overlap else None
        if weights in tried:
            break
        tried.append(weights)
        start = dataclasses.replace(best, weights=weights)
        split = _solved(analysis, start, restriction, seconds)
        if split is None:
            break
        bound_s = max(bound_s, split.solution.bound)
        planes.append(plane_of(split.step_s, split.timelines, known))
        if split.peak_memory_bytes <= memory and split.step_s < best.step_s:
            best = split
    if best.step_s >= (1 - _ROUNDING) * found.step_s:
        return found
    return dataclasses.replace(best, lower_s=min(bound_s, found.bound_s))


def _solved(
    analysis: Analysis,
    start: Candidate,
    restriction: Restriction | None,
    seconds: float | None,
) -> Candidate | None:
    """The best plan at the weights of a plan that is known; None: none in the time."""
    known = start.pricer.cluster.device.calibrated
    lowered = None
    if start.weights is not None:
        lowered = discounts(
            analysis,
            start.weights,
            known.overlap,
            known.contention,
            whole=known.whole_messages,
        )
    formulation = formulate(
        analysis,
        start.pricer,
        restriction,
        start.formulation.problem.memory_limit,
        discounts=lowered,
        small=frozenset(),
    )
    solution = solve(
        formulation.problem,
        seconds=None if seconds is None else _SHARE * seconds,
        warm_start=choices_of(formulation, start.assignment),
        timer=time.thread_time,
    )
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    found = candidate_of(analysis, formulation, solution)
    return tie_broken(analysis, dataclasses.replace(found, weights=start.weights))
