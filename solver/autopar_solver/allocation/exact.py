"""Exact solutions: of one kind of devices by a table, of some jobs by an ILP."""

import numpy as np

from autopar_solver.allocation.problem import AllocationProblem
from autopar_solver.ilp.program import Backend, IntegerProgram, StopCriteria


def solve_table(problem: AllocationProblem) -> tuple[int, ...] | None:
    """The best options where there is one kind of devices; None if there are none.

    Row by row, the best value of the first jobs for each number of devices.
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
    """The best of some options within some budgets, by an integer program.

    Args:
        problem: the whole problem.
        options: ``[n]``, indices of the options that may be chosen; rising.
        budgets: ``[kinds]``, devices that are left for them.
        backend: solves the program.
        stop: when it may stop.
        start: a choice that is known, if there is one; rising.

    Returns:
        The chosen options, None if there are none, and an upper bound of their value.
    """
    # x[o] = 1: option o is chosen.
    size = len(options)
    jobs, rows = np.unique(problem.jobs[options], return_inverse=True)
    must = problem.required[jobs]
    place = np.empty(len(jobs), np.int64)
    # The rows of required jobs come first: those before the named ones are equalities.
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
        # Prices have left little of the problem. To simplify it again takes longer.
        reduced=True,
    )
    known = None if start is None else np.isin(options, start) * 1.0
    answer = backend(program, stop, known)
    if answer.values is None:
        return None, -answer.bound
    return options[answer.values > 0.5], -answer.bound
