"""Folds a node into the neighbour whose strategy determines its own.

If every row of a link ``(i, j)`` has at most one finite entry, the strategy of ``i``
determines that of ``j``: ``j`` follows ``i``. Its costs, links and memory move to
``i``. Folding goes in rounds: each node picks at most one leader, maps are composed
along the chains, and every link of a follower is rewritten once.
"""

import numpy as np

from autopar_solver.sharding.graph import Follow, Graph
from autopar_solver.sharding.memory import NodeMemory, sum_memories


def fold_followers(graph: Graph) -> None:
    """Folds until no node follows another."""
    while maps := _compose(_pick_leaders(graph)):
        _apply(graph, maps)


def follows(table: np.ndarray) -> np.ndarray | None:
    """Row -> the only column it can be combined with; None if some row has several.

    >>> inf = np.inf
    >>> follows(np.array([[inf, 3.0], [1.0, inf], [inf, 0.0]])).tolist()
    [1, 0, 1]
    """
    finite = table < np.inf
    if np.count_nonzero(finite) > len(table):
        return None
    if (finite.sum(axis=1) > 1).any():
        return None
    return finite.argmax(axis=1)


def _pick_leaders(graph: Graph) -> dict[int, tuple[int, np.ndarray]]:
    """Follower -> (leader, strategy of the leader -> strategy of the follower)."""
    leader: dict[int, tuple[int, np.ndarray]] = {}
    root: dict[int, int] = {}
    for i, links in graph.links.items():
        for j, table in links.items():
            if i in leader or not _worthwhile(graph, i, j):
                continue
            if _find(root, j) == i:
                continue
            strategy = follows(table.T)
            if strategy is not None:
                leader[i] = (j, strategy)
                root[i] = j
    return leader


def _worthwhile(graph: Graph, follower: int, leader: int) -> bool:
    """Folding into a node with more strategies must not multiply large tables."""
    grows = len(graph.costs[leader]) > len(graph.costs[follower])
    return not grows or len(graph.links[follower]) <= 4


def _find(root: dict[int, int], node: int) -> int:
    end = node
    while end in root:
        end = root[end]
    while node != end:
        root[node], node = end, root[node]
    return end


def _compose(
    leader: dict[int, tuple[int, np.ndarray]],
) -> dict[int, tuple[int, np.ndarray]]:
    """Follows leaders of leaders, so that every follower maps to one that stays."""
    done: dict[int, tuple[int, np.ndarray]] = {}
    for node in leader:
        chain = [node]
        while (above := leader[chain[-1]][0]) in leader and above not in done:
            chain.append(above)
        for member in reversed(chain):
            if member in done:
                continue
            above, strategy = leader[member]
            if above in done:
                top, to_above = done[above]
                done[member] = (top, strategy[to_above])
            else:
                done[member] = (above, strategy)
    return done


def _apply(graph: Graph, maps: dict[int, tuple[int, np.ndarray]]) -> None:
    memory: dict[int, list[NodeMemory]] = {}
    for node, (top, strategy) in maps.items():
        graph.costs[top] = graph.costs[top] + graph.costs[node][strategy]
        if node in graph.memory:
            memory.setdefault(top, []).append(graph.memory[node].take(strategy))
    _move_links(graph, maps)
    for top, parts in memory.items():
        own = [graph.memory[top]] if top in graph.memory else []
        graph.memory[top] = sum_memories(own + parts)
    for node, (top, strategy) in maps.items():
        graph.drop_node(node, Follow(node, top, strategy))


def _move_links(graph: Graph, maps: dict[int, tuple[int, np.ndarray]]) -> None:
    for node in maps:
        for other, table in list(graph.links[node].items()):
            graph.drop_link(node, other)
            i, j, moved = _relink(node, other, table, maps)
            if i == j:
                graph.costs[i] = graph.costs[i] + np.diagonal(moved)
            else:
                graph.add_link(i, j, moved)


def _relink(
    node: int,
    other: int,
    table: np.ndarray,
    maps: dict[int, tuple[int, np.ndarray]],
) -> tuple[int, int, np.ndarray]:
    """The link as it is between the nodes that stay; a diagonal if they are one."""
    i, rows = maps[node]
    table = table[rows]
    if other not in maps:
        return i, other, table
    j, columns = maps[other]
    return i, j, table[:, columns]
