"""Cost and memory of given choices, computed without the solver."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.sharding.problem import ShardingProblem
from autopar_solver.sharding.solution import Solution
from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvaluation:
    """Cost, peak memory and the first time of the peak of some choices."""

    cost: float
    peak: float
    peak_time: int


def evaluate_choices(
    problem: ShardingProblem, choices: Sequence[int]
) -> ChoiceEvaluation:
    """Adds up costs and memory; the cost is infinite if a choice is forbidden.

    Raises:
        InputError: the choices do not name one existing strategy per node.
    """
    _check_choices(problem, choices)
    costs = [float(row[k]) for row, k in zip(problem.node_costs, choices, strict=True)]
    costs += [
        float(matrix[choices[i], choices[j]])
        for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True)
    ]
    times, usage = memory_profile(problem, choices)
    at = int(np.argmax(usage)) if len(usage) else 0
    return ChoiceEvaluation(
        cost=math.fsum(costs),
        peak=float(usage[at]) if len(usage) else 0.0,
        peak_time=int(times[at]) if len(times) else 0,
    )


def memory_profile(
    problem: ShardingProblem, choices: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Times at which memory changes, and the usage from each to the next."""
    live = [term for term in problem.memory if term.start < term.end]
    fixed = [item for item in problem.fixed_memory if item[0] < item[1]]
    amounts = [term.usage[choices[term.node]] for term in live]
    starts = [term.start for term in live] + [item[0] for item in fixed]
    ends = [term.end for term in live] + [item[1] for item in fixed]
    return usage_over_time(
        np.array(starts, np.int64),
        np.array(ends, np.int64),
        np.array(amounts + [item[2] for item in fixed], np.float64),
    )


def usage_over_time(
    starts: np.ndarray, ends: np.ndarray, amounts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums amounts over half-open intervals.

    Long doubles keep whole bytes exact however many terms come and go.

    >>> times, usage = usage_over_time(
    ...     starts=np.array([0, 1]), ends=np.array([2, 3]), amounts=np.array([5.0, 7.0])
    ... )
    >>> times.tolist(), usage.tolist()
    ([0, 1, 2, 3], [5.0, 12.0, 7.0, 0.0])
    """
    times, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.zeros(len(times), np.longdouble)
    wide = amounts.astype(np.longdouble)
    np.add.at(change, place, np.concatenate([wide, -wide]))
    return times, np.cumsum(change).astype(np.float64)


def check_solution(problem: ShardingProblem, solution: Solution) -> None:
    """Raises `InputError` unless the solution is what it says it is."""
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if solution.choices:
            raise InputError(f"{problem.name}: {solution.status} but has choices.")
        return
    found = evaluate_choices(problem, solution.choices)
    if not math.isfinite(found.cost):
        raise InputError(f"{problem.name}: the solution makes a forbidden choice.")
    if not math.isclose(found.cost, solution.cost, rel_tol=1e-9, abs_tol=1e-300):
        raise InputError(
            f"{problem.name}: the choices cost {found.cost}, not {solution.cost}."
        )
    if problem.memory_limit is not None and found.peak > problem.memory_limit:
        raise InputError(
            f"{problem.name}: memory {found.peak} at time {found.peak_time} is over "
            f"the limit {problem.memory_limit}."
        )
    if solution.bound > solution.cost + 1e-9 * abs(solution.cost):
        raise InputError(
            f"{problem.name}: bound {solution.bound} above cost {solution.cost}."
        )


def _check_choices(problem: ShardingProblem, choices: Sequence[int]) -> None:
    sizes = problem.num_strategies
    if len(choices) != len(sizes):
        raise InputError(
            f"{problem.name}: {len(choices)} choices for {len(sizes)} nodes."
        )
    for i, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not 0 <= choice < size:
            raise InputError(f"{problem.name}: node {i} has no strategy {choice}.")
