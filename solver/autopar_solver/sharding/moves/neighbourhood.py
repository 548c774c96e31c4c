"""Large neighbourhood search: optimises one connected part after another."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.ilp.highs import Backend, StopCriteria
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.exact import solve_field
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import ContradictionError, Graph
from autopar_solver.sharding.memory import NodeMemory
from autopar_solver.sharding.moves.local_search import Position
from autopar_solver.sharding.reductions.pipeline import reduce_graph


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
    """The part of the current cost that does not depend on the members."""
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
