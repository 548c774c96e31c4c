"""What is lost between buffers that are placed in one block of memory.

XLA places the buffers of a program at fixed addresses, the largest first, each in the
smallest hole that it fits among those that are there at some time of its own
(openxla/xla, ``GlobalDecreasingSizeBestFitHeap`` in
``xla/service/heap_simulator/heap_simulator.cc``). So a program may need more than what
is live at any time.
"""

from __future__ import annotations

import numpy as np

# Smaller buffers fill holes; leaving them out bounds the work here.
_LEAST_PART = 0.005


def lost_bytes(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray) -> float:
    """Bytes of the block beyond the most that is live at once.

    >>> first, last = np.array([0, 1, 2]), np.array([0, 1, 2])
    >>> lost_bytes(first, last, np.array([4.0, 6.0, 5.0]))
    0.0

    Args:
      first: int ``[buffers]``, the first time of each buffer.
      last: int ``[buffers]``, the last one.
      nbytes: float64 ``[buffers]``.
    """
    if not len(nbytes):
        return 0.0
    times = int(last.max()) + 2
    whole = _most(first, last, nbytes, times)
    large = np.flatnonzero(nbytes > _LEAST_PART * whole)
    first, last, nbytes = first[large], last[large], nbytes[large]
    # Of one size, those that are there longest come first.
    order = np.lexsort((first - last, -nbytes))
    first, last, nbytes = first[order], last[order], nbytes[order]
    begins, ends = np.zeros(len(nbytes)), np.zeros(len(nbytes))
    for k, size in enumerate(nbytes):
        beside = np.flatnonzero((first[:k] <= last[k]) & (last[:k] >= first[k]))
        begins[k] = _hole(begins[beside], ends[beside], float(size))
        ends[k] = begins[k] + size
    top = float(ends.max(initial=0.0))
    return max(0.0, top - _most(first, last, nbytes, times))


def _hole(begins: np.ndarray, ends: np.ndarray, size: float) -> float:
    """Where the smallest hole of a size begins, or else what is there ends."""
    if not len(begins):
        return 0.0
    order = np.argsort(begins)
    free = np.concatenate(([0.0], np.maximum.accumulate(ends[order])))
    room = begins[order] - free[:-1]
    fits = np.flatnonzero(room >= size)
    if len(fits):
        return float(free[fits[np.argmin(room[fits])]])
    return float(free[-1])


def _most(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray, times: int) -> float:
    """Most bytes live at once."""
    change = np.zeros(times)
    np.add.at(change, first, nbytes)
    np.add.at(change, last + 1, -nbytes)
    return float(np.cumsum(change).max(initial=0.0))
