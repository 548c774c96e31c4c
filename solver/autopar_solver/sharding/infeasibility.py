"""Explains why a memory limit cannot be met: by the tightest time."""

import dataclasses

import numpy as np

from autopar_solver.sharding.check import usage_over_time
from autopar_solver.sharding.problem import ShardingProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveTerm:
    """The least that one memory term can occupy at the binding time.

    ``term`` indexes ``problem.memory``; ``node`` is the node that owns it.
    """

    term: int
    node: int
    least: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibilityExplanation:
    """The time at which even the most frugal choices need most.

    Attributes:
        time: the binding time.
        least_peak: no choice needs less than this at that time.
        limit: the problem's limit, None if it has none.
        fixed: what no choice changes at that time.
        terms: what is live then, the largest first.
    """

    time: int
    least_peak: float
    limit: float | None
    fixed: float
    terms: tuple[LiveTerm, ...]

    @property
    def proves_infeasible(self) -> bool:
        """Whether the least peak alone is over the limit."""
        return self.limit is not None and self.least_peak > self.limit


def explain_infeasibility(problem: ShardingProblem) -> InfeasibilityExplanation:
    """Finds the binding time, a lower bound of the peak there, and its terms by size.

    Every node takes its most frugal allowed strategy for each term on its own, so the
    peak is a lower bound; a problem can be infeasible although it is under the limit.
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
