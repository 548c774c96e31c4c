"""Improves the choices of a codec selection by one or two gradients at a time.

With ``end[j] = ready[j] + sum_(m >= j) wire[m]`` over the link's order, exposed time is
what the largest ``end`` is after the backward pass. A change of gradient ``l`` by ``d``
seconds on the link moves ``end[0], ..., end[l]`` by ``d`` and no other, so that every
single change is priced at once with two running maxima.
"""

import numpy as np

from autopar_solver.selection.options import Options
from autopar_solver.selection.problem import CodecSelection

MOVES_PER_GRADIENT = 4
"""After how many changes for each gradient a descent stops; few need more than one."""

PAIRED = 24
"""How many changes that break a budget are tried together with one that makes room."""


def descend(
    problem: CodecSelection, options: Options, chosen: np.ndarray
) -> np.ndarray:
    """Makes the change that saves most, alone or with another, until none does.

    Args:
        problem: what the options are of.
        options: what may be chosen.
        chosen: by gradient in the link's order, an index into the options; within the
            budgets.
    """
    ready = np.array(sorted(problem.ready_s))
    chosen = chosen.copy()
    for _ in range(MOVES_PER_GRADIENT * options.num_gradients):
        saved, fitting = _changes(problem, options, ready, chosen)
        least = np.where(fitting, saved, np.inf)
        move = int(np.argmin(least))
        if not least[move] < 0:
            pair = _pair(problem, options, ready, chosen, saved, fitting)
            if pair is None:
                return chosen
            chosen = pair
        else:
            chosen[options.gradient[move]] = move
    return chosen


def _changes(
    problem: CodecSelection, options: Options, ready: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By option: what choosing it adds to the cost, and whether it fits the budgets."""
    wire = options.wire[chosen]
    end = ready + np.cumsum(wire[::-1])[::-1]
    until = np.maximum.accumulate(end)
    behind = np.append(np.maximum.accumulate(end[::-1])[::-1][1:], 0.0)
    old = chosen[options.gradient]
    longer = options.wire - options.wire[old]
    last = np.maximum(until[options.gradient] + longer, behind[options.gradient])
    exposed = np.maximum(last, problem.backward_s)
    now = max(float(until[-1]), problem.backward_s)
    added = exposed - now + options.local - options.local[old]
    fitting = np.ones(len(added), bool)
    for values, budget in (
        (options.error, problem.error_budget),
        (options.memory, problem.memory_limit),
    ):
        fitting &= values[chosen].sum() + values - values[old] <= budget
    # Less than rounding is nothing saved: a descent must end.
    added[np.abs(added) <= 1e-12 * now] = 0.0
    return added, fitting


def _pair(
    problem: CodecSelection,
    options: Options,
    ready: np.ndarray,
    chosen: np.ndarray,
    added: np.ndarray,
    fitting: np.ndarray,
) -> np.ndarray | None:
    """The best of the changes that save much, together with one that makes room."""
    tempting = np.flatnonzero(~fitting & (added < 0))
    tempting = tempting[np.argsort(added[tempting], kind="stable")[:PAIRED]]
    best, least = None, 0.0
    for first in tempting:
        trial = chosen.copy()
        trial[options.gradient[first]] = first
        second_added, second_fitting = _changes(problem, options, ready, trial)
        second_fitting &= options.gradient != options.gradient[first]
        total = added[first] + np.where(second_fitting, second_added, np.inf)
        second = int(np.argmin(total))
        if total[second] < least and not np.isclose(total[second], 0.0, atol=0.0):
            trial[options.gradient[second]] = second
            best, least = trial, float(total[second])
    return best
