"""The planner's problem: nodes, copies and edges, priced for one mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autopar.cost.codecs.matrix import Prices, coded_matrix
from autopar.cost.combining import ALONE, GATHERS, SUMS
from autopar.cost.local import sent_bytes
from autopar.cost.overlap import Discounts, lowered
from autopar.cost.pricer import Pricer
from autopar.cost.work import node_work_s, partial_runs, partial_work_s, share_of
from autopar.errors import PlanError
from autopar.layouts.copies import Copy, Mode
from autopar.layouts.layout import Axes, Layout
from autopar.layouts.strategies import (
    Space,
    Strategy,
    copy_space,
    partial_axes,
    strategy_space,
)
from autopar.planner.memory_terms import memory_terms
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Contraction, Node
from autopar.steps.uses import Source, Use, times_made
from autopar_passes.graph.operators import OperatorGraph
from autopar_solver import MemoryTerm, ShardingProblem

# In a program of so few nodes all state may be split: it takes next to no time to
# consider, and a small array is a larger part of a small step.
FEW_NODES = 64
# State that is kept whole takes at most these parts of a device and of all state.
SMALL_OF_DEVICE = 1e-3
SMALL_OF_STATE = 1e-2

# Says which strategies of a node a restricted plan may use.
Restriction = Callable[[Node, Strategy], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """A restriction that says nothing about a node where it would leave no choice.

    Attributes:
      outer: a restriction that holds everywhere; None: there is none.
      inner: one that holds as far as ``outer`` leaves a strategy that it allows.
    """

    outer: Restriction | None
    inner: Restriction

    def __call__(self, node: Node, strategy: Strategy) -> bool:
        """Whether both allow a strategy."""
        return self.inner(node, strategy) and (
            self.outer is None or self.outer(node, strategy)
        )


def allowed_strategies(
    restriction: Restriction | None,
    node: Node,
    strategies: tuple[Strategy, ...],
    small: bool,
) -> tuple[Strategy, ...]:
    """Returns the strategies that a restriction allows; the first where that is none.

    Args:
      restriction: says which; None: all.
      node: the node.
      strategies: of it, the one that splits nothing first.
      small: whether nothing is gained by splitting it; it stays whole where it may.
    """
    if isinstance(restriction, Within):
        outer = allowed_strategies(restriction.outer, node, strategies, small)
        return tuple(s for s in outer if restriction.inner(node, s)) or outer
    kept = strategies
    if restriction is not None:
        kept = tuple(s for s in kept if restriction(node, s)) or strategies[:1]
    return kept[:1] if small and not any(kept[0]) else kept


@dataclasses.dataclass(frozen=True, slots=True)
class Formulation:
    """A priced problem and what its nodes stand for.

    Attributes:
      problem: nodes and edges with their costs.
      spaces: the strategies of each node, of the copies after those of the program.
      copies: the copies.
      pricer: the mesh and cluster.
      discounts: on what may be hidden; None: work and communication are added.
    """

    problem: ShardingProblem
    spaces: tuple[Space, ...]
    copies: tuple[Copy, ...]
    pricer: Pricer
    discounts: Discounts | None = None


def contraction_partials(graph: OperatorGraph, node: Node, space: Space) -> list[Axes]:
    """The axes over which a contraction's result is partial, by strategy."""
    reduced = node.reduced(graph.operators[node.root])
    return [partial_axes(s, reduced) for s in space.strategies]


def small_state(
    graph: OperatorGraph, contraction: Contraction, device_bytes: float
) -> frozenset[int]:
    """Returns the nodes of carried state too small to be worth splitting.

    Biases and scales are kept whole, the smallest first, as long as all of them
    together stay below `SMALL_OF_DEVICE` of a device's memory and `SMALL_OF_STATE`
    of the state: splitting them saves next to no memory, and one small
    collective is as slow as another. A program of `FEW_NODES` keeps none whole.
    """
    if len(contraction.nodes) <= FEW_NODES:
        return frozenset()
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


def formulate(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None = None,
    memory_limit: float | None = None,
    prices: Prices | None = None,
    discounts: Discounts | None = None,
    small: frozenset[int] | None = None,
    like: Formulation | None = None,
) -> Formulation:
    """Prices every strategy and every resharding of a program on one mesh.

    Args:
      analysis: the program.
      pricer: the mesh and cluster.
      restriction: says which strategies are allowed.
      memory_limit: bytes of one device. With it the problem has memory terms;
        without, it is smaller, and enough where memory is plenty.
      prices: with them gradients may be sent by codecs.
      discounts: on what may be hidden.
      small: nodes of state that are kept whole where they may; None: `small_state`.
      like: a problem of the same program, mesh and cluster; its terms of memory are
        taken where its nodes have the same strategies.

    Raises:
      PlanError: no plan does without the messages that ``pricer`` rules out.
    """
    if small is None:
        memory_bytes = float(pricer.cluster.memory_bytes)
        small = small_state(analysis.graph, analysis.contraction, memory_bytes)
    spaces, costs = _node_costs(analysis, pricer, restriction, discounts, small)
    edges: list[tuple[int, int]] = []
    matrices: list[np.ndarray] = []
    for edge, matrix in _result_edges(analysis, spaces, pricer, prices, discounts):
        edges.append(edge)
        matrices.append(matrix)
    for edge, matrix in _partial_work_edges(analysis, spaces, pricer, discounts):
        if edge[0] == edge[1]:
            costs[edge[0]] += matrix.diagonal()
            continue
        edges.append(edge)
        matrices.append(matrix)
    copies: list[Copy] = []
    for source in analysis.sources.values():
        start = len(analysis.contraction.nodes) + len(copies)
        memory = memory_limit is not None
        made = make_copies(analysis, source, start, pricer, memory=memory)
        copies.extend(made)
        for edge, matrix in _source_edges(
            analysis, source, made, spaces, pricer, discounts
        ):
            edges.append(edge)
            matrices.append(matrix)
    priced = (*costs, *matrices)
    if pricer.without and not all(np.isfinite(c).any() for c in priced):
        raise PlanError(
            f"mesh {pricer.mesh.label}: no plan does without these messages."
        )
    terms: tuple[MemoryTerm, ...] = ()
    if memory_limit is not None:
        known = _terms(like, spaces, copies) if like is not None else ()
        terms = known or memory_terms(analysis, pricer, spaces, copies)
    problem = ShardingProblem(
        name="step",
        node_costs=(*costs, *(np.zeros(len(c.space.strategies)) for c in copies)),
        edges=tuple(edges),
        edge_costs=tuple(matrices),
        memory=terms,
        memory_limit=memory_limit,
    )
    all_spaces = (*spaces, *(c.space for c in copies))
    return Formulation(problem, all_spaces, tuple(copies), pricer, discounts)


def _terms(
    like: Formulation, spaces: Sequence[Space], copies: Sequence[Copy]
) -> tuple[MemoryTerm, ...]:
    """The terms of memory of another problem of these strategies; () if it has none."""
    same = like.copies == tuple(copies) and like.spaces[: len(spaces)] == tuple(spaces)
    return like.problem.memory if same else ()


def _node_costs(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None,
    discounts: Discounts | None,
    small: frozenset[int],
) -> tuple[list[Space], list[np.ndarray]]:
    spaces: list[Space] = []
    costs: list[np.ndarray] = []
    graph, contraction = analysis.graph, analysis.contraction
    for node in contraction.nodes:
        space = strategy_space(graph, contraction, node, pricer.sizes)
        kept = allowed_strategies(
            restriction, node, space.strategies, node.index in small
        )
        space = Space(kept)
        spaces.append(space)
        costs.append(node_work_s(analysis, node, space, pricer, discounts))
    return spaces, costs


def _result_edges(
    analysis: Analysis,
    spaces: Sequence[Space],
    pricer: Pricer,
    prices: Prices | None,
    discounts: Discounts | None,
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Edges from a contraction to its results, which take the reduction."""
    for node in analysis.contraction.nodes:
        if node.kind != "contraction":
            continue
        op = analysis.graph.operators[node.root]
        for slot, value in enumerate(op.outputs):
            home = analysis.contraction.homes.get(value)
            if home is not None:
                matrix = _result_matrix(
                    analysis, node, slot, spaces, pricer, prices, discounts
                )
                yield (node.index, home.node), matrix


def _partial_work_edges(
    analysis: Analysis,
    spaces: Sequence[Space],
    pricer: Pricer,
    discounts: Discounts | None,
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Edges from contractions to what works on their partial results.

    Only where the results wait in a loop: elsewhere they wait for a codec alone.
    """
    graph, contraction = analysis.graph, analysis.contraction
    for (maker, member), trips in partial_runs(analysis, pricer).items():
        node = contraction.nodes[contraction.node_of[maker]]
        reader = contraction.node_of[member]
        reduced = node.reduced(graph.operators[maker])
        own = spaces[node.index].strategies
        partials = [partial_axes(s, reduced) for s in own]
        strategies = spaces[reader].strategies
        matrix = trips * partial_work_s(analysis, member, strategies, partials, pricer)
        if discounts is not None:
            matrix = discounts.work[member] * matrix
        if matrix.any():
            yield (node.index, reader), matrix


def _result_matrix(
    analysis: Analysis,
    node: Node,
    slot: int,
    spaces: Sequence[Space],
    pricer: Pricer,
    prices: Prices | None,
    discounts: Discounts | None,
) -> np.ndarray:
    """Seconds from each strategy of a contraction to each layout of a result."""
    graph = analysis.graph
    op = graph.operators[node.root]
    value = op.outputs[slot]
    home = analysis.contraction.homes[value]
    partials = contraction_partials(graph, node, spaces[node.index])
    own = node.dims(op, op.rule.results[slot])
    starts = list(zip(spaces[node.index].layouts(own), partials, strict=True))
    targets = spaces[home.node].layouts(home.dims)
    whole = [(graph.values[value].nbytes, analysis.trips[op.class_index])]
    sums = analysis.sums[op.class_index] if slot == 0 else whole
    final = op.class_index in analysis.independent.summing
    together = SUMS if final else ALONE
    share = share_of(analysis, pricer, op.class_index, discounts)
    matrix = np.sum(
        [
            weight
            * pricer.reshard_matrix(
                starts, targets, op.rule.reduction, nbytes, together, share
            )
            for nbytes, weight in sums
        ],
        axis=0,
    )
    if final and discounts is not None:
        matrix = lowered(matrix, discounts.sums[op.class_index])
    coded = analysis.coded.get(op.class_index)
    if prices is None or not coded or slot != 0:
        return matrix
    sent = [
        weight * coded_matrix(pricer, prices, starts, targets, shape)
        for shape, weight in coded
    ]
    return prices.chosen(matrix, np.sum(sent, axis=0))


def make_copies(
    analysis: Analysis, source: Source, start: int, pricer: Pricer, *, memory: bool
) -> list[Copy]:
    """Returns the copies of one value, numbered from ``start``."""
    foreign = source.foreign
    if len({(u.node, u.dims) for u in foreign}) < 2:
        return []
    home = analysis.contraction.nodes[source.home.node]
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
    analysis: Analysis,
    source: Source,
    copies: Sequence[Copy],
    spaces: Sequence[Space],
    pricer: Pricer,
    discounts: Discounts | None,
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Edges from a value to its readers, by its copies where it has any."""
    known = analysis.independent.gathered
    shared = GATHERS if source.value_class[0] in known else ALONE
    rounds = pricer.cluster.device.rounds_operands
    nbytes = sent_bytes(analysis, source.example, rounds=rounds)
    home = spaces[source.home.node].layouts(source.home.dims)

    def part(uses: Sequence[Use]) -> float:
        """The factor on a gather that nothing waits for."""
        return discounts.of_uses(uses) if discounts is not None and shared else 1.0

    if not copies:
        for use in source.foreign:
            target = spaces[use.node].layouts(use.dims)
            matrix = _matrix(home, target, nbytes, pricer, shared)
            matrix = lowered(matrix, part((use,)))
            yield (source.home.node, use.node), use.weight * matrix
        return
    for copy in copies:
        layouts = copy.space.layouts(copy.dims)
        fetch = _matrix(home, layouts, nbytes, pricer, shared) * times_made(copy.uses)
        fetch = lowered(fetch, part(copy.uses))
        yield (
            (source.home.node, copy.node),
            _by_mode(copy, home, layouts, fetch),
        )
        for use in copy.uses:
            target = spaces[use.node].layouts(use.dims)
            matrix = _matrix(layouts, target, nbytes, pricer, shared)
            matrix = lowered(matrix, part((use,)))
            yield (copy.node, use.node), use.weight * matrix
    if len(copies) == 2:
        yield (copies[0].node, copies[1].node), _reuse_matrix(*copies)


def _matrix(
    starts: Sequence[Layout],
    targets: Sequence[Layout],
    nbytes: float,
    pricer: Pricer,
    together: frozenset[str],
) -> np.ndarray:
    whole = [(s, ()) for s in starts]
    return pricer.reshard_matrix(whole, targets, "", nbytes, together)


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
    """The cost of each way to make a copy; only the value itself has its layout."""
    if Mode.SAME in copy.modes:
        same = np.array([[a == b for b in layouts] for a in home])
        mine = np.array([m is Mode.SAME for m in copy.modes])[None, :]
        fetch = np.where(mine & ~same, np.inf, fetch)
    reuse = np.array([m is Mode.REUSE for m in copy.modes])
    return np.where(reuse[None, :], 0.0, fetch)
