"""Solves allocations: prices first, then exactly what the prices leave open.

At the best prices almost every job has one option that is clearly best: with K kinds at
most about K jobs are split in the linear relaxation. The others are fixed, and the jobs
with the least regret go into a small integer program, which grows until the gap to the
relaxation's bound is small enough.
"""

import dataclasses

import numpy as np

from autopar_solver.allocation.exact import solve_core, solve_table
from autopar_solver.allocation.problem import Allocated, AllocationProblem
from autopar_solver.allocation.relaxation import Priced, Segments, relax
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.program import Backend, StopCriteria
from autopar_solver.status import Status

_CORE_JOBS = 40
# With no more options an integer program over all of them is as fast.
_WHOLE = 200
# A table with more cells is slower than the prices.
_MOST_CELLS = 300_000


def solve_allocation(
    problem: AllocationProblem,
    *,
    gap: float = 1e-4,
    seconds: float | None = 20.0,
    backend: BackendName = "highs",
) -> Allocated:
    """Chooses an option for each job.

    Args:
        problem: jobs, options and budgets.
        gap: relative difference of value and bound that is good enough.
        seconds: limit of each integer program; None for none.
        backend: solves them.

    Returns:
        The choices with a proven bound. ``OPTIMAL`` where the gap is met, ``FEASIBLE``
        where it is not, ``INFEASIBLE`` where required jobs cannot all be served.

    >>> problem = AllocationProblem.of(
    ...     [[(3.0, 0, 2), (2.0, 0, 1)], [(2.5, 0, 2)]], budgets=[3]
    ... )
    >>> solve_allocation(problem).choices
    (1, 2)
    """
    solver = backend_of(backend)
    if not problem.num_jobs:
        return Allocated(choices=(), value=0.0, bound=0.0, status=Status.OPTIMAL)
    if (
        len(problem.budgets) == 1
        and len(problem.jobs) * (int(problem.budgets[0]) + 1) <= _MOST_CELLS
    ):
        choices = solve_table(problem)
        if choices is None:
            return _none(Status.INFEASIBLE)
        value = _value(problem, choices)
        return Allocated(
            choices=choices, value=value, bound=value, status=Status.OPTIMAL
        )
    priced = relax(Segments(problem))
    return _Rounds(problem, priced, solver, gap, seconds).run()


def _none(status: Status) -> Allocated:
    return Allocated(choices=(), value=-np.inf, bound=np.inf, status=status)


def _value(problem: AllocationProblem, choices: tuple[int, ...]) -> float:
    return float(sum(problem.values[option] for option in choices if option >= 0))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Rounds:
    """Integer programs over more and more options.

    At the prices, a choice loses what its options leave less than each job's best one,
    and the price of devices that stay free. So a choice with an option that loses more
    than a threshold is worth less than the relaxation's bound less the threshold.
    """

    problem: AllocationProblem
    priced: Priced
    backend: Backend
    gap: float
    seconds: float | None

    def run(self) -> Allocated:
        """Raises the threshold until the gap is met, or all options are open."""
        problem, ceiling = self.problem, self.priced.bound
        lost = self.priced.best[problem.jobs] - self.priced.left
        regrets = self._regrets(lost)
        core = min(_CORE_JOBS, problem.num_jobs // 2)
        threshold = np.inf if len(lost) <= _WHOLE else float(regrets[core])
        found = _none(Status.UNKNOWN)
        while True:
            choices, proved = self._with_open(lost, threshold, found)
            bound = min(ceiling, max(proved, ceiling - threshold))
            if choices is not None:
                value = _value(problem, choices)
                if value > found.value:
                    found = Allocated(
                        choices=choices,
                        value=value,
                        bound=bound,
                        status=Status.FEASIBLE,
                    )
            found = dataclasses.replace(found, bound=max(bound, found.value))
            if found.choices and found.gap <= self.gap:
                return dataclasses.replace(found, status=Status.OPTIMAL)
            if threshold == np.inf:
                return _none(Status.INFEASIBLE) if proved == -np.inf else found
            threshold = self._raised(threshold, found, ceiling, lost)

    def _raised(
        self, threshold: float, found: Allocated, ceiling: float, lost: np.ndarray
    ) -> float:
        if found.choices and threshold < ceiling - found.value:
            # Beyond the first nothing is better than what was found; beyond the second
            # nothing is so much better that the gap would not be met.
            ends = ceiling - found.value, ceiling - found.value * (1 + 0.9 * self.gap)
            raised = max(4 * threshold, 1e-9 * abs(ceiling))
            return min(raised, *(end for end in ends if end > threshold))
        raised = max(3 * threshold, 1e-6 * abs(ceiling))
        return np.inf if found.choices or raised > lost.max() else raised

    def _regrets(self, lost: np.ndarray) -> np.ndarray:
        """What each job's second best choice loses, rising; none is a choice, too."""
        problem = self.problem
        none = np.flatnonzero(~problem.required)
        jobs = np.concatenate([problem.jobs, none])
        losses = np.concatenate([lost, self.priced.best[none]])
        order = np.lexsort((losses, jobs))
        jobs = jobs[order]
        first = np.append(True, jobs[1:] != jobs[:-1])
        second = ~first & np.append(False, first[:-1])
        regrets = np.full(problem.num_jobs, np.inf)
        regrets[jobs[second]] = losses[order][second]
        return np.sort(regrets)

    def _with_open(
        self, lost: np.ndarray, threshold: float, found: Allocated
    ) -> tuple[tuple[int, ...] | None, float]:
        """The best choice among options that lose no more, and a bound of those."""
        problem = self.problem
        options = np.flatnonzero(lost <= threshold)
        ways = np.bincount(problem.jobs[options], minlength=problem.num_jobs)
        # A job with one way only is fixed; to have none is a way, too.
        sure = ways == 1
        sure &= problem.required | (self.priced.best > threshold)
        fixed = options[sure[problem.jobs[options]]]
        used = np.bincount(
            problem.kinds[fixed], problem.counts[fixed], len(problem.budgets)
        )
        budgets = problem.budgets - used
        if np.any(budgets < 0):
            return None, -np.inf
        options = options[~sure[problem.jobs[options]]]
        unit = max(abs(self.priced.bound), 1e-300)
        stop = StopCriteria(self.seconds, self.gap * 0.7 * unit)
        choices = np.full(problem.num_jobs, -1)
        choices[problem.jobs[fixed]] = fixed
        settled = float(problem.values[fixed].sum())
        proved = 0.0
        if len(options):
            # What was found loses less than the threshold: its options are open.
            start = np.sort(found.choices) if found.choices else None
            chosen, proved = solve_core(
                problem, options, budgets, self.backend, stop, start
            )
            if chosen is None:
                return None, proved + settled
            choices[problem.jobs[chosen]] = chosen
        if np.any(problem.required & (choices < 0)):
            return None, -np.inf
        return tuple(choices.tolist()), proved + settled
