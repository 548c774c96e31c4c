"""Repeated layers: finds periodic runs in the sequence of operators.

A model that applies the same block L times leaves the same sequence of
equations L times in the forward pass, again in the backward pass, and its
parameters give the optimizer the same sequence once more. Operators at the
same offset of a period form one *class* and get one set of decisions, so that
a model of 96 layers costs the solver about what one layer does. Nothing is
read from names.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

# How many candidate periods are tried a round; the count of a period among
# neighbouring equal operators ranks them.
_CANDIDATES = 128
_ROUNDS = 64


def repeated_classes(
    signatures: Sequence[Hashable], *, min_length: int = 2
) -> np.ndarray:
    """Assigns each operator of a sequence to a class.

    Args:
      signatures: what must be equal for two operators to share decisions.
      min_length: shortest period that counts as a layer.

    Returns:
      int array ``[operators]``: the smallest operator index of its class.
    """
    codes = _codes(signatures)
    classes = np.arange(len(codes))
    free = np.ones(len(codes), dtype=bool)
    for _ in range(_ROUNDS):
        runs, period = _best_runs(codes, free, min_length)
        if not runs:
            break
        for start, stop in runs:
            offsets = np.arange(start, stop)
            shortest = _shortest_period(codes[start:stop], period, min_length)
            classes[offsets] = start + (offsets - start) % shortest
            free[offsets] = False
    return classes


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    table: dict[Hashable, int] = {}
    return np.array(
        [table.setdefault(s, len(table)) for s in signatures], dtype=np.int64
    )


def _best_runs(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> tuple[list[tuple[int, int]], int]:
    """Returns the runs (start, stop) of the period that saves the most operators."""
    best: tuple[list[tuple[int, int]], int] = ([], 0)
    best_saved = 0
    for period in _candidate_periods(codes, free, min_length):
        equal = (codes[:-period] == codes[period:]) & free[:-period] & free[period:]
        runs = _true_runs(equal, period, free)
        saved = sum(stop - start - period for start, stop in runs)
        if saved > best_saved:
            best, best_saved = (runs, period), saved
    return best


def _shortest_period(run: np.ndarray, period: int, min_length: int) -> int:
    """Returns the shortest period of a run: one of period 64 may have period 16."""
    for divisor in range(min_length, period // 2 + 1):
        if period % divisor == 0 and np.array_equal(run[:-divisor], run[divisor:]):
            return divisor
    return period


def _candidate_periods(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> list[int]:
    """Distances between neighbouring occurrences of the same operator."""
    positions = np.flatnonzero(free)
    order = positions[np.argsort(codes[positions], kind="stable")]
    gaps = np.diff(order)[np.diff(codes[order]) == 0]
    gaps = gaps[gaps >= min_length]
    if gaps.size == 0:
        return []
    values, counts = np.unique(gaps, return_counts=True)
    rank = np.argsort(-np.sqrt(values) * counts, kind="stable")[:_CANDIDATES]
    return sorted(values[rank].tolist())


def _true_runs(
    equal: np.ndarray, period: int, free: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the longest runs that repeat, as (start, stop) of operators."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= period
    out: list[tuple[int, int]] = []
    for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True):
        if out and start < out[-1][1]:
            continue  # the last period of the run before overlaps this one
        if free[start : stop + period].all():
            out.append((start, stop + period))
    return out
