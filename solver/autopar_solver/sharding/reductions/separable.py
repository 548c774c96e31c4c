"""Drops links whose cost is a sum of one term for each end."""

import numpy as np

from autopar_solver.sharding.graph import Graph

RELATIVE_ROUNDING = 1e-13
"""Differences below this times the largest entry are taken for rounding."""


def drop_separable(graph: Graph) -> None:
    """Moves ``cost[a, b] = u[a] + v[b]`` into the costs of the two nodes."""
    for i, links in graph.links.items():
        for j, table in list(links.items()):
            if i > j:
                continue
            if (parts := split_separable(table)) is not None:
                graph.costs[i] = graph.costs[i] + parts[0]
                graph.costs[j] = graph.costs[j] + parts[1]
                graph.drop_link(i, j)


def split_separable(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The ``u`` and ``v`` of a separable table; None if it is not one.

    >>> split_separable(np.array([[1.0, 2.0], [4.0, 5.0]]))
    (array([1., 4.]), array([0., 1.]))
    """
    # Most tables fail at one corner; looking there first saves the full test.
    corners = table[[0, -1, 0, -1], [0, -1, -1, 0]]
    if not np.isfinite(corners).all():
        return None
    corner = corners @ (1.0, 1.0, -1.0, -1.0)
    if not abs(corner) <= 4 * RELATIVE_ROUNDING * abs(table).max() < np.inf:
        return None
    u, v = table[:, 0], table[0] - table[0, 0]
    error = abs(table - u[:, None] - v).max()
    return (u, v) if error <= RELATIVE_ROUNDING * abs(table).max() else None
