"""Builds the graph of a problem: merges loops and parallel edges, finds memory rows."""

import numpy as np

from autopar_solver.sharding.graph import Graph
from autopar_solver.sharding.memory import find_rows
from autopar_solver.sharding.problem import ShardingProblem


def build_graph(problem: ShardingProblem) -> Graph:
    """Copies a problem into a graph and its memory into rows."""
    graph = Graph()
    for i, costs in enumerate(problem.node_costs):
        graph.add_node(i, costs.astype(np.float64))
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        if i == j:
            graph.costs[i] = graph.costs[i] + np.diagonal(table)
        else:
            graph.add_link(i, j, table)
    rows, graph.memory = find_rows(problem)
    graph.rows, graph.room, graph.slack = np.arange(len(rows)), rows.room, rows.slack
    return graph
