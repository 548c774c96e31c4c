"""Drops strategies that no solution can use, and nodes with nothing to choose."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from autopar_solver.sharding.graph import ContradictionError, Eliminate, Graph


def drop_infinite(graph: Graph) -> None:
    """Removes strategies of infinite cost."""
    for i in list(graph.costs):
        finite = np.isfinite(graph.costs[i])
        if not finite.all():
            graph.restrict(i, np.flatnonzero(finite))


def drop_unsupported(graph: Graph) -> None:
    """Removes strategies that some neighbour cannot be combined with.

    This is arc consistency (Mackworth's AC-3): what is removed can make strategies of
    neighbours unsupported in turn.
    """
    waiting = deque(graph.costs)
    queued = set(waiting)
    while waiting:
        i = waiting.popleft()
        queued.discard(i)
        supported = _has_support(graph, i)
        if supported.all():
            continue
        graph.restrict(i, np.flatnonzero(supported))
        for j in graph.links[i]:
            if j not in queued:
                queued.add(j)
                waiting.append(j)


def _has_support(graph: Graph, i: int) -> np.ndarray:
    supported = np.isfinite(graph.costs[i])
    for table in graph.links[i].values():
        supported &= table.min(axis=1) < np.inf
    return supported


def drop_single(graph: Graph, nodes: Iterable[int] | None = None) -> None:
    """Removes nodes with one strategy: their links become costs of the neighbours.

    What such a node occupies is fixed and already outside the graph: usage is counted
    above each node's least.
    """
    for i in list(graph.costs if nodes is None else nodes):
        if len(graph.costs[i]) > 1 or i in graph.memory:
            continue
        if graph.costs[i][0] == np.inf:
            raise ContradictionError(f"the only strategy of node {i} is forbidden")
        for j, table in graph.links[i].items():
            graph.costs[j] = graph.costs[j] + table[0]
        graph.constant += float(graph.costs[i][0])
        graph.drop_node(i, Eliminate(i, (), np.array(0)))
