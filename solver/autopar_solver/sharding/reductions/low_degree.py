"""Eliminates nodes with at most two neighbours by dynamic programming."""

import heapq

import numpy as np

from autopar_solver.sharding.graph import ContradictionError, Eliminate, Graph

MAX_WORK = 4_000_000
"""Additions per node above which it is left alone."""


def eliminate_low_degree(graph: Graph) -> None:
    """Removes nodes of degree 0, 1 and 2 whose best answers occupy no memory.

    The best answer of ``v`` to neighbours ``a``, ``b`` costs
    ``min_k c[k] + T_a[k, a] + T_b[k, b]``: a cost of its only neighbour, or a link
    between the two. That is exact as long as the answer occupies nothing above the
    node's least at any time that can break the limit.
    """
    waiting = [(_work(graph, i), i) for i in graph.costs if len(graph.links[i]) <= 2]
    heapq.heapify(waiting)
    while waiting:
        work, i = heapq.heappop(waiting)
        if i not in graph.costs or work != _work(graph, i) or work > MAX_WORK:
            continue
        neighbours = tuple(graph.links[i])
        if _eliminate(graph, i, neighbours):
            for j in neighbours:
                if len(graph.links[j]) <= 2:
                    heapq.heappush(waiting, (_work(graph, j), j))


def _work(graph: Graph, i: int) -> int:
    work = len(graph.costs[i])
    for table in graph.links[i].values():
        work *= table.shape[1]
    return work if len(graph.links[i]) <= 2 else MAX_WORK + 1


def _eliminate(graph: Graph, i: int, neighbours: tuple[int, ...]) -> bool:
    total = graph.costs[i].reshape((-1,) + (1,) * len(neighbours))
    for axis, j in enumerate(neighbours):
        table = graph.links[i][j]
        shape = [len(table)] + [1] * len(neighbours)
        shape[axis + 1] = table.shape[1]
        total = total + table.reshape(shape)
    answer = total.argmin(axis=0)
    if not _is_free(graph, i, answer):
        return False
    least = np.take_along_axis(total, answer[None], axis=0)[0]
    if not (least < np.inf).any():
        raise ContradictionError(f"node {i} has no answer to its neighbours")
    if not neighbours:
        graph.constant += float(least)
    elif len(neighbours) == 1:
        graph.costs[neighbours[0]] = graph.costs[neighbours[0]] + least
    else:
        graph.add_link(neighbours[0], neighbours[1], least)
    graph.drop_node(i, Eliminate(i, neighbours, answer))
    return True


def _is_free(graph: Graph, i: int, answer: np.ndarray) -> bool:
    if i not in graph.memory:
        return True
    return not graph.memory[i].usage[:, np.unique(answer)].any()
