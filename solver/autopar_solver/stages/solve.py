"""Finds the pipeline with the shortest step, and bounds all others."""

import itertools
import math
import time

from autopar_solver.clock import Clock
from autopar_solver.stages.exhaust import Allowance, exhaust_space
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.infeasibility import binding_memory
from autopar_solver.stages.mixed import offer_mixed
from autopar_solver.stages.polish import polish
from autopar_solver.stages.problem import StageProblem
from autopar_solver.stages.schedules.tasks import ScheduleKind
from autopar_solver.stages.search import (
    Bounded,
    bound_space,
    most_stages,
    search_space,
)
from autopar_solver.stages.solution import StageSolution
from autopar_solver.stages.uniform import offer_uniform, uniform_pipelines
from autopar_solver.status import Status

CHAINS = 20_000
"""How many stages are tried to settle what bounds leave open."""


def solve_stages(
    problem: StageProblem, *, seconds: float | None = None, gap: float = 1e-4
) -> StageSolution:
    """Chooses stages, submeshes, microbatches, schedule and what is computed again.

    The space: every cut of the chain, every order of submeshes that fit beside each
    other, every set of layers to compute again. Interleaved schedules give every group
    the same option, and cut by rule: parts of as many layers, or of as much time; the
    number of their groups divides the layers or is a power of two. A pipeline of one
    stage is in the space, so that the result is never worse than the best of those.

    Args:
        problem: what to solve.
        seconds: wall-clock limit; None to stop only when the search is done.
        gap: difference of step and bound, relative to the step, at which the pipeline
            is called optimal.
    """
    clock = Clock(time.monotonic(), seconds)
    incumbent = Incumbent(problem)
    candidates = uniform_pipelines(problem, most_stages(problem))
    bound = offer_uniform(problem, incumbent, candidates, clock)
    offer_mixed(problem, incumbent, clock)
    bound = min(bound, _search(problem, incumbent, gap, clock))
    bound = min(bound, incumbent.step_s * (1 - gap))
    if incumbent.pipeline is None:
        done = bound == math.inf
        return StageSolution(
            pipeline=None,
            cost=None,
            bound_s=bound,
            status=Status.INFEASIBLE if done else Status.UNKNOWN,
            seconds=clock.spent,
            binding=binding_memory(problem) if done else None,
        )
    proved = bound >= incumbent.step_s * (1 - gap) * (1 - 1e-12)
    return StageSolution(
        pipeline=incumbent.pipeline,
        cost=incumbent.cost,
        bound_s=min(bound, incumbent.step_s),
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        seconds=clock.spent,
    )


def _search(
    problem: StageProblem, incumbent: Incumbent, gap: float, clock: Clock
) -> float:
    """Searches all schedules but the interleaved ones; returns a bound of them."""
    spaces = list[Bounded]()
    for costs, schedule in itertools.product(problem.costs, problem.schedules):
        if schedule.kind is ScheduleKind.INTERLEAVED:
            continue
        if clock.left <= 0:
            return 0.0
        cutoff = incumbent.step_s * (1 - gap)
        space = bound_space(problem, costs, schedule, cutoff)
        if space is not None:
            spaces.append(space)

    def turn(number: int) -> tuple[bool, float]:
        """Split backwards last: their bounds are the weakest, and take longest."""
        space = spaces[number]
        return space.space.schedule.splits_backward, space.bound_s

    left = [
        (search_space(spaces[number], incumbent, gap, clock), number)
        for number in sorted(range(len(spaces)), key=turn)
    ]
    if any(least < incumbent.step_s * (1 - gap) for least, _ in left):
        polish(problem, incumbent, clock)
    bound, allowance = math.inf, Allowance(CHAINS)
    for least, number in sorted(left):
        if least >= incumbent.step_s * (1 - gap):
            continue
        if not exhaust_space(spaces[number], incumbent, gap, allowance, clock):
            bound = min(bound, least)
    return bound
