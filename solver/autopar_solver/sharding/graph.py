"""A graph of a problem's nodes that reductions shrink, with a trail that undoes them.

Nodes keep their original numbers while strategies, links and whole nodes are removed.
The *trail* records each change that affects choices. Going back along it turns choices
for the reduced graph into choices for the problem.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autopar_solver.sharding.problem import MemoryTerm, ShardingProblem, usage_over_time

# Finds the few times at which the memory limit could be exceeded.
#
# A *row* is one time at which some choice could exceed the limit. A time is dropped if
# even the choices with the most memory fit, or if all terms (a node's memory over an
# interval) that are live at this time are also live at a kept time. A time is also
# dropped if, because of repeated layers, its memory is at most the mean of the memory
# at two kept times.
#
# Repeated layers make rows unnecessary. Take one row of each layer, at the same place
# of the layer. From layer to layer, their memory changes by the memory of one layer.
# Such a sequence is convex, so its maximum is at one of its ends::
#
#     held[i] <= (held[i - p] + held[i + p]) / 2   for all i between a and b, p apart
#     =>  held[i] <= max(held[a], held[b])         for every choice
#
# Here ``held`` counts the live terms of each kind, where a kind is a node with its
# usage. The rows between the two ends are therefore redundant.


MOST_PERIODS = 4
"""Number of distances between rows that are tried, the most frequent first."""

MOST_ENTRIES = 30_000_000
"""Limit of kinds times rows; a larger table would cost more memory than it saves."""

MIN_ROWS = 64
"""With fewer rows the search for implied rows is skipped."""


def implied_rows(
    kinds: np.ndarray, first: np.ndarray, last: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """Marks rows that exceed the limit only if a row that is not marked exceeds it too.

    Args:
        kinds: int64 ``[M]``, the kind of each term: its node and usage.
        first: int64 ``[M]``, the first row of each term.
        last: int64 ``[M]``, the row after the last row of each term.
        least: float64 ``[R]``, the memory that every choice uses.

    >>> first, last = np.array([0, 1, 2]), np.array([3, 3, 3])
    >>> marked = np.zeros(3, bool)
    >>> held = held_by_kind(np.array([0, 0, 0]), first, last, 3)
    >>> held.tolist()
    [[1, 2, 3]]
    >>> mark_convex(held, np.zeros(3), 1).tolist()
    [False, True, False]
    """
    count = len(least)
    out = np.zeros(count, bool)
    if count < MIN_ROWS or not len(kinds):
        return out
    if (int(kinds.max()) + 1) * count > MOST_ENTRIES:
        return out
    left = np.arange(count)
    held = held_by_kind(kinds, first, last, count)
    for period in change_periods(held):
        marked = mark_convex(held, least[left], period)
        out[left[marked]] = True
        left, held = left[~marked], held[:, ~marked]
    return out


def held_by_kind(
    kinds: np.ndarray, first: np.ndarray, last: np.ndarray, count: int
) -> np.ndarray:
    """Returns the number of live terms of each kind at each row, ``[kinds, R]``."""
    change = np.zeros((int(kinds.max()) + 1, count + 1), np.int32)
    np.add.at(change, (kinds, first), 1)
    np.subtract.at(change, (kinds, last), 1)
    return np.cumsum(change, axis=1, dtype=np.int32)[:, :-1]


def change_periods(held: np.ndarray) -> Sequence[int]:
    """Returns the numbers of rows after which the same change of memory repeats.

    The most frequent comes first.

    Two different changes may have the same hash by chance. This is harmless: such a
    distance marks no row.
    """
    rng = np.random.default_rng(0)
    marks = np.zeros(held.shape[1] - 1, np.int64)
    for weight, row in zip(rng.integers(1, 1 << 31, len(held)), held, strict=True):
        marks += weight * np.diff(row)
    order = np.argsort(marks, kind="stable")
    same = np.diff(marks[order]) == 0
    gaps = np.diff(order)[same]
    found, times = np.unique(gaps, return_counts=True)
    best = np.argsort(-times, kind="stable")[:MOST_PERIODS]
    return [int(found[k]) for k in best]


def mark_convex(held: np.ndarray, least: np.ndarray, period: int) -> np.ndarray:
    """Marks rows with at most the mean memory of the rows one period before and after.

    Every row in a run of marked rows holds at most as much as one of the two unmarked
    rows next to the run.
    """
    out = np.zeros(len(least), bool)
    if 2 * period < len(least):
        middle = slice(period, len(least) - period)
        below = held[:, middle] * 2 <= held[:, : -2 * period] + held[:, 2 * period :]
        less = 2 * least[middle] <= least[: -2 * period] + least[2 * period :]
        out[middle] = below.all(axis=0) & less
    return out


ROUNDING = 1e-12
"""Rounding error of float sums of fractional usages, relative to the limit."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NodeMemory:
    """The memory of a node's strategies.

    Term ``k`` is live in the rows ``[starts[k], ends[k])``.

    Attributes:
        starts: int64 ``[K]``.
        ends: int64 ``[K]``.
        usage: float64 ``[K, S]``, minus the node's least usage (which counts as fixed).
    """

    starts: np.ndarray
    ends: np.ndarray
    usage: np.ndarray

    def take(self, strategies: np.ndarray) -> NodeMemory:
        """Returns the memory of only the strategies with these indices."""
        return NodeMemory(self.starts, self.ends, self.usage[:, strategies])

    def at(self, row: int) -> np.ndarray | None:
        """Usage ``[S]`` at a row; None if nothing is live."""
        live = (self.starts <= row) & (row < self.ends)
        return self.usage[live].sum(axis=0) if live.any() else None


def sum_memories(parts: Sequence[NodeMemory]) -> NodeMemory:
    """Adds the memories of nodes with the same strategies; merges equal intervals."""
    if len(parts) == 1 and len(parts[0].starts) == 1:
        return parts[0]
    starts = np.concatenate([part.starts for part in parts])
    ends = np.concatenate([part.ends for part in parts])
    usage = np.concatenate([part.usage for part in parts])
    spans, place = np.unique(
        np.stack([starts, ends], axis=1), axis=0, return_inverse=True
    )
    if len(spans) == len(starts):
        return NodeMemory(starts, ends, usage)
    total = np.zeros((len(spans), usage.shape[1]))
    np.add.at(total, place.reshape(-1), usage)
    return NodeMemory(spans[:, 0], spans[:, 1], total)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LimitRows:
    """The times at which the limit could be exceeded, and the memory left for choices.

    Attributes:
        times: int64 ``[R]``.
        room: float64 ``[R]``: the limit minus all fixed memory; negative if no choice
            can fit.
        slack: a bound of the rounding error of sums of memory; 0 if all numbers are
            whole.
    """

    times: np.ndarray
    room: np.ndarray
    slack: float = 0.0

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.times)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """A problem as the key of a cache of memory rows.

    Problems that differ only in the values of finite costs have equal keys.

    Attributes:
        problem: the problem.
        possible: for each strategy, whether it is allowed, as bytes.
    """

    problem: ShardingProblem
    possible: bytes

    def __eq__(self, other: object) -> bool:
        """Whether terms, limit and allowed strategies are the same."""
        if not isinstance(other, _Memory):
            return NotImplemented
        a, b = self.problem, other.problem
        same = a.memory is b.memory and a.fixed_memory is b.fixed_memory
        alike = a.memory_limit == b.memory_limit and self.possible == other.possible
        return same and alike

    def __hash__(self) -> int:
        """Hashes the memory terms by identity, and the memory limit by value."""
        return hash((id(self.problem.memory), self.problem.memory_limit))


def find_rows(problem: ShardingProblem) -> tuple[LimitRows, dict[int, NodeMemory]]:
    """Finds the rows of a problem and every node's memory on them."""
    possible = np.isfinite(np.concatenate(problem.node_costs or [np.zeros(0)]))
    rows, memory = _find_rows(_Memory(problem, possible.tobytes()))
    return rows, dict(memory)


# The same problem is solved several times in a row with different costs.
@functools.lru_cache(maxsize=1)
def _find_rows(known: _Memory) -> tuple[LimitRows, dict[int, NodeMemory]]:
    problem = known.problem
    limit = problem.memory_limit
    terms = [t for t in problem.memory if t.start < t.end] if limit is not None else []
    fixed = [f for f in problem.fixed_memory if f[0] < f[1]]
    if limit is None or not (terms or fixed):
        return LimitRows(np.zeros(0, np.int64), np.zeros(0)), {}
    bounds = _spreads(problem, terms)
    starts = np.array([t.start for t in terms] + [f[0] for f in fixed], np.int64)
    ends = np.array([t.end for t in terms] + [f[1] for f in fixed], np.int64)
    least = np.array([b[0] for b in bounds] + [f[2] for f in fixed])
    most = np.array([b[1] for b in bounds] + [f[2] for f in fixed])
    choice = most > least
    times, low = usage_over_time(starts, ends, least)
    _, high = usage_over_time(starts, ends, most)
    kept = _maximal(times, starts[choice], ends[choice], low) & (high > limit)
    whole = all(float(x).is_integer() for x in (limit, *(f[2] for f in fixed)))
    whole = whole and all(
        bool((usage == np.floor(usage)).all())
        for usage in {id(t.usage): t.usage for t in terms}.values()
    )
    slack = 0.0 if whole else ROUNDING * limit
    kinds = _kinds(terms, choice)
    first, last = (np.searchsorted(times[kept], at) for at in (starts, ends))
    live = np.flatnonzero(choice & (first < last))
    at = np.flatnonzero(kept)
    at = at[~implied_rows(kinds[live], first[live], last[live], low[at])]
    rows = LimitRows(times[at], limit - low[at], slack)
    first, last = (np.searchsorted(rows.times, at) for at in (starts, ends))
    live = np.flatnonzero(choice & (first < last))
    return rows, _by_node(terms, live, least, first, last)


def _kinds(terms: Sequence[MemoryTerm], choice: np.ndarray) -> np.ndarray:
    """Numbers the kinds of terms that depend on a choice: pairs of node and usage."""
    alike: dict[tuple[int, bytes], int] = {}
    numbers: dict[tuple[int, int], int] = {}
    out = np.full(len(terms), -1, np.int64)
    for m in np.flatnonzero(choice[: len(terms)]).tolist():
        node, usage = terms[m].node, terms[m].usage
        key = (node, id(usage))
        if key not in numbers:
            same = (node, usage.tobytes())
            numbers[key] = alike.setdefault(same, len(alike))
        out[m] = numbers[key]
    return out


def _spreads(
    problem: ShardingProblem, terms: Sequence[MemoryTerm]
) -> list[tuple[float, float]]:
    """For each term, the least and largest usage of its node's allowed strategies."""
    known: dict[tuple[int, int], tuple[float, float]] = {}
    spreads: list[tuple[float, float]] = []
    for term in terms:
        costs = problem.node_costs[term.node]
        key = (id(term.usage), id(costs))
        if key not in known:
            possible = term.usage[np.isfinite(costs)]
            known[key] = float(possible.min()), float(possible.max())
        spreads.append(known[key])
    return spreads


def _maximal(
    times: np.ndarray, starts: np.ndarray, ends: np.ndarray, low: np.ndarray
) -> np.ndarray:
    """Marks times so that all terms of any time are also live at a marked time.

    While no term ends, the set of live terms only grows, so the last time of such a
    stretch has all of the stretch's terms. Fixed amounts may vary within a stretch, so
    the times with the largest fixed amounts are kept too.
    """
    stretch = np.searchsorted(np.unique(ends), times, side="right")
    growing = np.flatnonzero(np.isin(times, starts))
    # A later time of a stretch has the same live terms as the stretch's last start.
    kept = np.zeros(len(times), bool)
    for group in np.split(np.arange(len(times)), np.flatnonzero(np.diff(stretch)) + 1):
        top = low[group].max()
        started = growing[
            np.searchsorted(growing, group[0]) : np.searchsorted(growing, group[-1] + 1)
        ]
        full = group[group >= (started[-1] if len(started) else group[0])]
        best = full[np.argmax(low[full])]
        kept[best] = True
        if low[best] < top:
            kept[group] = True
    return kept


def _by_node(
    terms: Sequence[MemoryTerm],
    live: np.ndarray,
    least: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
) -> dict[int, NodeMemory]:
    parts: dict[int, list[NodeMemory]] = {}
    shifted: dict[tuple[int, float], np.ndarray] = {}
    for m in live.tolist():
        usage, low = terms[m].usage, float(least[m])
        key = (id(usage), low)
        if key not in shifted:
            # A forbidden strategy may use less than every allowed strategy.
            shifted[key] = np.maximum(usage.astype(np.float64) - low, 0.0)[None]
        part = NodeMemory(first[m : m + 1], last[m : m + 1], shifted[key])
        parts.setdefault(terms[m].node, []).append(part)
    return {node: sum_memories(own) for node, own in parts.items()}


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

    def copy(self) -> Graph:
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

        The trail's new step states how to choose its strategy later.
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
