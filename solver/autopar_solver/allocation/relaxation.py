"""The linear relaxation of an allocation, through prices of the kinds of devices.

With a price for a device of each kind, every job takes the option that leaves it most.
The least total over prices, ``budgets @ prices + sum of what is left``, is the value of
the linear relaxation. Cutting planes find it: there are as many prices as kinds.
"""

import dataclasses

import numpy as np

from autopar_solver.allocation.problem import AllocationProblem
from autopar_solver.ilp.highs import solve_without_integrality
from autopar_solver.ilp.program import IntegerProgram

_MOST_PLANES = 200
_NEAR = 2e-6


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Prices and what they prove.

    Attributes:
        prices: ``[kinds]``, of a device.
        bound: no allocation is worth more.
        left: ``[options]``, the value of each less the price of its devices.
        best: ``[jobs]``, what each job is left with at most; not below 0 for a job that
            is not required, minus infinity for a required job without options.
    """

    prices: np.ndarray
    bound: float
    left: np.ndarray
    best: np.ndarray


class Segments:
    """The options of each job, for maxima over them."""

    def __init__(self, problem: AllocationProblem) -> None:
        """Finds where the options of each job begin."""
        self.problem = problem
        self.present, self.starts = np.unique(problem.jobs, return_index=True)

    def priced(self, prices: np.ndarray) -> tuple[Priced, np.ndarray]:
        """What is left at given prices, and the devices of each kind that are taken."""
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
            # Of options that leave the same, the first.
            chosen = index[np.unique(problem.jobs[index], return_index=True)[1]]
            counts = problem.counts[chosen]
            taken = np.bincount(problem.kinds[chosen], counts, len(prices))
        bound = float(problem.budgets @ prices + best.sum())
        return Priced(prices, bound, left, best), taken


def relax(segments: Segments) -> Priced:
    """The prices with the least bound, to a relative accuracy of 2e-6."""
    problem = segments.problem
    kinds = len(problem.budgets)
    highest = np.zeros(kinds)
    worth = problem.values / problem.counts
    np.maximum.at(highest, problem.kinds, np.maximum(worth, 0.0))
    # A required job may have to push another one out: prices can be higher than worths.
    highest *= (
        1.0 if not problem.required.any() else 1.0 + problem.counts.max(initial=1)
    )
    slopes, heights = [], []
    best, taken = segments.priced(np.zeros(kinds))
    priced = best
    for _ in range(_MOST_PLANES):
        slope = problem.budgets - taken
        slopes.append(slope)
        heights.append(priced.bound - slope @ priced.prices)
        prices, least = _lowest(np.array(slopes), np.array(heights), highest)
        if best.bound - least <= _NEAR * max(abs(best.bound), 1e-12):
            break
        priced, taken = segments.priced(prices)
        if priced.bound < best.bound:
            best = priced
    return best


def _lowest(
    slopes: np.ndarray, heights: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, float]:
    """Where the highest of some planes is lowest, and how high it is there."""
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
    assert answer is not None  # it has a point: any prices, high enough
    values = answer[0]
    return np.clip(values[1:], 0.0, 1.0) * scale, float(values[0] * unit + shift)
