"""A graph of a problem's nodes that reductions shrink, with a trail that undoes them.

Nodes keep their original numbers while strategies, links and whole nodes are removed.
The *trail* records each change that affects choices. Going back along it turns choices
for the reduced graph into choices for the problem.
"""

import dataclasses
from typing import Protocol

import numpy as np

from autopar_solver.sharding.memory import NodeMemory


class GraphChange(Protocol):
    """One recorded change of the graph.

    Choices name a strategy for every node of the problem.
    """

    def undo(self, choices: np.ndarray) -> None:
        """Turns choices after the change into choices before the change, in place."""
        ...

    def redo(self, choices: np.ndarray) -> None:
        """Turns choices before the change into choices after it that cost no more."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Restrict:
    """A node kept only some of its strategies.

    ``kept`` maps the new number of a strategy to its old number.

    ``instead`` maps every old strategy to the old strategy that replaces it.
    """

    node: int
    kept: np.ndarray
    instead: np.ndarray | None = None

    def undo(self, choices: np.ndarray) -> None:
        """Replaces the strategy's new number by its old number."""
        choices[self.node] = self.kept[choices[self.node]]

    def redo(self, choices: np.ndarray) -> None:
        """Replaces a strategy by its new number, or by that of its replacement."""
        old = choices[self.node]
        if self.instead is not None:
            old = self.instead[old]
        choices[self.node] = np.searchsorted(self.kept, old)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Follow:
    """A node whose strategy follows from that of another node, its leader.

    ``strategy`` maps each strategy of the leader to the strategy of the node.
    """

    node: int
    leader: int
    strategy: np.ndarray

    def undo(self, choices: np.ndarray) -> None:
        """Derives the node's strategy from the leader's choice."""
        choices[self.node] = self.strategy[choices[self.leader]]

    def redo(self, choices: np.ndarray) -> None:
        """Does nothing, because the leader's choice determines the node's."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Eliminate:
    """A node was removed.

    ``strategy`` maps the neighbours' strategies to the best strategy of the node.
    """

    node: int
    neighbours: tuple[int, ...]
    strategy: np.ndarray

    def undo(self, choices: np.ndarray) -> None:
        """Chooses the node's best strategy for the neighbours' choices."""
        key = tuple(choices[j] for j in self.neighbours)
        choices[self.node] = self.strategy[key]

    def redo(self, choices: np.ndarray) -> None:
        """Does nothing, because the neighbours' choices determine the node's."""


class ContradictionError(Exception):
    """No choice is possible: some node has no strategy left."""


class Graph:
    """Costs of nodes and links, and memory by node; reductions change it in place.

    Attributes:
        costs: node -> ``[S_i]``.
        links: node -> neighbour -> ``[S_i, S_j]``; both directions share one table.
        memory: node -> the memory of its strategies, for nodes with memory.
        constant: cost of the nodes whose strategies are decided.
        rows: numbers of the problem's memory rows that can still exceed the limit.
        room: the memory that this graph's nodes may use at each row; see `LimitRows`.
        slack: a bound of the rounding error of sums of memory.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.costs: dict[int, np.ndarray] = {}
        self.links: dict[int, dict[int, np.ndarray]] = {}
        self.memory: dict[int, NodeMemory] = {}
        self.constant = 0.0
        self.rows = np.zeros(0, np.int64)
        self.room = np.zeros(0)
        self.slack = 0.0
        self.trail: list[GraphChange] = []

    def copy(self) -> "Graph":
        """Copies the graph and its trail, so that the copy can change independently."""
        other = Graph()
        other.costs = dict(self.costs)
        other.links = {i: dict(links) for i, links in self.links.items()}
        other.memory = dict(self.memory)
        other.constant = self.constant
        other.rows = self.rows
        other.room = self.room
        other.slack = self.slack
        other.trail = list(self.trail)
        return other

    def add_node(self, node: int, costs: np.ndarray) -> None:
        """Adds a node without links or memory."""
        self.costs[node] = costs
        self.links[node] = {}

    def add_link(self, i: int, j: int, table: np.ndarray) -> None:
        """Adds a table ``[S_i, S_j]`` to the link between two different nodes."""
        if j in self.links[i]:
            table = self.links[i][j] + table
        self.links[i][j] = table
        self.links[j][i] = table.T

    def drop_link(self, i: int, j: int) -> None:
        """Removes the link between two nodes."""
        del self.links[i][j]
        del self.links[j][i]

    def drop_node(self, node: int, step: GraphChange) -> None:
        """Removes a node.

        The trail's new step tells how to choose its strategy later.
        """
        for j in self.links.pop(node):
            del self.links[j][node]
        del self.costs[node]
        self.memory.pop(node, None)
        self.trail.append(step)

    def restrict(
        self, node: int, kept: np.ndarray, instead: np.ndarray | None = None
    ) -> None:
        """Keeps only some strategies of a node, in their order.

        Args:
            node: the node.
            kept: the strategies to keep.
            instead: for each strategy, the kept strategy that can replace it.

        Raises:
            ContradictionError: no strategy is kept.
        """
        if not len(kept):
            raise ContradictionError(f"node {node} has no strategy left")
        self.costs[node] = self.costs[node][kept]
        for j, table in self.links[node].items():
            part = table[kept]
            self.links[node][j] = part
            self.links[j][node] = part.T
        if node in self.memory:
            self.memory[node] = self.memory[node].take(kept)
        self.trail.append(Restrict(node, kept, instead))

    def expand(self, choices: np.ndarray) -> np.ndarray:
        """Turns choices of the remaining nodes into choices of the problem's nodes."""
        choices = choices.copy()
        for step in reversed(self.trail):
            step.undo(choices)
        return choices

    def project(self, choices: np.ndarray, first_step: int = 0) -> np.ndarray:
        """Turns choices before a trail step into choices now, at no higher cost."""
        choices = choices.copy()
        for step in self.trail[first_step:]:
            step.redo(choices)
        return choices

    @property
    def num_links(self) -> int:
        """The number of links, each counted once."""
        return sum(map(len, self.links.values())) // 2

    @property
    def num_strategies(self) -> int:
        """The number of strategies of all nodes together."""
        return sum(map(len, self.costs.values()))
