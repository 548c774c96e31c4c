"""Small graphs and memory terms for tests."""

import numpy as np

from autopar_solver.sharding.graph import Graph, NodeMemory


def graph_of(costs, links, memory=None, room=()):
    graph = Graph()
    for i, own in enumerate(costs):
        graph.add_node(i, np.array(own, np.float64))
    for (i, j), table in links.items():
        graph.add_link(i, j, np.array(table, np.float64))
    graph.memory = dict(memory or {})
    graph.room = np.array(room, np.float64)
    graph.rows = np.arange(len(room))
    return graph


def term(start, end, *usage):
    return NodeMemory(np.array([start]), np.array([end]), np.array([usage]))
