"""Large neighbourhood search: optimises one connected part after another."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.ilp.highs import Backend, StopCriteria
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.exact import solve_field
from autopar_solver.sharding.field import Field, Links, flatten
from autopar_solver.sharding.graph import ContradictionError, Graph, NodeMemory
from autopar_solver.sharding.reductions.pipeline import reduce_graph

# Repairs choices that exceed a memory row, and improves choices node by node.


MOVES_AT_ONCE = 8
"""Number of moves between two evaluations of all moves."""


class Position:
    """Choices of a field's nodes, and the cost of each change of one choice.

    Attributes:
        choices: int64 ``[N]``.
        local: for each flat strategy, the cost of its node and the node's edges with
            this strategy and the neighbours' current choices.
        used: ``[R]``, the memory that the choices use at each row.
    """

    def __init__(self, field: Field, choices: np.ndarray, links: Links) -> None:
        """Copies the choices."""
        self.field = field
        self.links = links
        self.choices = choices.copy()
        self.local = _local_costs(field, choices, links)
        self.used = field.memory.usage_of(choices)

    def move(self, node: int, strategy: int) -> None:
        """Changes the strategy of one node."""
        old = int(self.choices[node])
        for other, table in self.links[node]:
            start, end = self.field.offsets[other], self.field.offsets[other + 1]
            self.local[start:end] += table[strategy] - table[old]
        self.used += self.change(node, strategy)
        self.choices[node] = strategy

    def change(self, node: int, strategy: int) -> np.ndarray:
        """Returns the memory that a change of one strategy would add at each row."""
        memory = self.field.memory
        first, last = np.searchsorted(memory.node, [node, node + 1])
        at = memory.first[first:last]
        amounts = memory.usage[at + strategy] - memory.usage[at + self.choices[node]]
        change = np.zeros(len(self.used) + 1)
        np.add.at(change, memory.starts[first:last], amounts)
        np.subtract.at(change, memory.ends[first:last], amounts)
        return np.cumsum(change)[:-1]

    def losses(self) -> np.ndarray:
        """Returns, for each flat strategy, the cost that a change to it would add."""
        present = self.local[self.field.offsets[:-1] + self.choices]
        return self.local - np.repeat(present, self.field.sizes)

    @property
    def over(self) -> float:
        """The excess of the worst row over its memory limit; negative if all fit."""
        room = self.field.memory.room
        return float(np.max(self.used - room, initial=-np.inf))

    @property
    def fits(self) -> bool:
        """Whether the memory of every row is within the row's limit."""
        return self.over <= self.field.memory.slack


def mend(position: Position, costs: np.ndarray, max_moves: int) -> bool:
    """Changes single nodes' strategies until the choices fit; False on failure.

    Each change lowers the memory of the row with the largest excess, at the least cost
    per unit of memory. ``costs`` has a cost for each flat strategy: the field's cost,
    perhaps with a price of memory added.
    """
    moves = 0
    while not position.fits and moves < max_moves:
        row = int(np.argmax(position.used - position.field.memory.room))
        made = _lower(position, costs, row)
        if not made:
            return False
        moves += made
    return position.fits


def _lower(position: Position, costs: np.ndarray, row: int) -> int:
    """Changes up to ``MOVES_AT_ONCE`` nodes until a row fits; returns the number."""
    field = position.field
    present = field.offsets[:-1] + position.choices
    use = field.memory.at(row, field.num_strategies)
    saved = np.repeat(use[present], field.sizes) - use
    extra = costs - field.costs
    loss = position.losses() + extra - np.repeat(extra[present], field.sizes)
    needed = float(position.used[row] - field.memory.room[row])
    helpful = np.flatnonzero((saved > 0) & (loss < np.inf))
    # Memory saved beyond the row's excess has no value.
    rate = np.maximum(loss[helpful], 0.0) / np.minimum(saved[helpful], needed)
    nodes = np.searchsorted(field.offsets, helpful, side="right") - 1
    moved: set[int] = set()
    for at in np.argsort(rate, kind="stable").tolist():
        node, flat = int(nodes[at]), int(helpful[at])
        if node in moved:
            continue
        position.move(node, flat - int(field.offsets[node]))
        moved.add(node)
        needed -= float(saved[flat])
        # A change alters the losses of neighbours, so only a few changes are made
        # before all losses are computed again.
        if needed <= 0 or len(moved) >= MOVES_AT_ONCE:
            break
    return len(moved)


def polish(position: Position, passes: int = 10) -> None:
    """Gives single nodes cheaper strategies, as long as the memory of all rows fits."""
    field = position.field
    for _ in range(passes):
        losses = position.losses()
        tolerance = 1e-12 * max(1.0, float(np.abs(losses[losses < np.inf]).max()))
        fitting = _fitting(position)
        better = np.flatnonzero((losses < -tolerance) & fitting)
        moved = False
        for flat in better[np.argsort(losses[better], kind="stable")].tolist():
            moved |= _try_move(position, field, flat, tolerance)
        if not moved:
            return


def _try_move(position: Position, field: Field, flat: int, tolerance: float) -> bool:
    node = int(np.searchsorted(field.offsets, flat, side="right")) - 1
    strategy = flat - int(field.offsets[node])
    present = int(field.offsets[node] + position.choices[node])
    if not position.local[flat] < position.local[present] - tolerance:
        return False
    used = position.used + position.change(node, strategy)
    if (used > field.memory.room + field.memory.slack).any():
        return False
    position.move(node, strategy)
    return True


def _fitting(position: Position) -> np.ndarray:
    """Marks flat strategies of which no memory term alone exceeds a row's memory."""
    field, memory = position.field, position.field.memory
    fitting = np.ones(field.num_strategies, bool)
    if not len(memory.node):
        return fitting
    left = memory.room - position.used + memory.slack
    # A term uses the same memory in all its rows, and the memory that is left differs
    # little between these rows. So the first and the last row reveal most excesses.
    least = np.minimum(left[memory.starts], left[memory.ends - 1])
    present = memory.usage[memory.first + position.choices[memory.node]]
    misfit = memory.usage - present[memory.term] > least[memory.term]
    fitting[memory.strategy[misfit]] = False
    return fitting


def _local_costs(field: Field, choices: np.ndarray, links: Links) -> np.ndarray:
    local = field.costs.copy()
    offsets, chosen = field.offsets.tolist(), choices.tolist()
    for k, neighbours in enumerate(links):
        own = local[offsets[k] : offsets[k + 1]]
        for m, table in neighbours:
            own += table[:, chosen[m]]
    return local


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PartAnswer:
    """The result of solving a part.

    Attributes:
        choices: the choices of all nodes of the field; None if none below the cutoff
            were found.
        bound: a lower bound of the whole field's cost, if all other nodes keep their
          choices.
        finished: whether the bound is within the gap, or nothing better exists.
        pairs: the number of strategy pairs of the part's integer program.
    """

    choices: np.ndarray | None
    bound: float
    finished: bool
    pairs: int


def part_graph(position: Position, members: np.ndarray, kept: np.ndarray) -> Graph:
    """The graph of the nodes ``members`` with the flat strategies that ``kept`` marks.

    Raises:
        ContradictionError: a node keeps no strategy.
    """
    field = position.field
    graph = Graph()
    inside = np.zeros(field.num_nodes, bool)
    inside[members] = True
    for k in members.tolist():
        start, end = field.offsets[k], field.offsets[k + 1]
        graph.add_node(k, position.local[start:end].copy())
        for m, table in position.links[k]:
            if inside[m]:
                graph.costs[k] -= table[:, position.choices[m]]
        own = graph.costs[k]
        own[own > 0.5 * field.forbidden] = np.inf
    for k in members.tolist():
        for m, table in position.links[k]:
            if inside[m] and k < m:
                graph.add_link(k, m, _with_infinite(table, field.forbidden))
    _add_memory(graph, position, members)
    for k in members.tolist():
        own = np.flatnonzero(kept[field.offsets[k] : field.offsets[k + 1]])
        if len(own) < field.sizes[k]:
            graph.restrict(k, own)
    return graph


def _with_infinite(table: np.ndarray, forbidden: float) -> np.ndarray:
    if table.max() < forbidden:
        return table
    return np.where(table < forbidden, table, np.inf)


def solve_part(
    position: Position,
    members: np.ndarray,
    kept: np.ndarray,
    backend: Backend,
    stop: StopCriteria,
    rows: tuple[int, ...] = (),
) -> PartAnswer:
    """Chooses new strategies for some nodes; ``stop`` refers to the field's cost."""
    try:
        graph = part_graph(position, members, kept)
        graph.constant = _cost_outside(position, members)
        reduce_graph(graph)
    except ContradictionError:
        return PartAnswer(None, stop.cutoff, True, 0)
    choices = position.choices.copy()
    if not graph.costs:
        choices[members] = graph.expand(choices)[members]
        return PartAnswer(choices, graph.constant, True, 0)
    field = flatten(graph)
    place = np.searchsorted(graph.rows, rows)
    known = place < len(graph.rows)
    start = [r for r in place[known] if graph.rows[r] in rows]
    answer = solve_field(field, backend, stop, tuple(int(r) for r in start))
    if answer.choices is None:
        return PartAnswer(None, answer.bound, answer.finished, field.num_pairs)
    choices[list(field.nodes)] = answer.choices
    choices[members] = graph.expand(choices)[members]
    return PartAnswer(choices, answer.bound, answer.finished, field.num_pairs)


def _cost_outside(position: Position, members: np.ndarray) -> float:
    """Returns the part of the current cost that the members' choices do not change."""
    field = position.field
    inside = np.zeros(field.num_nodes, bool)
    inside[members] = True
    cost: float = field.cost(position.choices)
    for k in members.tolist():
        flat = field.offsets[k] + position.choices[k]
        cost -= float(position.local[flat])
        for m, table in position.links[k]:
            if inside[m] and k < m:
                cost += float(table[position.choices[k], position.choices[m]])
    return cost


def _add_memory(graph: Graph, position: Position, members: np.ndarray) -> None:
    memory = position.field.memory
    room = memory.room - position.used
    graph.slack = memory.slack
    for k in members.tolist():
        first, last = np.searchsorted(memory.node, [k, k + 1])
        if first == last:
            continue
        size = int(position.field.sizes[k])
        at = int(memory.first[first])
        usage = memory.usage[at : at + size * (last - first)].reshape(-1, size)
        own = NodeMemory(memory.starts[first:last], memory.ends[first:last], usage)
        graph.memory[k] = own
        for start, end, amount in zip(
            own.starts, own.ends, usage[:, position.choices[k]], strict=True
        ):
            room[start:end] += amount
    graph.rows, graph.room = np.arange(len(room)), room


FIRST_PAIRS, LEAST_PAIRS, MOST_PAIRS = 30_000, 500, 200_000
"""Pairs of strategies in a part: initial, least and largest number."""

PART_SECONDS, PAIR_SECONDS, MOST_BRANCHES = 0.02, 3e-5, 200
"""Assumed seconds and limit of branches of a part, when time is only counted."""

FAST_SECONDS, SLOW_SECONDS = 0.3, 2.0
"""Parts that are solved faster grow; slower parts are stopped and shrink."""


class NeighbourhoodSearch:
    """Improves the choices of one field, part by part."""

    def __init__(self, dual: Dual, backend: Backend, seed: int = 0) -> None:
        """Prepares to draw parts with a seeded random generator."""
        self.dual = dual
        self.backend = backend
        self.random = np.random.default_rng(seed)
        self.pairs = FIRST_PAIRS

    def improve(
        self,
        choices: np.ndarray,
        cutoff: float,
        clock: Clock,
        enough: float = -math.inf,
    ) -> np.ndarray:
        """Improves choices until time runs out; the result fits and costs no more.

        Args:
            choices: choices that fit.
            cutoff: solutions that cost this much or more are ignored.
            clock: the time limit.
            enough: the cost at which the search stops.
        """
        field, links = self.dual.field, self.dual.messages.links
        position = Position(field, choices, links)
        cost = field.cost(choices)
        while clock.left_s > 0.05 and cost > enough:
            kept = self._keep_better(position, min(cutoff, cost))
            members = self._members(position, kept)
            begin = clock.left_s
            seconds = min(SLOW_SECONDS, clock.left_s)
            counted = clock.counted
            stop = StopCriteria(
                None if counted else seconds,
                1e-7 * abs(cost),
                min(cost, cutoff),
                MOST_BRANCHES if counted else None,
            )
            rows = np.flatnonzero(self.dual.best_prices)
            answer = solve_part(
                position, members, kept, self.backend, stop, tuple(rows.tolist())
            )
            clock.tick(PART_SECONDS + PAIR_SECONDS * answer.pairs)
            self._adapt(begin - clock.left_s, answer.finished)
            if answer.choices is not None and field.memory.fits(answer.choices):
                found = field.cost(answer.choices)
                if found < cost:
                    cost = found
                    position = Position(field, answer.choices, links)
            if len(members) == field.num_nodes and answer.finished:
                break
        return position.choices

    def _keep_better(self, position: Position, cost: float) -> np.ndarray:
        field = self.dual.field
        kept = self.dual.bounds < cost
        kept[field.offsets[:-1] + position.choices] = True
        return kept

    def _members(self, position: Position, kept: np.ndarray) -> np.ndarray:
        """Grows a part from a random node that the dual would choose otherwise."""
        field = self.dual.field
        sizes = np.add.reduceat(kept, field.offsets[:-1], dtype=np.int64)
        rises = self.dual.rises[field.offsets[:-1] + position.choices]
        weight = np.where(sizes > 1, rises + 1e-3 * rises.mean() + 1e-300, 0.0)
        if not weight.any():
            weight = np.ones(field.num_nodes)
        seed = int(self.random.choice(field.num_nodes, p=weight / weight.sum()))
        return self._grow(seed, sizes, position)

    def _grow(self, seed: int, sizes: np.ndarray, position: Position) -> np.ndarray:
        inside, border, pairs = {seed}, [seed], 0
        while border and pairs < self.pairs:
            # With a probability of 0.8 the part grows breadth first, otherwise depth
            # first.
            pick = 0 if self.random.random() < 0.8 else -1
            k = border.pop(pick)
            for m, _ in position.links[k]:
                if m in inside:
                    continue
                inside.add(m)
                border.append(m)
                pairs += sum(
                    int(sizes[m] * sizes[n])
                    for n, _ in position.links[m]
                    if n in inside
                )
                if pairs >= self.pairs:
                    break
        return np.array(sorted(inside))

    def _adapt(self, seconds: float, finished: bool) -> None:
        if not finished:
            self.pairs = max(int(self.pairs * 0.7), LEAST_PAIRS)
        elif seconds < FAST_SECONDS:
            self.pairs = min(int(self.pairs * 1.2), MOST_PAIRS)
