"""Solves a sharding problem: reduces it, then bounds and searches until they meet."""

import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.clock import Clock, Timer
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.incumbent import Incumbent
from autopar_solver.sharding.problem import ShardingProblem
from autopar_solver.sharding.reductions.build import build_graph
from autopar_solver.sharding.reductions.pipeline import reduce_graph
from autopar_solver.sharding.rounds import close_gap
from autopar_solver.sharding.solution import ReductionReport, Solution
from autopar_solver.status import Status

REDUCTION_SHARE = 0.3
"""Share of the time after which no further round of reductions begins."""


def solve(
    problem: ShardingProblem,
    *,
    seconds: float | None = None,
    gap: float = 1e-4,
    warm_start: Sequence[int] | None = None,
    below: float = math.inf,
    backend: BackendName = "highs",
    timer: Timer = time.monotonic,
) -> Solution:
    """Finds the cheapest choice of strategies that fits in memory.

    Without a time limit the same problem always gives the same solution.

    Args:
        problem: what to solve; costs of any scale.
        seconds: limit, as the timer counts; None to stop only when the gap is closed.
        gap: relative difference of cost and bound at which a solution is called
            optimal; 1e-9 of rounding is always allowed.
        warm_start: choices to begin with; if they are valid, the result costs at most
            as much.
        below: solutions that cost as much are of no interest; where there is none
            below it, the status is unknown and the bound is as high, or higher.
        backend: who solves integer programs: "highs", or "cbc" through PuLP.
        timer: tells the time in seconds; with ``time.thread_time`` the limit is of
            work, however busy the machine is.

    Raises:
        InputError: the warm start does not name one strategy per node, or there is no
            such backend.
    """
    clock = Clock(timer(), seconds, timer)
    solver = backend_of(backend)
    incumbent = Incumbent(problem, gap)
    incumbent.cost = below
    if warm_start is not None:
        incumbent.offer(warm_start)
    graph = build_graph(problem)
    reports: tuple[ReductionReport, ...] = ()
    try:
        early = clock.within(REDUCTION_SHARE * clock.length)
        reports = reduce_graph(graph, early)
        close_gap(graph, incumbent, clock, solver)
    except ContradictionError:
        # Nothing can be chosen, or nothing below the cost of what is known.
        incumbent.prove(incumbent.cost)
    return _solution(incumbent, clock, reports)


def _solution(
    incumbent: Incumbent, clock: Clock, reports: tuple[ReductionReport, ...]
) -> Solution:
    if incumbent.choices is None:
        nothing = incumbent.bound == math.inf
        status = Status.INFEASIBLE if nothing else Status.UNKNOWN
        incumbent.cost = math.inf
    else:
        status = Status.OPTIMAL if incumbent.is_proved else Status.FEASIBLE
    found = incumbent.choices if incumbent.choices is not None else np.zeros(0)
    return Solution(
        choices=tuple(int(choice) for choice in found),
        cost=incumbent.cost,
        bound=incumbent.bound,
        status=status,
        seconds=clock.spent_s,
        reductions=reports,
    )
