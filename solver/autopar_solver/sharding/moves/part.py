"""Chooses again for some nodes of a field while the others stay as they are."""

import dataclasses

import numpy as np

from autopar_solver.ilp.highs import Backend, StopCriteria
from autopar_solver.sharding.exact import solve_field
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import ContradictionError, Graph
from autopar_solver.sharding.memory import NodeMemory
from autopar_solver.sharding.moves.local_search import Position
from autopar_solver.sharding.reductions.pipeline import reduce_graph


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PartAnswer:
    """What solving a part found.

    Attributes:
        choices: of all nodes of the field; None if nothing under the cutoff was found.
        bound: of the part's cost; see ``part_cost``.
        finished: whether the bound is within the gap, or nothing better exists.
        pairs: how large the part was when its integer program was solved.
    """

    choices: np.ndarray | None
    bound: float
    finished: bool
    pairs: int


def part_graph(position: Position, members: np.ndarray, kept: np.ndarray) -> Graph:
    """The graph of some nodes (by position) with some of their flat strategies.

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
    """Chooses anew for some nodes; ``stop`` is in the whole field's cost."""
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
    """What of the present cost does not depend on the members."""
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
