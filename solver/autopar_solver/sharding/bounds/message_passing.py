"""Bounds the cost of each strategy by tree-reweighted message passing (TRW-S).

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", IEEE PAMI 28(10), 2006. A sweep visits the nodes in order and then in
reverse order. It never lowers the bound. A message ``M[k -> m]`` holds, for each
strategy of ``m``, a lower bound of the cost of ``k`` and of the nodes behind ``k``.
These messages are numbers of the dual problem; no device sends them.

The inner loop of message passing is compiled if numba is installed. Numba is optional:
without it, and on small fields, the same computation runs in numpy. The compiled loop
and numpy give the same messages up to rounding. On thousands of nodes the compiled loop
is about ten times faster, because it avoids numpy's overhead per node.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar_solver.sharding.field import Field, links_of
from autopar_solver.sharding.graph import Graph, Restrict

MIN_PAIRS = 300_000
"""Smaller fields are swept faster in numpy than the compiled loop is loaded."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """The work of a sweep at one node.

    Messages into node ``k`` are in ``buffer[start:end]``, one row per neighbour.

    Attributes:
        node: the node's position.
        low: the first flat strategy of the node.
        high: the flat strategy after the last.
        start: the index at which the messages into the node start.
        end: the index at which they end.
        first: the first neighbour that receives a message.
        last: the neighbour after the last neighbour that receives a message.
        share: the part, 0 to 1, of the node's cost that each chain through the node
            counts. TRW-S divides the graph into chains of nodes.
        table: ``[sum of S_m, S_k]``, the stacked tables to the receiving neighbours.
        neighbour: ``[sum of S_m]``, the neighbour of each row of ``table``.
        begins: for each neighbour, its first row of ``table``.
        out: the positions of the sent messages in the buffer.
    """

    node: int
    low: int
    high: int
    start: int
    end: int
    first: int
    last: int
    share: float
    table: np.ndarray
    neighbour: np.ndarray
    begins: np.ndarray
    out: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """The visits of one pass over the nodes, as flat arrays for the compiled loop.

    Attributes:
        nodes: int64 ``[N, 7]``: low, size, start, first, last, first link, neighbours.
        shares: ``[N]``, `Visit.share` of each node.
        links: int64 ``[L, 2]``: the neighbour's number of strategies, and the position
            of its message in the buffer.
        tables: all tables one after another, ``[S_neighbour, S_node]`` each.
        widest: the largest number of strategies.
    """

    nodes: np.ndarray
    shares: np.ndarray
    links: np.ndarray
    tables: np.ndarray
    widest: int

    def run(
        self, loop: Callable[..., float], costs: np.ndarray, buffer: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Runs one pass; updates the buffer. Returns bound and rises (`Sweep`)."""
        rises = np.empty(len(costs))
        scratch = np.empty(self.widest)
        arrays = (self.nodes, self.shares, self.links, self.tables)
        return loop(*arrays, costs, buffer, rises, scratch), rises


def record_tape(visits: Sequence[Visit]) -> Tape:
    """Writes the visits of a pass into flat arrays."""
    counts = np.array([v.last - v.first for v in visits], np.int64)
    first = np.cumsum(counts) - counts
    rows = [
        (
            *(v.low, v.high - v.low, v.start, v.first, v.last, int(first[n])),
            (v.end - v.start) // (v.high - v.low),
        )
        for n, v in enumerate(visits)
    ]
    links = [
        (int(width), int(v.out[begin]))
        for v in visits
        for begin, width in zip(
            v.begins, np.diff(v.begins, append=len(v.out)), strict=True
        )
    ]
    return Tape(
        nodes=np.array(rows, np.int64).reshape(-1, 7),
        shares=np.array([v.share for v in visits]),
        links=np.array(links, np.int64).reshape(-1, 2),
        tables=np.concatenate([v.table.reshape(-1) for v in visits]),
        widest=max(v.high - v.low for v in visits),
    )


@functools.cache
def compiled_loop() -> Callable[..., float] | None:
    """Returns the compiled loop; None without numba."""
    try:
        # Numba is an optional dependency and slow to import, so it is imported by its
        # name, here.
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    # Costs are never NaN. With this promise the compiler uses vector instructions for
    # minima.
    return numba.njit(cache=True, fastmath={"nnan", "nsz"})(sweep_loop)


def sweep_loop(
    nodes: np.ndarray,
    shares: np.ndarray,
    links: np.ndarray,
    tables: np.ndarray,
    costs: np.ndarray,
    buffer: np.ndarray,
    rises: np.ndarray,
    scratch: np.ndarray,
) -> float:
    """Runs one pass of `MessagePassing`, entry by entry; returns the bound."""
    bound, at = 0.0, 0
    for n in range(len(nodes)):
        low, size, start, first, last, link, degree = nodes[n]
        least = np.inf
        for a in range(size):
            total = costs[low + a]
            for s in range(degree):
                total += buffer[start + s * size + a]
            rises[low + a] = total
            least = min(least, total)
        bound += least
        for a in range(size):
            rises[low + a] -= least
        for s in range(first, last):
            width, out = links[link + s - first]
            for a in range(size):
                scratch[a] = shares[n] * rises[low + a] - buffer[start + s * size + a]
            lowest = np.inf
            for b in range(width):
                best = np.inf
                for a in range(size):
                    best = min(best, tables[at + a] + scratch[a])
                at += size
                buffer[out + b] = best
                lowest = min(lowest, best)
            bound += lowest
            for b in range(width):
                buffer[out + b] -= lowest
    return float(bound)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The bounds that a sweep proves for every solution of the field.

    The bounds hold for the costs with which the sweep ran.

    Attributes:
        bound: a lower bound of the cost, without the field's constant.
        base: the bound that ``rises`` refer to; at most ``bound``.
        rises: for each flat strategy, every solution with it costs at least ``base +
            rises``. They are computed when the sweep visits the node: its messages then
            hold all costs on both sides of the node.
    """

    bound: float
    base: float
    rises: np.ndarray


class MessagePassing:
    """Messages on the edges of a field, improved in place by sweeps."""

    def __init__(self, field: Field, *, compiled: bool | None = None) -> None:
        """Starts with all messages zero.

        Args:
            field: the field whose edges carry the messages.
            compiled: whether to use the compiled loop; by default it is used for large
                fields if numba is installed.
        """
        self.field = field
        self.links = links_of(field)
        counts = np.array([len(links) for links in self.links], np.int64)
        self.begins = np.concatenate([[0], np.cumsum(counts * field.sizes)])
        self.buffer = np.zeros(int(self.begins[-1]))
        self._slots = [
            {m: slot for slot, (m, _) in enumerate(links)} for links in self.links
        ]
        self._forward = [self._visit(k, True) for k in range(field.num_nodes)]
        self._backward = [
            self._visit(k, False) for k in reversed(range(field.num_nodes))
        ]
        if compiled is None:
            compiled = field.num_pairs >= MIN_PAIRS and compiled_loop() is not None
        self._tapes: tuple[Tape, Tape] | None = None
        if compiled and field.num_nodes:
            self._tapes = record_tape(self._forward), record_tape(self._backward)

    def sweep(self, costs: np.ndarray) -> Sweep:
        """Runs one forward and one backward pass with the costs of flat strategies."""
        if self._tapes is not None and (loop := compiled_loop()) is not None:
            forward, backward = self._tapes
            base, _ = forward.run(loop, costs, self.buffer)
            bound, rises = backward.run(loop, costs, self.buffer)
        else:
            base, _ = self._pass(self._forward, costs)
            bound, rises = self._pass(self._backward, costs)
        return Sweep(bound=bound, base=base, rises=rises)

    def decode(self, costs: np.ndarray, *, backward: bool = False) -> np.ndarray:
        """Chooses node by node, by earlier choices and by messages of later nodes."""
        choices = np.zeros(self.field.num_nodes, np.int64)
        visits = list(zip(self._forward, self.links, strict=True))
        for v, links in reversed(visits) if backward else visits:
            incoming = self.buffer[v.start : v.end].reshape(-1, v.high - v.low)
            # In a forward pass, a node sends messages to its neighbours from ``first``
            # on.
            cut = v.first
            open_ones = incoming[:cut] if backward else incoming[cut:]
            total = costs[v.low : v.high] + open_ones.sum(axis=0)
            for m, table in links[cut:] if backward else links[:cut]:
                total = total + table[:, choices[m]]
            choices[v.node] = total.argmin()
        return choices

    def by_link(self) -> dict[tuple[int, int], np.ndarray]:
        """``(receiver, sender) -> message``, by the nodes' numbers in the graph."""
        nodes = self.field.nodes
        return {
            (nodes[k], nodes[m]): self._message(k, m).copy()
            for k, links in enumerate(self.links)
            for m, _ in links
        }

    def resume(self, known: dict[tuple[int, int], np.ndarray]) -> None:
        """Sets the messages of all links that ``known`` contains."""
        nodes = self.field.nodes
        for k, links in enumerate(self.links):
            for m, _ in links:
                if (message := known.get((nodes[k], nodes[m]))) is not None:
                    self._message(k, m)[:] = message

    def shift(self, costs: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Reparametrises the problem: moves the messages into node costs and tables.

        Every node adds the messages into it, and every table subtracts the messages
        along it. Each node then returns an equal share of its cost to each of its
        tables.
        """
        field = self.field
        total = costs.copy()
        for v in self._forward:
            incoming = self.buffer[v.start : v.end].reshape(-1, v.high - v.low)
            total[v.low : v.high] += incoming.sum(axis=0)
        shares = [
            total[v.low : v.high] / (len(links) + 1)
            for v, links in zip(self._forward, self.links, strict=True)
        ]
        tables = [
            np.minimum(table, field.forbidden)
            + (shares[k] - self._message(k, m))[:, None]
            + (shares[m] - self._message(m, k))
            for (k, m), table in zip(field.edges, field.tables, strict=True)
        ]
        return np.concatenate(shares or [costs]), tables

    def _message(self, node: int, sender: int) -> np.ndarray:
        """Returns the message into a node from a neighbour."""
        size = int(self.field.sizes[node])
        start = int(self.begins[node]) + self._slots[node][sender] * size
        return self.buffer[start : start + size]

    def _pass(self, visits: list[Visit], costs: np.ndarray) -> tuple[float, np.ndarray]:
        buffer, bound = self.buffer, 0.0
        rises = np.empty(len(costs))
        for v in visits:
            own = costs[v.low : v.high]
            incoming = buffer[v.start : v.end].reshape(-1, len(own))
            total = own + incoming.sum(axis=0)
            least = total.min()
            total -= least
            bound += least
            rises[v.low : v.high] = total
            if v.first == v.last:
                continue
            sent = v.share * total - incoming[v.first : v.last]
            best = (v.table + sent[v.neighbour]).min(axis=1)
            lows = np.minimum.reduceat(best, v.begins)
            bound += lows.sum()
            buffer[v.out] = best - lows[v.neighbour]
        return float(bound), rises

    def _visit(self, k: int, forward: bool) -> Visit:
        field, links = self.field, self.links[k]
        split = sum(m < k for m, _ in links)
        first, last = (split, len(links)) if forward else (0, split)
        targets = links[first:last]
        widths = [int(field.sizes[m]) for m, _ in targets]
        none = [np.zeros(0, np.int64)]
        return Visit(
            node=k,
            low=int(field.offsets[k]),
            high=int(field.offsets[k + 1]),
            start=int(self.begins[k]),
            end=int(self.begins[k + 1]),
            first=first,
            last=last,
            share=1.0 / max(split, len(links) - split, 1),
            table=np.concatenate(
                [table.T for _, table in targets] or [np.zeros((0, 0))]
            ),
            neighbour=np.repeat(np.arange(len(targets)), widths),
            begins=np.cumsum([0, *widths])[:-1],
            out=np.concatenate([self._place(m, k) for m, _ in targets] or none),
        )

    def _place(self, node: int, sender: int) -> np.ndarray:
        size = int(self.field.sizes[node])
        start = int(self.begins[node]) + self._slots[node][sender] * size
        return np.arange(start, start + size)


def carry_messages(
    messages: dict[tuple[int, int], np.ndarray], graph: Graph, first_step: int
) -> dict[tuple[int, int], np.ndarray]:
    """Returns the messages that remain valid after steps of a graph's trail.

    If a node lost some of its strategies, the messages into the node lose the entries
    of these strategies.
    """
    kept: dict[int, np.ndarray] = {}
    for step in graph.trail[first_step:]:
        if isinstance(step, Restrict):
            before = kept.get(step.node)
            kept[step.node] = step.kept if before is None else before[step.kept]
    return {
        (node, sender): message[kept[node]] if node in kept else message
        for (node, sender), message in messages.items()
        if node in graph.costs and sender in graph.costs
    }
