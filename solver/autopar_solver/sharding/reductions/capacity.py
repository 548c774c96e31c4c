"""Settles memory that is certain, and drops strategies that need more than is left."""

import numpy as np

from autopar_solver.sharding.graph import ContradictionError, Graph
from autopar_solver.sharding.memory import NodeMemory


def settle_memory(graph: Graph) -> None:
    """Moves what every strategy of a node occupies out of its memory into the room.

    Raises:
        ContradictionError: some row has no room left.
    """
    room = graph.room.copy()
    for i in list(graph.memory):
        memory = graph.memory[i]
        least = memory.usage.min(axis=1)
        spread = memory.usage.max(axis=1) > least
        if spread.all() and not least.any():
            continue
        for start, end, amount in zip(
            memory.starts.tolist(), memory.ends.tolist(), least.tolist(), strict=True
        ):
            room[start:end] -= amount
        if not spread.any():
            del graph.memory[i]
            continue
        graph.memory[i] = NodeMemory(
            memory.starts[spread],
            memory.ends[spread],
            memory.usage[spread] - least[spread, None],
        )
    graph.room = room
    if len(room) and room.min() < -graph.slack:
        raise ContradictionError("the least memory is over the limit")


def drop_oversized(graph: Graph) -> None:
    """Removes strategies that do not fit even if all other nodes are frugal."""
    if not len(graph.room):
        return
    lows = _range_minima(graph.room)
    for i in list(graph.memory):
        memory = graph.memory[i]
        left = _range_min(lows, memory.starts, memory.ends) + graph.slack
        fits = (memory.usage <= left[:, None]).all(axis=0)
        if not fits.all():
            graph.restrict(i, np.flatnonzero(fits))


def drop_loose_rows(graph: Graph) -> None:
    """Forgets rows that no choice can break any more."""
    if not len(graph.room):
        return
    change = np.zeros(len(graph.room) + 1)
    for memory in graph.memory.values():
        most = memory.usage.max(axis=1)
        np.add.at(change, memory.starts, most)
        np.subtract.at(change, memory.ends, most)
    # Rounding in the sums must not hide a row that can break.
    high = np.cumsum(change)[:-1] * (1 + 1e-12) + graph.slack
    kept = np.flatnonzero(high > graph.room)
    if len(kept) == len(graph.room):
        return
    graph.rows, graph.room = graph.rows[kept], graph.room[kept]
    for i, memory in list(graph.memory.items()):
        starts = np.searchsorted(kept, memory.starts)
        ends = np.searchsorted(kept, memory.ends)
        live = starts < ends
        if live.any():
            graph.memory[i] = NodeMemory(starts[live], ends[live], memory.usage[live])
        else:
            del graph.memory[i]


def _range_minima(values: np.ndarray) -> list[np.ndarray]:
    """Minima of all stretches whose length is a power of two."""
    lows, width = [values], 1
    while 2 * width <= len(values):
        lows.append(np.minimum(lows[-1][:-width], lows[-1][width:]))
        width *= 2
    return lows


def _range_min(
    lows: list[np.ndarray], starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    levels = np.frexp(ends - starts)[1] - 1
    result = np.empty(len(starts))
    for level in np.unique(levels):
        at = np.flatnonzero(levels == level)
        low, width = lows[level], 1 << int(level)
        result[at] = np.minimum(low[starts[at]], low[ends[at] - width])
    return result
