"""Solves allocations by prices per device, and by an integer program for some jobs.

Each kind of devices gets a price per device. If the prices are well chosen, then for
almost every job one option clearly has the highest value minus the price of its
devices. The linear relaxation lets a job take fractions of several options. In its
solution, about as many jobs do so as there are kinds of devices. A small integer
program decides the jobs whose best and second best options are closest; all other jobs
are fixed to their best options. Jobs are added to the integer program until its value
is close enough to the relaxation's upper bound.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.highs import (
    Backend,
    IntegerProgram,
    StopCriteria,
    solve_without_integrality,
)
from autopar_solver.status import Status

# The allocation of devices to jobs, as a problem and its solution.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AllocationProblem:
    """Jobs that choose among options; each option takes devices of one kind.

    Maximise the sum of the values of the chosen options, such that

        each job chooses at most one option, a required job exactly one   (one_option)
        the chosen options take at most the available devices of a kind   (budget)

    Attributes:
        jobs: ``[options]``, the job of each option, ascending.
        values: ``[options]``, the value of each option. If a job is not required, its
            options with a value of 0 or less are never chosen.
        kinds: ``[options]``, the kind of devices that each option takes.
        counts: ``[options]``, the number of devices that each option takes.
        budgets: ``[kinds]``, the number of available devices.
        required: ``[jobs]``, whether a job must get an option.
    """

    jobs: np.ndarray
    values: np.ndarray
    kinds: np.ndarray
    counts: np.ndarray
    budgets: np.ndarray
    required: np.ndarray

    def __post_init__(self) -> None:
        """Rejects arrays that do not fit together.

        Raises:
            InputError: lengths differ, a value is not finite, or a number is out of
                range.
        """
        size = len(self.jobs)
        lengths = {len(self.values), len(self.kinds), len(self.counts), size}
        if len(lengths) != 1:
            raise InputError(
                f"allocation: arrays of options have lengths {sorted(lengths)}; give "
                "one value, kind and count for each option."
            )
        if not np.all(np.isfinite(self.values)):
            option = int(np.flatnonzero(~np.isfinite(self.values))[0])
            raise InputError(
                f"allocation: option {option} of job {self.jobs[option]} is worth "
                f"{self.values[option]}; give a finite value, or leave it out."
            )
        if size and (
            np.any(np.diff(self.jobs) < 0)
            or not 0 <= self.jobs[0] <= self.jobs[-1] < len(self.required)
        ):
            raise InputError(
                "allocation: jobs must rise from 0 to the number of `required` less 1."
            )
        if np.any(self.counts < 1) or np.any(self.budgets < 0):
            raise InputError(
                "allocation: options take at least 1 device, and budgets are at least "
                "0."
            )
        if size and not 0 <= self.kinds.min() <= self.kinds.max() < len(self.budgets):
            raise InputError(
                f"allocation: kinds go from 0 to {len(self.budgets) - 1}, the number "
                "of budgets less 1."
            )

    @classmethod
    def of(
        cls,
        options: Sequence[Sequence[tuple[float, int, int]]],
        budgets: Sequence[int],
        required: Sequence[bool] = (),
    ) -> AllocationProblem:
        """Builds a problem from each job's options ``(value, kind, count)``."""
        flat = [(j, *option) for j, row in enumerate(options) for option in row]
        table = np.array(flat, np.float64).reshape(len(flat), 4)
        return cls(
            jobs=table[:, 0].astype(np.int64),
            values=table[:, 1],
            kinds=table[:, 2].astype(np.int64),
            counts=table[:, 3].astype(np.int64),
            budgets=np.asarray(budgets, np.int64),
            required=np.asarray(required or [False] * len(options), bool),
        )

    @property
    def num_jobs(self) -> int:
        """The number of jobs."""
        return len(self.required)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The options that were chosen.

    Attributes:
        choices: for each job, the index of its option in the problem's arrays; -1 for a
            job without an option. The tuple is empty if no solution was found.
        value: the sum of the values of the chosen options.
        bound: an upper bound of the value that any choice of options can have.
        status: how the solve ended.
    """

    choices: tuple[int, ...]
    value: float
    bound: float
    status: Status

    @property
    def gap(self) -> float:
        """The difference of bound and value, divided by the bound."""
        least = max(abs(self.bound), 1e-300)
        return max(self.bound - self.value, 0.0) / least


def check_allocation(problem: AllocationProblem, solution: Allocated) -> float:
    """Recomputes the value of a solution, without the solver.

    Raises:
        AssertionError: a job has an option of another job, a budget is exceeded, a
            required job has no option, or the value is wrong.
    """
    used = np.zeros(len(problem.budgets), np.int64)
    total = 0.0
    assert len(solution.choices) == problem.num_jobs
    for job, option in enumerate(solution.choices):
        assert option >= 0 or not problem.required[job], job
        if option >= 0:
            assert problem.jobs[option] == job, (job, option)
            used[problem.kinds[option]] += problem.counts[option]
            total += float(problem.values[option])
    assert np.all(used <= problem.budgets), (used, problem.budgets)
    assert abs(total - solution.value) <= 1e-9 * max(1.0, abs(total))
    assert total <= solution.bound + 1e-9 * max(1.0, abs(total))
    return total


def deal_out(seconds: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """Distributes microbatches so that the last replica ends as early as possible.

    Each replica gets one microbatch. Each further microbatch goes to the replica that
    would finish it first. If seconds do not decrease with the count, this minimises the
    largest time of a replica (T. Ibaraki, N. Katoh, "Resource Allocation Problems:
    Algorithmic Approaches", 1988, the minimax problem with separable objectives).

    Args:
      seconds: for each replica, the seconds of 1, 2, 3 ... microbatches, not
        decreasing. The length is the largest number of microbatches of the replica.
      count: the number of microbatches.

    Returns the number of microbatches of each replica.

    Raises:
      InputError: fewer microbatches than replicas, more microbatches than the replicas
        can take together, or decreasing seconds.

    >>> deal_out([[1, 2, 3, 4], [2, 4, 6, 8]], 3)
    (2, 1)
    >>> deal_out([[1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8, 10, 12, 14, 16]], 12)
    (8, 4)
    """
    if any(b < a for row in seconds for a, b in itertools.pairwise(row)):
        raise InputError("deal_out: seconds must not decrease with microbatches.")
    most = sum(len(row) for row in seconds)
    if not (len(seconds) <= count <= most and all(seconds)):
        raise InputError(
            f"deal_out: {count} microbatches for {len(seconds)} replicas, which may "
            f"have {most} together and need one each."
        )
    counts = [1] * len(seconds)
    ahead = [(row[1], k) for k, row in enumerate(seconds) if len(row) > 1]
    heapq.heapify(ahead)
    for _ in range(count - len(seconds)):
        _, k = heapq.heappop(ahead)
        counts[k] += 1
        if counts[k] < len(seconds[k]):
            heapq.heappush(ahead, (seconds[k][counts[k]], k))
    return tuple(counts)


# The linear relaxation of an allocation, solved through prices of the kinds of devices.
#
# At given prices per device of each kind, every job takes the option with the largest
# value after prices. A *value after prices* is an option's value minus the price of its
# devices. The best value of the linear relaxation is the minimum, over all prices, of
# ``budgets @ prices + sum of the jobs' largest values after prices``. There are few
# prices, so cutting planes find the minimum quickly.

_MOST_PLANES = 200
_NEAR = 2e-6


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PricedJobs:
    """The prices of devices, and the upper bound that they prove.

    Attributes:
        prices: ``[kinds]``, the price of one device.
        bound: an upper bound of every allocation's value.
        left: ``[options]``, the value of each option minus the price of its devices.
        best: ``[jobs]``, the largest ``left`` of each job's options. It is at least 0
            for a job that is not required, and minus infinity for a required job
            without options.
    """

    prices: np.ndarray
    bound: float
    left: np.ndarray
    best: np.ndarray


class Segments:
    """The options of each job as segments of arrays, to find each job's best option."""

    def __init__(self, problem: AllocationProblem) -> None:
        """Finds where the options of each job begin."""
        self.problem = problem
        self.present, self.starts = np.unique(problem.jobs, return_index=True)

    def at_prices(self, prices: np.ndarray) -> tuple[PricedJobs, np.ndarray]:
        """Computes values after prices, and the devices that the best options take."""
        problem = self.problem
        left = problem.values - prices[problem.kinds] * problem.counts
        best = np.where(problem.required, -np.inf, 0.0)
        taken = np.zeros(len(prices))
        if len(left):
            most = np.maximum.reduceat(left, self.starts)
            best[self.present] = np.maximum(best[self.present], most)
            lengths = np.diff(np.append(self.starts, len(left)))
            first = (left == np.repeat(most, lengths)) & (left == best[problem.jobs])
            index = np.flatnonzero(first)
            # If several options are equally good, the first one is chosen.
            chosen = index[np.unique(problem.jobs[index], return_index=True)[1]]
            counts = problem.counts[chosen]
            taken = np.bincount(problem.kinds[chosen], counts, len(prices))
        bound = float(problem.budgets @ prices + best.sum())
        return PricedJobs(prices, bound, left, best), taken


def relax(segments: Segments) -> PricedJobs:
    """Finds the prices with the least upper bound, to a relative accuracy of 2e-6."""
    problem = segments.problem
    kinds = len(problem.budgets)
    highest = np.zeros(kinds)
    worth = problem.values / problem.counts
    np.maximum.at(highest, problem.kinds, np.maximum(worth, 0.0))
    # A required job may displace other jobs, so a price may exceed the value per device
    # of every option.
    highest *= (
        1.0 if not problem.required.any() else 1.0 + problem.counts.max(initial=1)
    )
    slopes, heights = [], []
    best, taken = segments.at_prices(np.zeros(kinds))
    priced = best
    for _ in range(_MOST_PLANES):
        slope = problem.budgets - taken
        slopes.append(slope)
        heights.append(priced.bound - slope @ priced.prices)
        prices, least = _lowest(np.array(slopes), np.array(heights), highest)
        if best.bound - least <= _NEAR * max(abs(best.bound), 1e-12):
            break
        priced, taken = segments.at_prices(prices)
        if priced.bound < best.bound:
            best = priced
    return best


def _lowest(
    slopes: np.ndarray, heights: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, float]:
    """The prices at which the maximum of several planes is least, and this maximum."""
    planes, kinds = slopes.shape
    scale = highest + (highest == 0)
    shift = float(heights.min() - np.abs(slopes * scale).sum(axis=1).max() - 1.0)
    unit = max(float(np.abs(heights - shift).max()), 1e-300)
    matrix = np.hstack([np.ones((planes, 1)), -slopes * scale / unit])
    answer = solve_without_integrality(
        IntegerProgram(
            costs=np.append(1.0, np.zeros(kinds)),
            most=np.append(np.inf, (highest > 0) * 1.0),
            num_binary=0,
            starts=np.arange(planes + 1) * (kinds + 1),
            columns=np.tile(np.arange(kinds + 1), planes),
            values=matrix.ravel(),
            lower=(heights - shift) / unit,
            upper=np.full(planes, np.inf),
            names=tuple(f"above_plane_{i}" for i in range(planes)),
        )
    )
    # The program always has a solution, because sufficiently high prices are feasible.
    assert answer is not None
    values = answer[0]
    return np.clip(values[1:], 0.0, 1.0) * scale, float(values[0] * unit + shift)


# Exact solutions: by a table if there is one kind of devices, otherwise by an integer
# program.


def solve_table(problem: AllocationProblem) -> tuple[int, ...] | None:
    """The best options for one kind of devices; None if required jobs do not fit.

    The table is filled job by job: for each number of devices, the best value of the
    jobs so far.
    """
    budget = int(problem.budgets[0])
    best = np.zeros(budget + 1)
    taken = np.full((problem.num_jobs, budget + 1), -1, np.int64)
    bounds = np.searchsorted(problem.jobs, np.arange(problem.num_jobs + 1))
    for job in range(problem.num_jobs):
        required = problem.required[job]
        new = np.full(budget + 1, -np.inf) if required else best.copy()
        for option in range(bounds[job], bounds[job + 1]):
            count, value = int(problem.counts[option]), problem.values[option]
            if count > budget or (value <= 0 and not required):
                continue
            tried = best[: budget + 1 - count] + value
            better = tried > new[count:]
            new[count:][better] = tried[better]
            taken[job, count:][better] = option
        best = new
    if best[budget] == -np.inf:
        return None
    choices, left = [], budget
    for job in range(problem.num_jobs - 1, -1, -1):
        option = int(taken[job, left])
        choices.append(option)
        left -= int(problem.counts[option]) if option >= 0 else 0
    return tuple(reversed(choices))


def solve_core(
    problem: AllocationProblem,
    options: np.ndarray,
    budgets: np.ndarray,
    backend: Backend,
    stop: StopCriteria,
    start: np.ndarray | None = None,
) -> tuple[np.ndarray | None, float]:
    """Chooses the best of some options within budgets, by an integer program.

    Args:
        problem: the whole problem.
        options: ``[n]``, indices of the options that may be chosen, ascending.
        budgets: ``[kinds]``, the devices that are available for these options.
        backend: the solver of the program.
        stop: the stop criteria.
        start: a known choice, ascending; None if there is none.

    Returns:
        The chosen options, or None if no choice is possible, and an upper bound of
        their value.
    """
    # x[o] = 1: option o is chosen.
    size = len(options)
    jobs, rows = np.unique(problem.jobs[options], return_inverse=True)
    must = problem.required[jobs]
    place = np.empty(len(jobs), np.int64)
    # Rows of required jobs come first: unnamed rows at the start are equalities.
    place[np.argsort(~must, kind="stable")] = np.arange(len(jobs))
    row = np.concatenate([place[rows], len(jobs) + problem.kinds[options]])
    column = np.tile(np.arange(size), 2)
    value = np.concatenate([np.ones(size), problem.counts[options] * 1.0])
    order = np.lexsort((column, row))
    height = len(jobs) + len(budgets)
    program = IntegerProgram(
        costs=-problem.values[options],
        most=np.ones(size),
        num_binary=size,
        starts=np.searchsorted(row[order], np.arange(height + 1)),
        columns=column[order],
        values=value[order],
        lower=np.concatenate(
            [np.ones(must.sum()), np.full(height - must.sum(), -np.inf)]
        ),
        upper=np.concatenate([np.ones(len(jobs)), budgets * 1.0]),
        names=(
            *(f"one_option_{job}" for job in jobs[~must].tolist()),
            *(f"budget_{kind}" for kind in range(len(budgets))),
        ),
        # Prices have already reduced the problem, so presolve would only cost time.
        reduced=True,
    )
    known = None if start is None else np.isin(options, start) * 1.0
    answer = backend(program, stop, known)
    if answer.values is None:
        return None, -answer.bound
    return options[answer.values > 0.5], -answer.bound


_CORE_JOBS = 40
# With at most this many options, an integer program over all options takes no longer
# than finding prices.
_WHOLE = 200
# If a table would have more cells than this, finding prices is faster.
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
        gap: the largest difference of bound and value, divided by the bound, at which a
            result counts as optimal.
        seconds: time limit of each integer program; None for no limit.
        backend: the solver of the integer programs.

    Returns:
        The choices with a proven bound. The status is ``OPTIMAL`` if the gap is
        reached, and ``FEASIBLE`` if it is not. The status is ``INFEASIBLE`` if the
        required jobs do not fit together.

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
    """Solves integer programs over a growing set of options.

    The *loss* of an option is the largest value after prices of its job's options,
    minus the option's own value after prices. The value of an allocation is the
    relaxation's bound minus the losses of its options and minus the prices of its
    unused devices. An allocation with an option whose loss exceeds a threshold
    therefore has a value below the bound minus the threshold.
    """

    problem: AllocationProblem
    priced: PricedJobs
    backend: Backend
    gap: float
    seconds: float | None

    def run(self) -> Allocated:
        """Solves programs over options with at most a threshold's loss.

        Raises the threshold.

        The method stops when the gap is reached or all options are included.
        """
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
            threshold = self._raise_threshold(threshold, found, ceiling, lost)

    def _raise_threshold(
        self, threshold: float, found: Allocated, ceiling: float, lost: np.ndarray
    ) -> float:
        if found.choices and threshold < ceiling - found.value:
            # Two thresholds. No choice with an option whose loss is above the first is
            # better than the choice found. No choice with an option above the second is
            # better by more than the allowed gap.
            ends = ceiling - found.value, ceiling - found.value * (1 + 0.9 * self.gap)
            raised = max(4 * threshold, 1e-9 * abs(ceiling))
            return min(raised, *(end for end in ends if end > threshold))
        raised = max(3 * threshold, 1e-6 * abs(ceiling))
        return np.inf if found.choices or raised > lost.max() else raised

    def _regrets(self, lost: np.ndarray) -> np.ndarray:
        """Returns the losses of the jobs' second best options, in ascending order.

        For a job that is not required, taking no option also counts as an option.
        """
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
        """The best choice of options with losses up to the threshold, and its bound."""
        problem = self.problem
        options = np.flatnonzero(lost <= threshold)
        ways = np.bincount(problem.jobs[options], minlength=problem.num_jobs)
        # A job with only one option left is decided here. For a job that is not
        # required, taking no option counts as an option, too.
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
            # The known choice is among the included options, because each of its
            # options loses less than the threshold.
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
