"""Drops strategies that another strategy of the same node replaces at no loss."""

import numpy as np

from autopar_solver.sharding.graph import Graph

MAX_WORK = 20_000_000
"""Comparisons per node above which the test is skipped."""


def drop_dominated(graph: Graph) -> None:
    """Removes strategies dominated by another one (Goldstein's criterion).

    ``b`` dominates ``a`` at node ``i`` if swapping ``a`` for ``b`` never costs more,
    whatever the neighbours choose, and ``b`` never occupies more::

        c[b] - c[a] + sum_j max_k (T_j[b, k] - T_j[a, k]) <= 0
    """
    for i in list(graph.costs):
        if _work(graph, i) > MAX_WORK or not np.isfinite(graph.costs[i]).all():
            continue
        replaceable = _replaceable(graph, i)
        if np.count_nonzero(replaceable) == len(replaceable):
            continue
        instead = replacements(replaceable)
        kept = np.unique(instead)
        if len(kept) < len(instead):
            graph.restrict(i, kept, instead)


def _work(graph: Graph, i: int) -> int:
    size = len(graph.costs[i])
    return size * size * (1 + sum(t.shape[1] for t in graph.links[i].values()))


def _replaceable(graph: Graph, i: int) -> np.ndarray:
    """``[S, S]``: entry ``[b, a]`` says that ``b`` dominates ``a``."""
    costs = graph.costs[i]
    loss = costs[:, None] - costs[None, :]
    candidates = loss < np.inf
    if i in graph.memory:
        for usage in graph.memory[i].usage:
            candidates &= usage[:, None] <= usage[None, :]
    for table in graph.links[i].values():
        loss += _largest_loss(table)
        if not (candidates & (loss <= 0)).sum() > len(costs):
            break
    return candidates & (loss <= 0)


def _largest_loss(table: np.ndarray) -> np.ndarray:
    """``max_k (T[b, k] - T[a, k])``; pairs forbidden under ``a`` do not count."""
    if not np.isfinite(table).all():
        finite = table < np.inf
        loss = np.where(finite, table, 0.0)[:, None, :] - np.where(finite, table, 0.0)
        loss = np.where(finite[:, None, :], loss, np.inf)
        loss = np.where(finite[None, :, :], loss, -np.inf).max(axis=2)
        # Nothing supports ``a`` at all: anything may replace it.
        return np.where(loss == -np.inf, 0.0, loss)
    return (table[:, None, :] - table[None, :, :]).max(axis=2)


def replacements(replaceable: np.ndarray) -> np.ndarray:
    """For each strategy the one to use instead; of equal ones the first stays.

    >>> replacements(np.array([[True, True], [True, True]])).tolist()
    [0, 0]
    """
    instead = np.arange(len(replaceable))
    for a in reversed(range(len(replaceable))):
        better = replaceable[:, a] & (instead == np.arange(len(instead)))
        better[a] = False
        if better.any():
            instead[instead == a] = int(better.argmax())
    return instead
