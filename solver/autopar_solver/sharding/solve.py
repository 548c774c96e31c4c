"""Solves a sharding problem: reductions, then rounds of bounds and searches."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.clock import Clock, Timer
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.problem import (
    ReductionReport,
    ShardingProblem,
    Solution,
    usage_over_time,
)
from autopar_solver.sharding.reductions.pipeline import build_graph, reduce_graph
from autopar_solver.sharding.rounds import Incumbent, close_gap
from autopar_solver.status import Status

REDUCTION_SHARE = 0.3
"""Share of the time limit after which no further round of reductions begins."""


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
        problem: the problem to solve. Its costs may have any scale.
        seconds: time limit, as measured by the timer; None to stop only when the gap is
            closed.
        gap: the largest difference of cost and bound, divided by the cost, at which a
            solution counts as optimal. A difference of 1e-9 always counts as optimal.
        warm_start: choices to begin with. If they are valid, the result costs no more
            than they do.
        below: only solutions with a lower cost are searched. If there is none, the
            status is unknown, and the bound is at least ``below``.
        backend: the solver of integer programs: "highs", or "cbc" through PuLP.
        timer: returns the time in seconds. With ``time.thread_time`` the limit applies
            to CPU time, and does not depend on the load of the machine.

    Raises:
        InputError: the warm start does not name one strategy per node, or there is no
            backend of this name.
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
        # Either no choice is possible, or none costs less than the known choices.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveTerm:
    """The least memory that one term needs at the time `InfeasibilityExplanation.time`.

    ``term`` indexes ``problem.memory``; ``node`` is the node that the term belongs to.
    """

    term: int
    node: int
    least: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibilityExplanation:
    """The time at which the least memory that any choice needs is largest.

    Attributes:
        time: the time.
        least_peak: a lower bound of the memory of all choices at this time.
        limit: the problem's limit; None if it has none.
        fixed: the memory at this time that no choice changes.
        terms: the live terms at this time, the largest first.
    """

    time: int
    least_peak: float
    limit: float | None
    fixed: float
    terms: tuple[LiveTerm, ...]

    @property
    def proves_infeasible(self) -> bool:
        """Whether the least peak itself exceeds the limit."""
        return self.limit is not None and self.least_peak > self.limit


def explain_infeasibility(problem: ShardingProblem) -> InfeasibilityExplanation:
    """Finds the time at which all choices need the most memory, and its terms by size.

    For each term separately, every node uses its allowed strategy with the least
    memory. The resulting peak is therefore only a lower bound. A problem can be
    infeasible although this bound is within the limit.
    """
    allowed = [np.isfinite(costs) for costs in problem.node_costs]
    least = np.array(
        [term.usage[allowed[term.node]].min() for term in problem.memory], np.float64
    )
    starts = np.array([term.start for term in problem.memory], np.int64)
    ends = np.array([term.end for term in problem.memory], np.int64)
    fixed = np.array(problem.fixed_memory, np.float64).reshape(-1, 3)
    live = ends > starts
    kept = fixed[:, 1] > fixed[:, 0]
    times, usage = usage_over_time(
        np.concatenate([starts[live], fixed[kept, 0].astype(np.int64)]),
        np.concatenate([ends[live], fixed[kept, 1].astype(np.int64)]),
        np.concatenate([least[live], fixed[kept, 2]]),
    )
    at = int(np.argmax(usage)) if len(usage) else 0
    time = int(times[at]) if len(times) else 0
    there = np.flatnonzero((starts <= time) & (time < ends))
    order = there[np.argsort(-least[there], kind="stable")]
    return InfeasibilityExplanation(
        time=time,
        least_peak=float(usage[at]) if len(usage) else 0.0,
        limit=problem.memory_limit,
        fixed=float(fixed[(fixed[:, 0] <= time) & (time < fixed[:, 1]), 2].sum()),
        terms=tuple(
            LiveTerm(
                term=int(m), node=problem.memory[int(m)].node, least=float(least[m])
            )
            for m in order
        ),
    )
