"""Cuts a chain of work into stretches of about equal work at cheap boundaries.

The stretches minimise

    sum over stretches of (work / mean)^2 + WEIGHT * sum over cuts of crossing / typical

where ``mean`` is the work of the whole chain over the number of stretches, and
``typical`` the median of what crosses a boundary. The squares are least where all
stretches have the same work; a boundary that is crossed by less may be worth some
imbalance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError

# Between 0, where only the work counts, and 2, where two stretches may become one to
# save a typical boundary.
WEIGHT = 0.5


def stretch_cost(work: np.ndarray, mean: float) -> np.ndarray:
    """What stretches cost, whatever their boundaries."""
    return (work / mean) ** 2


def boundary_cost(crossing: np.ndarray) -> np.ndarray:
    """What a cut at each boundary costs.

    Args:
      crossing: float64 ``[units]``, bytes that cross the boundary before each unit.
    """
    known = crossing[1:]
    known = known[known > 0]
    typical = float(np.median(known)) if known.size else 1.0
    return WEIGHT * crossing / typical


def chain_cost(work: np.ndarray, crossing: np.ndarray, starts: Sequence[int]) -> float:
    """What is minimised, for given stretches.

    Args:
      work: float64 ``[units]``, of each unit.
      crossing: float64 ``[units]``, bytes that cross the boundary before each.
      starts: the unit at which each stretch begins; the first is 0.
    """
    mean = float(work.sum()) / len(starts) or 1.0
    stretches = np.add.reduceat(np.asarray(work, np.float64), list(starts))
    cuts = boundary_cost(np.asarray(crossing, np.float64))[list(starts[1:])]
    return float(stretch_cost(stretches, mean).sum() + cuts.sum())


def _costs(work: np.ndarray, crossing: np.ndarray, stretches: int) -> np.ndarray:
    """``[i, j]``: the cost of the units from i up to j, with the cut before them."""
    running = np.concatenate(([0.0], np.cumsum(work, dtype=np.float64)))
    mean = running[-1] / stretches or 1.0
    costs = stretch_cost(running[None, :] - running[:, None], mean)
    begin = np.append(boundary_cost(np.asarray(crossing, np.float64)), 0.0)
    begin[0] = 0.0
    costs += begin[:, None]
    costs[np.tril_indices(len(work) + 1)] = np.inf
    return costs


def cut_chain(
    work: np.ndarray, crossing: np.ndarray, stretches: int
) -> tuple[int, ...]:
    """Cuts a chain into a number of stretches.

    Args:
      work: float64 ``[units]``, of each unit, such as FLOPs.
      crossing: float64 ``[units]``, bytes that cross the boundary before each unit; the
        first is not read.
      stretches: how many, from 1 to the number of units.

    Returns:
      The unit at which each stretch begins; the first is 0.

    Raises:
      InputError: there are fewer units than stretches, or no stretch.

    >>> cut_chain(np.ones(4), np.array([0.0, 9.0, 1.0, 9.0]), 2)
    (0, 2)
    """
    units = len(work)
    if not 1 <= stretches <= units:
        raise InputError(
            f"cut_chain: {units} units make 1 to {units} stretches, not {stretches}."
        )
    costs = _costs(work, crossing, stretches)
    best = costs[0].copy()
    chosen: list[np.ndarray] = []
    for _ in range(stretches - 1):
        totals = best[:, None] + costs
        source = totals.argmin(axis=0)
        best = totals[source, np.arange(units + 1)]
        chosen.append(source)
    starts, end = [], units
    for source in reversed(chosen):
        end = int(source[end])
        starts.append(end)
    return (0, *reversed(starts))
