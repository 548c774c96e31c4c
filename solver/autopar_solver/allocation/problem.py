"""The allocation of devices to jobs, as a problem and its solution."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.status import Status


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
