"""Drops strategies that another strategy of the same node replaces at no loss."""

import numpy as np

from autopar_solver.sharding.graph import Graph

MAX_WORK = 20_000_000
"""Comparisons per node above which the test is skipped."""

AT_ONCE = 1_000_000
"""Entries of a table that are compared at once."""


def drop_dominated(graph: Graph) -> None:
    """Removes strategies dominated by another one (Goldstein's criterion).

    ``b`` dominates ``a`` at node ``i`` if swapping ``a`` for ``b`` never costs more,
    whatever the neighbours choose, and ``b`` never occupies more::

        c[b] - c[a] + sum_j max_k (T_j[b, k] - T_j[a, k]) <= 0
    """
    for i in list(graph.costs):
        if _work(graph, i) > MAX_WORK or not np.isfinite(graph.costs[i]).all():
            continue
        replaceable = replaceable_by(graph, i)
        if np.count_nonzero(replaceable) == len(replaceable):
            continue
        instead = replacements(replaceable)
        kept = np.unique(instead)
        if len(kept) < len(instead):
            graph.restrict(i, kept, instead)


def _work(graph: Graph, i: int) -> int:
    size = len(graph.costs[i])
    return size * size * (1 + sum(t.shape[1] for t in graph.links[i].values()))


def replaceable_by(graph: Graph, i: int) -> np.ndarray:
    """``[S, S]``: entry ``[b, a]`` says that ``b`` dominates ``a``.

    Most pairs are ruled out by one column of each table: that where ``a`` is cheapest.
    Only the others are compared column by column.
    """
    costs = graph.costs[i]
    tables = sorted(graph.links[i].values(), key=lambda t: t.shape[1])
    loss = costs[:, None] - costs[None, :]
    candidates = loss < np.inf
    if i in graph.memory:
        for usage in graph.memory[i].usage:
            candidates &= usage[:, None] <= usage[None, :]
    least = [_least_loss(table) for table in tables]
    candidates &= sum(least, loss) <= 0
    np.fill_diagonal(candidates, False)
    better, worse = np.nonzero(candidates)
    total = loss[better, worse]
    for k, table in enumerate(tables):
        total = total + _largest_loss(table, better, worse)
        rest = sum(least[k + 1 :], np.zeros_like(loss))
        # What is left adds that much at least.
        kept = np.flatnonzero(total + rest[better, worse] <= 0)
        better, worse, total = better[kept], worse[kept], total[kept]
    out = np.eye(len(costs), dtype=bool)
    out[better, worse] = True
    return out


def _least_loss(table: np.ndarray) -> np.ndarray:
    """At most ``max_k (T[b, k] - T[a, k])``: its value where ``T[a, k]`` is least."""
    column = table.argmin(axis=1)
    present = table[np.arange(len(table)), column]
    loss = table[:, column] - np.where(present < np.inf, present, 0.0)
    # Nothing supports ``a`` at all: anything may replace it.
    return np.where(present < np.inf, loss, 0.0)


def _largest_loss(
    table: np.ndarray, better: np.ndarray, worse: np.ndarray
) -> np.ndarray:
    """``max_k (T[b, k] - T[a, k])`` of pairs; what ``a`` forbids does not count."""
    out = np.empty(len(better))
    step = max(1, AT_ONCE // table.shape[1])
    finite = bool(np.isfinite(table).all())
    for first in range(0, len(better), step):
        one, two = better[first : first + step], worse[first : first + step]
        if finite:
            out[first : first + step] = (table[one] - table[two]).max(axis=1)
            continue
        supported = table[two] < np.inf
        present = np.where(supported, table[two], 0.0)
        loss = np.where(supported, table[one] - present, -np.inf).max(axis=1)
        out[first : first + step] = np.where(supported.any(axis=1), loss, 0.0)
    return out


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
