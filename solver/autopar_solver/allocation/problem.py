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
    """Jobs choose among options; options take devices of one kind.

    Maximise the sum of the values of chosen options, such that

        each job chooses one option at most, a required job exactly one   (one_option)
        the chosen options take no more devices of a kind than there are  (budget)

    Attributes:
        jobs: ``[options]``, the job of each option; equal ones stand together, rising.
        values: ``[options]``, what each is worth; of a job that is not required, an
            option that is worth nothing or less is never chosen.
        kinds: ``[options]``, the kind of devices that each takes.
        counts: ``[options]``, how many it takes.
        budgets: ``[kinds]``, how many devices there are.
        required: ``[jobs]``, whether a job must get an option.
    """

    jobs: np.ndarray
    values: np.ndarray
    kinds: np.ndarray
    counts: np.ndarray
    budgets: np.ndarray
    required: np.ndarray

    def __post_init__(self) -> None:
        """Refuses arrays that do not fit together.

        Raises:
            InputError: lengths differ, a value is not finite, or a number is out of its
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
        """From ``(value, kind, count)`` of the options of each job."""
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
    """What was chosen.

    Attributes:
        choices: by job, its option's index into the problem's arrays; -1 for none.
            Empty when nothing was found.
        value: their sum.
        bound: no choices are worth more.
        status: how the solve ended.
    """

    choices: tuple[int, ...]
    value: float
    bound: float
    status: Status

    @property
    def gap(self) -> float:
        """How far the value may be from the best, relative to the bound."""
        least = max(abs(self.bound), 1e-300)
        return max(self.bound - self.value, 0.0) / least


def check_allocation(problem: AllocationProblem, solution: Allocated) -> float:
    """Recomputes the value of a solution, without the solver.

    Raises:
        AssertionError: a job has an option of another, a budget is broken, a required
            job has none, or the value is not what it says.
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
    """Deals microbatches out so that the last replica ends as early as can be.

    Each replica gets one; every other goes to the replica that would end first with
    one more. For seconds that do not decrease this is the least of the largest
    (T. Ibaraki, N. Katoh, "Resource Allocation Problems: Algorithmic Approaches", 1988,
    the minimax problem with separable objectives).

    Args:
      seconds: of each replica, those of 1, 2, 3 ... microbatches, not decreasing; as
        many as it may have at most.
      count: how many microbatches there are.

    Returns the number of each replica.

    Raises:
      InputError: there are too few for each replica to have one, or too many for
        what they may have; or seconds decrease.

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
