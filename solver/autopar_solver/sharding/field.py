"""The problem left after reductions, as flat arrays for bounds and searches.

A *memory row* is a time at which the memory limit could be exceeded
(`autopar_solver.sharding.graph`).

The strategies of all nodes are numbered consecutively, node after node. These numbers
are called flat strategies. ``offsets[k]`` is the first flat strategy of node ``k``.
Nodes are numbered by position, in the problem's order.
"""

import dataclasses

import numpy as np

from autopar_solver.sharding.graph import Graph

Links = list[list[tuple[int, np.ndarray]]]
"""By node: its neighbours in order, with the finite table ``[S_node, S_other]``.

Forbidden pairs have the cost ``Field.forbidden`` in these tables.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlatMemory:
    """All memory terms of a field.

    Attributes:
        node: int64 ``[K]``, position of the term's node.
        starts: int64 ``[K]``, the first memory row in which the term is live.
        ends: int64 ``[K]``, the row after the last row in which the term is live.
        usage: float64, the usages of all terms one after another.
        first: int64 ``[K]``, the index at which a term starts in ``usage``.
        strategy: int64, the flat strategy of each entry of ``usage``.
        term: int64, the term of each entry of ``usage``.
        room: float64 ``[R]``, the memory that is left for the nodes' choices at each
          row.
        slack: a bound of the rounding error of sums of memory; 0 if all usages are
            whole numbers.
    """

    node: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    usage: np.ndarray
    first: np.ndarray
    strategy: np.ndarray
    term: np.ndarray
    room: np.ndarray
    slack: float

    def usage_of(self, choices: np.ndarray) -> np.ndarray:
        """Returns the memory ``[R]`` that the choices of all nodes use at each row."""
        return self._over_rows(self.usage[self.first + choices[self.node]])

    def expected_usage(self, chances: np.ndarray) -> np.ndarray:
        """The expected memory ``[R]`` at each row, if ``chances`` are probabilities."""
        weighted = self.usage * chances[self.strategy]
        return self._over_rows(np.bincount(self.term, weighted, len(self.node)))

    def _over_rows(self, amounts: np.ndarray) -> np.ndarray:
        size = len(self.room) + 1
        change = np.bincount(self.starts, amounts, size) - np.bincount(
            self.ends, amounts, size
        )
        return np.cumsum(change, dtype=np.float64)[:-1]

    def fits(self, choices: np.ndarray) -> bool:
        """Whether the choices stay within the memory at every row."""
        return bool((self.usage_of(choices) <= self.room + self.slack).all())

    def at(self, row: int, num_strategies: int) -> np.ndarray:
        """Returns the memory of each flat strategy at one row."""
        live = ((self.starts <= row) & (row < self.ends))[self.term]
        return np.bincount(self.strategy[live], self.usage[live], num_strategies)

    def cost_at(self, prices: np.ndarray, num_strategies: int) -> np.ndarray:
        """The cost of each flat strategy's memory at a price ``[R]`` per row."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weight = total[self.ends] - total[self.starts]
        return np.bincount(
            self.strategy, self.usage * weight[self.term], num_strategies
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Nodes with strategies, pairs of nodes with costs, all finite, and memory rows.

    Attributes:
        nodes: the graph's number of the node at each position.
        sizes: int64 ``[N]``, the number of strategies by node.
        offsets: int64 ``[N + 1]``, the first flat strategy of each node.
        costs: float64, the cost of each flat strategy.
        edges: positions ``(k, m)`` with ``k < m``.
        tables: ``[S_k, S_m]`` of each edge.
        memory: the memory rows.
        constant: the cost of the nodes that reductions have decided already.
        forbidden: a finite cost that no solution reaches, for methods that cannot
            compute with infinite costs.
    """

    nodes: tuple[int, ...]
    sizes: np.ndarray
    offsets: np.ndarray
    costs: np.ndarray
    edges: tuple[tuple[int, int], ...]
    tables: tuple[np.ndarray, ...]
    memory: FlatMemory
    constant: float
    forbidden: float

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def num_strategies(self) -> int:
        """The number of strategies of all nodes."""
        return len(self.costs)

    @property
    def num_pairs(self) -> int:
        """The number of entries of all tables together."""
        return sum(table.size for table in self.tables)

    def cost(self, choices: np.ndarray) -> float:
        """Returns the cost of the choices of all nodes, including the constant."""
        own = self.costs[self.offsets[:-1] + choices].sum()
        chosen = choices.tolist()
        shared = sum(
            float(table[chosen[k], chosen[m]])
            for (k, m), table in zip(self.edges, self.tables, strict=True)
        )
        return self.constant + float(own) + shared

    def owner(self) -> np.ndarray:
        """Returns the position of the node of each flat strategy."""
        return np.repeat(np.arange(self.num_nodes), self.sizes)

    def least(self, values: np.ndarray) -> np.ndarray:
        """Each node's flat strategy of least value; the first of equal ones."""
        lows = np.minimum.reduceat(values, self.offsets[:-1])
        at = np.flatnonzero(values <= np.repeat(lows, self.sizes))
        _, first = np.unique(self.owner()[at], return_index=True)
        return at[first] - self.offsets[:-1]


def flatten(graph: Graph) -> Field:
    """Numbers the remaining nodes of a graph; every node must have a strategy."""
    nodes = tuple(sorted(graph.costs))
    place = {i: k for k, i in enumerate(nodes)}
    sizes = np.array([len(graph.costs[i]) for i in nodes], np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    edges = [
        (k, place[j], table)
        for k, i in enumerate(nodes)
        for j, table in sorted(graph.links[i].items(), key=lambda item: item[0])
        if place[j] > k
    ]
    return Field(
        nodes=nodes,
        sizes=sizes,
        offsets=offsets,
        costs=np.concatenate([graph.costs[i] for i in nodes] or [np.zeros(0)]),
        edges=tuple((k, m) for k, m, _ in edges),
        tables=tuple(table for _, _, table in edges),
        memory=_flatten_memory(graph, nodes, sizes, offsets),
        constant=graph.constant,
        forbidden=_forbidden(graph),
    )


def links_of(field: Field) -> Links:
    """Returns the neighbours of each node, with the tables of the edges to them."""
    links: Links = [[] for _ in field.nodes]
    for (k, m), table in zip(field.edges, field.tables, strict=True):
        if table.size and table.max() == np.inf:
            table = np.minimum(table, field.forbidden)
        links[k].append((m, table))
        links[m].append((k, table.T))
    return [sorted(items, key=lambda item: item[0]) for items in links]


def _forbidden(graph: Graph) -> float:
    total = 1e-300
    for values in graph.costs.values():
        total += float(np.abs(values[values < np.inf]).max(initial=0.0))
    for i, links in graph.links.items():
        for j, table in links.items():
            if i < j:
                most = float(table.max())
                if most == np.inf:
                    most = float(np.max(table, where=table < np.inf, initial=-np.inf))
                total += max(most, -float(table.min()), 0.0)
    return 4.0 * total


def _flatten_memory(
    graph: Graph, nodes: tuple[int, ...], sizes: np.ndarray, offsets: np.ndarray
) -> FlatMemory:
    owners = [k for k, i in enumerate(nodes) if i in graph.memory]
    parts = [graph.memory[nodes[k]] for k in owners]
    counts = np.array([len(part.starts) for part in parts], np.int64)
    none = [np.zeros(0, np.int64)]
    node = np.repeat(np.array(owners, np.int64), counts)
    widths = sizes[node]
    first = np.cumsum(widths) - widths
    term = np.repeat(np.arange(len(node)), widths)
    return FlatMemory(
        node=node,
        starts=np.concatenate([part.starts for part in parts] or none),
        ends=np.concatenate([part.ends for part in parts] or none),
        usage=np.concatenate([part.usage.reshape(-1) for part in parts] or none),
        first=first,
        strategy=offsets[node][term] + np.arange(len(term)) - first[term],
        term=term,
        room=graph.room,
        slack=graph.slack,
    )
