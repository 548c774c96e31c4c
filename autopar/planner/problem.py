"""The planner's problem: nodes, copies and edges, priced for one mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import PlanError
from autopar.planner.coded import Prices, coded_matrix
from autopar.planner.copies import Copy, Mode
from autopar.planner.layout import Axes, Layout
from autopar.planner.lifetimes import lifetimes
from autopar.planner.memory_terms import memory_terms
from autopar.planner.messages import ALONE, GATHERS, SUMS, independent
from autopar.planner.nodes import Contraction, Node
from autopar.planner.price import Pricer
from autopar.planner.strategies import Space, Strategy, copy_space, strategy_space
from autopar.planner.traffic import times_due, worth_a_codec
from autopar.planner.uses import Source, Use, ValueClass
from autopar.planner.work import class_trips, materialized, node_work_s
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.sums.deferral import Deferral
from autopar_solver import ShardingProblem

# State that is kept whole takes at most these parts of a device and of all state.
SMALL_OF_DEVICE = 1e-3
SMALL_OF_STATE = 1e-2

# Says which strategies of a node a restricted plan may use.
Restriction = Callable[[Node, Strategy], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Formulation:
    """A priced problem and what its nodes stand for."""

    problem: ShardingProblem
    spaces: tuple[Space, ...]
    copies: tuple[Copy, ...]
    pricer: Pricer


def contraction_partials(
    graph: OperatorGraph, contraction: Contraction, node: Node, space: Space
) -> list[Axes]:
    """The axes over which a contraction's result is partial, by strategy."""
    op = graph.operators[node.root]
    mapping = node.members[node.root]
    reduced = [mapping[f] for f in sorted(op.rule.reduced) if mapping[f] >= 0]
    return [tuple(sorted(a for f in reduced for a in s[f])) for s in space.strategies]


def small_state(
    graph: OperatorGraph, contraction: Contraction, device_bytes: float
) -> frozenset[int]:
    """Returns the nodes of carried state too small to be worth splitting.

    Biases and scales are kept whole, the smallest first, as long as all of them
    together stay below `SMALL_OF_DEVICE` of a device's memory and `SMALL_OF_STATE`
    of the state: splitting them saves next to no memory, and one small
    collective is as slow as another.
    """
    held: dict[int, int] = {}
    for given in graph.inputs:
        if given.output >= 0 and given.value in contraction.homes:
            node = contraction.homes[given.value].node
            held[node] = held.get(node, 0) + graph.values[given.value].nbytes
    left = min(SMALL_OF_DEVICE * device_bytes, SMALL_OF_STATE * sum(held.values()))
    out: set[int] = set()
    for node, nbytes in sorted(held.items(), key=lambda item: (item[1], item[0])):
        left -= nbytes
        if left < 0:
            break
        out.add(node)
    return frozenset(out)


# Of each class: bytes of a sum over devices, and how often it is taken in a step.
Sums = dict[int, list[tuple[int, float]]]


def sums_due(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> Sums:
    """Returns the sums that finish the results of each class of operators.

    A result whose sum waits is summed where its way ends, together with what meets
    it there, so each contribution carries its part.
    """
    waiting = {
        op: (deferral, ends) for deferral in deferrals for op, ends in deferral.reach
    }
    out: Sums = {}
    for op in graph.operators:
        sums: dict[int, float] = {}
        if op.index in waiting:
            deferral, ends = waiting[op.index]
            for end in ends:
                times = times_due(graph, contraction.producer[end])
                nbytes = graph.values[end].nbytes
                sums[nbytes] = sums.get(nbytes, 0.0) + times / deferral.sharing(end)
        elif op.outputs:
            sums[graph.values[op.outputs[0]].nbytes] = op.trips
        known = out.setdefault(op.class_index, [])
        known.extend(sums.items())
    return {c: _added_up(sums) for c, sums in out.items()}


# Of each class: shape of a gradient, and how many of it are summed in a step.
CodedSums = dict[int, list[tuple[tuple[int, ...], float]]]


def coded_sums(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> CodedSums:
    """Returns the gradients that classes of operators contribute to.

    A class is left out where not all of its operators make gradients that are
    worth a codec.
    """
    made: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    ends_of = {op: (d, ends) for d in deferrals for op, ends in d.reach}
    plain: set[int] = set()
    for op in graph.operators:
        deferral, ends = ends_of.get(op.index, (None, ()))
        if deferral is None or not all(
            e in deferral.gradients and worth_a_codec(graph.values[e].shape)
            for e in ends
        ):
            plain.add(op.class_index)
            continue
        own = graph.values[op.outputs[0]]
        for end in ends:
            value = graph.values[end]
            shape = own.shape if value.size == own.size else value.shape
            times = times_due(graph, contraction.producer[end])
            found = made.setdefault(op.class_index, [])
            found.append((shape, times / deferral.sharing(end)))
    return {c: rows for c, rows in made.items() if c not in plain}


def _added_up(sums: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    total: dict[int, float] = {}
    for nbytes, weight in sums:
        total[nbytes] = total.get(nbytes, 0.0) + weight
    return sorted(total.items())


class Formulator:
    """Builds the problems of one graph for any mesh."""

    def __init__(
        self,
        graph: OperatorGraph,
        contraction: Contraction,
        sources: dict[ValueClass, Source],
        deferrals: Sequence[Deferral] = (),
    ) -> None:
        """Derives what does not depend on the mesh."""
        self.coded = coded_sums(graph, contraction, deferrals)
        self.independent = independent(graph, deferrals)
        self.graph = graph
        self.contraction = contraction
        self.sources = sources
        self.trips = class_trips(graph)
        hoisted = [d for d in deferrals if d.hoisted]
        self.sums = sums_due(graph, contraction, hoisted)
        self.written = materialized(graph, contraction)
        self.life = lifetimes(graph, frozenset(contraction.floating))

    def formulate(
        self,
        pricer: Pricer,
        restriction: Restriction | None = None,
        memory_limit: float | None = None,
        prices: Prices | None = None,
    ) -> Formulation:
        """Prices every strategy and every resharding on one mesh.

        With a ``memory_limit`` (bytes of one device) the problem has memory
        terms; without, it is smaller, and enough where memory is plenty. With
        ``prices`` gradients may be sent by codecs.
        """
        spaces, costs = self._node_costs(pricer, restriction)
        edges: list[tuple[int, int]] = []
        matrices: list[np.ndarray] = []
        for edge, matrix in self._result_edges(spaces, pricer, prices):
            edges.append(edge)
            matrices.append(matrix)
        copies: list[Copy] = []
        for source in self.sources.values():
            start = len(self.contraction.nodes) + len(copies)
            made = self.make_copies(
                source, start, pricer, memory=memory_limit is not None
            )
            copies.extend(made)
            for edge, matrix in self._source_edges(source, made, spaces, pricer):
                edges.append(edge)
                matrices.append(matrix)
        priced = (*costs, *matrices)
        if pricer.without and not all(np.isfinite(c).any() for c in priced):
            raise PlanError(f"mesh {pricer.mesh}: no plan does without these messages.")
        problem = ShardingProblem(
            name="step",
            node_costs=(*costs, *(np.zeros(len(c.space.strategies)) for c in copies)),
            edges=tuple(edges),
            edge_costs=tuple(matrices),
            memory=()
            if memory_limit is None
            else memory_terms(
                self.graph,
                self.contraction,
                self.life,
                spaces,
                copies,
                self.sources.values(),
                pricer.sizes,
            ),
            memory_limit=memory_limit,
        )
        all_spaces = (*spaces, *(c.space for c in copies))
        return Formulation(problem, all_spaces, tuple(copies), pricer)

    def _node_costs(
        self, pricer: Pricer, restriction: Restriction | None
    ) -> tuple[list[Space], list[np.ndarray]]:
        spaces: list[Space] = []
        costs: list[np.ndarray] = []
        memory = float(pricer.cluster.memory_bytes)
        small = small_state(self.graph, self.contraction, memory)
        for node in self.contraction.nodes:
            space = strategy_space(self.graph, self.contraction, node, pricer.sizes)
            if restriction is not None:
                kept = tuple(s for s in space.strategies if restriction(node, s))
                space = Space(kept or space.strategies[:1])
            whole = space.strategies[0]
            if node.index in small and not any(whole):
                space = Space((whole,))
            spaces.append(space)
            costs.append(
                node_work_s(
                    self.graph, self.contraction, node, space, pricer,
                    self.trips, self.sums, self.written,
                    self.independent.summing,
                )
            )  # fmt: skip
        return spaces, costs

    def _result_edges(
        self, spaces: Sequence[Space], pricer: Pricer, prices: Prices | None
    ) -> list[tuple[tuple[int, int], np.ndarray]]:
        """Edges from a contraction to its result, which take the reduction."""
        out: list[tuple[tuple[int, int], np.ndarray]] = []
        for node in self.contraction.nodes:
            if node.kind != "contraction":
                continue
            op = self.graph.operators[node.root]
            mapping = node.members[node.root]
            partials = contraction_partials(
                self.graph, self.contraction, node, spaces[node.index]
            )
            for slot, value in enumerate(op.outputs):
                dims = op.rule.results[slot]
                home = self.contraction.homes.get(value)
                if home is None:
                    continue
                own = tuple(
                    tuple(mapping[f] for f in d if mapping[f] >= 0) for d in dims
                )
                starts = list(
                    zip(spaces[node.index].layouts(own), partials, strict=True)
                )
                targets = spaces[home.node].layouts(home.dims)
                whole = [(self.graph.values[value].nbytes, self.trips[op.class_index])]
                sums = self.sums[op.class_index] if slot == 0 else whole
                kind = op.rule.reduction
                final = op.class_index in self.independent.summing
                together = SUMS if final else ALONE
                parts = [
                    weight
                    * pricer.reshard_matrix(starts, targets, kind, nbytes, together)
                    for nbytes, weight in sums
                ]
                matrix = np.sum(parts, axis=0)
                coded = self.coded.get(op.class_index)
                if prices is not None and coded and slot == 0:
                    ways = [
                        weight * coded_matrix(pricer, prices, starts, targets, shape)
                        for shape, weight in coded
                    ]
                    matrix = prices.chosen(matrix, np.sum(ways, axis=0))
                out.append(((node.index, home.node), matrix))
        return out

    def make_copies(
        self, source: Source, start: int, pricer: Pricer, *, memory: bool
    ) -> list[Copy]:
        """Returns the copies of one value, numbered from ``start``."""
        foreign = source.foreign
        if len({(u.node, u.dims) for u in foreign}) < 2:
            return []
        home = self.contraction.nodes[source.home.node]
        used = sorted({f for d in source.home.dims for f in d})
        number = {f: k for k, f in enumerate(used)}
        factors = [home.factors[f][0] for f in used]
        dims = tuple(tuple(number[f] for f in d) for d in source.home.dims)
        plain = copy_space(factors, pricer.sizes, orders=len(pricer.sizes) <= 2)
        groups = [
            (backward, tuple(u for u in foreign if u.backward is backward))
            for backward in (False, True)
        ]
        groups = [(b, uses) for b, uses in groups if uses]
        copies: list[Copy] = []
        for k, (backward, uses) in enumerate(groups):
            modes = [Mode.FETCH]
            modes += [Mode.REUSE] if k == 1 else []
            modes += [Mode.SAME] if memory else []
            space = Space(plain.strategies * len(modes))
            each = tuple(m for m in modes for _ in plain.strategies)
            copies.append(
                Copy(start + k, source.value_class, backward, dims, space, each, uses)
            )
        return copies

    def _source_edges(
        self,
        source: Source,
        copies: Sequence[Copy],
        spaces: Sequence[Space],
        pricer: Pricer,
    ) -> list[tuple[tuple[int, int], np.ndarray]]:
        known = self.independent.gathered
        shared = GATHERS if source.value_class[0] in known else ALONE
        nbytes = float(self.graph.values[source.example].nbytes)
        home = spaces[source.home.node].layouts(source.home.dims)
        out: list[tuple[tuple[int, int], np.ndarray]] = []
        if not copies:
            for use in source.foreign:
                target = spaces[use.node].layouts(use.dims)
                matrix = _matrix(home, target, nbytes, pricer, shared)
                out.append(((source.home.node, use.node), use.weight * matrix))
            return out
        for copy in copies:
            layouts = copy.space.layouts(copy.dims)
            fetch = _matrix(home, layouts, nbytes, pricer, shared) * _most(copy.uses)
            fetch = _by_mode(copy, home, layouts, fetch)
            out.append(((source.home.node, copy.node), fetch))
            for use in copy.uses:
                target = spaces[use.node].layouts(use.dims)
                matrix = _matrix(layouts, target, nbytes, pricer, shared)
                out.append(((copy.node, use.node), use.weight * matrix))
        if len(copies) == 2:
            out.append(((copies[0].node, copies[1].node), _reuse_matrix(*copies)))
        return out


def _matrix(
    starts: Sequence[Layout],
    targets: Sequence[Layout],
    nbytes: float,
    pricer: Pricer,
    together: frozenset[str],
) -> np.ndarray:
    whole = [(s, ()) for s in starts]
    return pricer.reshard_matrix(whole, targets, "", nbytes, together)


def _most(uses: Sequence[Use]) -> float:
    """How often the copy is made: once for each instance and trip."""
    trips: dict[int, float] = {}
    for use in uses:
        for value, (_, _, count) in use.readers.items():
            trips[value] = max(trips.get(value, 0.0), count)
    return sum(trips.values())


def _reuse_matrix(forward: Copy, backward: Copy) -> np.ndarray:
    """A backward copy that reuses the forward one must have its layout."""
    same = np.array(
        [[a == b for b in backward.space.strategies] for a in forward.space.strategies]
    )
    reuse = np.array([m is Mode.REUSE for m in backward.modes])[None, :]
    fetched = np.array([m is not Mode.SAME for m in forward.modes])[:, None]
    return np.where(reuse & ~(same & fetched), np.inf, 0.0)


def _by_mode(
    copy: Copy, home: Sequence[Layout], layouts: Sequence[Layout], fetch: np.ndarray
) -> np.ndarray:
    """What each way to come by a copy costs; only the value itself is its layout."""
    if Mode.SAME in copy.modes:
        same = np.array([[a == b for b in layouts] for a in home])
        mine = np.array([m is Mode.SAME for m in copy.modes])[None, :]
        fetch = np.where(mine & ~same, np.inf, fetch)
    reuse = np.array([m is Mode.REUSE for m in copy.modes])
    return np.where(reuse[None, :], 0.0, fetch)
