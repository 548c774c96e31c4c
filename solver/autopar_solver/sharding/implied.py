"""Rows of memory that others imply, because layers repeat.

What a row of some layer holds is that of the layer before, a layer's part more or less.
Such a sequence is convex, so it is largest at one of its ends::

    held[i] <= (held[i - p] + held[i + p]) / 2   for all i between a and b, p apart
    =>  held[i] <= max(held[a], held[b])         for every choice

Here ``held`` counts the terms of each kind that are live, and a kind is a node with its
usage. So the rows between two ends say nothing that the ends do not.
"""

from collections.abc import Sequence

import numpy as np

MOST_PERIODS = 4
"""How many distances are looked at, those that repeat most."""

MOST_ENTRIES = 30_000_000
"""Kinds times rows; a larger table would take more memory than it saves."""

MIN_ROWS = 64
"""Fewer rows are not worth a look."""


def implied_rows(
    kinds: np.ndarray, first: np.ndarray, last: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """Marks rows that are broken only where one that is not marked is broken.

    Args:
        kinds: int64 ``[M]``, of each term: terms of one kind have one node and usage.
        first: int64 ``[M]``, first row of each.
        last: int64 ``[M]``, row after the last.
        least: float64 ``[R]``, what every choice uses.

    >>> first, last = np.array([0, 1, 2]), np.array([3, 3, 3])
    >>> marked = np.zeros(3, bool)
    >>> held = held_by_kind(np.array([0, 0, 0]), first, last, 3)
    >>> held.tolist()
    [[1, 2, 3]]
    >>> convex(held, np.zeros(3), 1).tolist()
    [False, True, False]
    """
    count = len(least)
    out = np.zeros(count, bool)
    if count < MIN_ROWS or not len(kinds):
        return out
    if (int(kinds.max()) + 1) * count > MOST_ENTRIES:
        return out
    left = np.arange(count)
    held = held_by_kind(kinds, first, last, count)
    for period in periods(held):
        marked = convex(held, least[left], period)
        out[left[marked]] = True
        left, held = left[~marked], held[:, ~marked]
    return out


def held_by_kind(
    kinds: np.ndarray, first: np.ndarray, last: np.ndarray, count: int
) -> np.ndarray:
    """Returns how many terms of each kind are live at each row, ``[kinds, R]``."""
    change = np.zeros((int(kinds.max()) + 1, count + 1), np.int32)
    np.add.at(change, (kinds, first), 1)
    np.subtract.at(change, (kinds, last), 1)
    return np.cumsum(change, axis=1, dtype=np.int32)[:, :-1]


def periods(held: np.ndarray) -> Sequence[int]:
    """Returns the distances at which the same change comes again, the commonest first.

    Two different changes may look alike by chance; then a distance is tried in vain.
    """
    rng = np.random.default_rng(0)
    marks = np.zeros(held.shape[1] - 1, np.int64)
    for weight, row in zip(rng.integers(1, 1 << 31, len(held)), held, strict=True):
        marks += weight * np.diff(row)
    order = np.argsort(marks, kind="stable")
    same = np.diff(marks[order]) == 0
    gaps = np.diff(order)[same]
    found, times = np.unique(gaps, return_counts=True)
    best = np.argsort(-times, kind="stable")[:MOST_PERIODS]
    return [int(found[k]) for k in best]


def convex(held: np.ndarray, least: np.ndarray, period: int) -> np.ndarray:
    """Marks rows that hold no more than the mean of those a period before and behind.

    Rows in a run of them hold no more than the larger of the run's two neighbours.
    """
    out = np.zeros(len(least), bool)
    if 2 * period < len(least):
        middle = slice(period, len(least) - period)
        below = held[:, middle] * 2 <= held[:, : -2 * period] + held[:, 2 * period :]
        less = 2 * least[middle] <= least[: -2 * period] + least[2 * period :]
        out[middle] = below.all(axis=0) & less
    return out
