"""The planner's problem: nodes, copies and edges, priced for one mesh.

A *node* is a group of operators, or an input, that shares one decision: its *strategy*,
which gives its arrays layouts. A *copy* is an array in another layout that several
readers share. An *edge* between two nodes costs the seconds of resharding. The seconds
of a *kind* may overlap with the same other work; each kind has a *weight*, a factor on
its seconds (`autopar.planner.weights`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autopar.cost.codecs import Prices, coded_matrix
from autopar.cost.combining import ALONE, GATHERS, SUMS
from autopar.cost.local import sent_bytes
from autopar.cost.pricer import CodedRate, Pricer
from autopar.cost.rows import exchange_seconds
from autopar.cost.work import node_seconds, partial_runs, partial_work_s, share_of
from autopar.layouts.layout import Axes, Layout
from autopar.layouts.strategies import (
    Copy,
    Mode,
    Space,
    Strategy,
    copy_space,
    partial_axes,
    strategy_space,
)
from autopar.planner.codecs.gathers import gather_rate
from autopar.planner.memory_terms import memory_terms
from autopar.planner.weights import WHOLE, Weights, in_kinds, lower_seconds
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Contraction, Node
from autopar.steps.uses import HomeValue, Use, times_made
from autopar_passes.graph.operators import OperatorGraph
from autopar_solver import MemoryTerm, ShardingProblem

# In a program with at most this many nodes, all state may be split, however small its
# arrays are. The few additional strategies take almost no time to solve, and small
# arrays are a larger share of a small step.
FEW_NODES = 64
# The small arrays of state that are never sharded may take together at most the first
# fraction of a device's memory, and at most the second fraction of all state.
SMALL_OF_DEVICE = 1e-3
SMALL_OF_STATE = 1e-2

# A function that says whether a restricted plan may use a strategy of a node.
Restriction = Callable[[Node, Strategy], bool]
# A function that computes the seconds of an edge, and the fraction of them that is of
# each kind.
Priced = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """Two restrictions; the second is dropped at nodes where it leaves no strategy.

    Attributes:
      outer: a restriction that holds at every node; None: no such restriction.
      inner: a restriction that holds only at nodes that have a strategy which both
        restrictions allow.
    """

    outer: Restriction | None
    inner: Restriction

    def __call__(self, node: Node, strategy: Strategy) -> bool:
        """Whether both restrictions allow a strategy."""
        return self.inner(node, strategy) and (
            self.outer is None or self.outer(node, strategy)
        )


def allowed_strategies(
    restriction: Restriction | None,
    node: Node,
    strategies: tuple[Strategy, ...],
    small: bool,
) -> tuple[Strategy, ...]:
    """Returns the strategies that a restriction allows; the first strategy if it allows
    none.

    Args:
      restriction: says which strategies are allowed; None: all strategies.
      node: the node whose strategies are restricted.
      strategies: the strategies of the node; the first strategy splits nothing.
      small: whether the node's array is too small to be worth sharding. Such an array
        stays unsharded if the restriction allows it.
    """
    if isinstance(restriction, Within):
        outer = allowed_strategies(restriction.outer, node, strategies, small)
        return tuple(s for s in outer if restriction.inner(node, s)) or outer
    kept = strategies
    if restriction is not None:
        kept = tuple(s for s in kept if restriction(node, s)) or strategies[:1]
    return kept[:1] if small and not any(kept[0]) else kept


# An edge whose seconds cannot overlap with work: no fraction of them is of any kind.
_NO_PARTS = in_kinds(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Formulation:
    """A priced problem, with the strategies and the copies that its nodes stand for.

    Attributes:
      problem: nodes and edges with their costs.
      spaces: the strategies of each node: first the nodes of the program, then the
        copies.
      copies: the copies.
      pricer: prices on the mesh and the cluster.
      own: for each program node, the seconds of its strategies, float64
        ``[KINDS + 1, strategies]``: one row for each kind of seconds that has a weight,
        and a last row for all other seconds.
      parts: for each edge, the fraction of its seconds that is of each kind; float64
        ``[KINDS]``.
      weights: the factors by which the problem multiplies seconds of each kind.
      whole: the seconds of each edge if all weights are 1.
    """

    problem: ShardingProblem
    spaces: tuple[Space, ...]
    copies: tuple[Copy, ...]
    pricer: Pricer
    own: tuple[np.ndarray, ...]
    parts: tuple[np.ndarray, ...]
    weights: Weights
    whole: tuple[np.ndarray, ...]

    def at(self, weights: Weights) -> Formulation:
        """Returns the same problem with other weights of the kinds of seconds."""
        if weights == self.weights:
            return self
        problem = dataclasses.replace(
            self.problem,
            node_costs=(
                *_weighted_nodes(weights, self.own),
                *self.problem.node_costs[len(self.own) :],
            ),
            edge_costs=_weigh(weights, self.whole, self.parts),
        )
        return dataclasses.replace(self, problem=problem, weights=weights)

    def with_limit(self, memory_limit: float | None) -> Formulation:
        """The same problem with another limit on the memory of a device, in bytes."""
        problem = dataclasses.replace(self.problem, memory_limit=memory_limit)
        return dataclasses.replace(self, problem=problem)

    def within(
        self,
        analysis: Analysis,
        rule: Restriction | None,
        small: frozenset[int] = frozenset(),
    ) -> Formulation:
        """Returns the same formulation with only the strategies that a rule allows.

        Args:
          analysis: the facts of the program.
          rule: the rule; a node without an allowed strategy keeps its first strategy.
            If the rule is None, all strategies are allowed.
          small: nodes whose arrays stay unsharded if the rule allows it.
        """
        nodes = analysis.contraction.nodes
        kept: list[np.ndarray] = []
        for node, space in zip(nodes, self.spaces, strict=False):
            known = {s: k for k, s in enumerate(space.strategies)}
            own = allowed_strategies(rule, node, space.strategies, node.index in small)
            kept.append(np.array([known[s] for s in own]))
        copies = self.spaces[len(nodes) :]
        kept += [np.arange(len(space.strategies)) for space in copies]
        spaces = [
            Space(tuple(space.strategies[k] for k in own))
            for space, own in zip(self.spaces[: len(nodes)], kept, strict=False)
        ]

        def cut(costs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(
                cost[np.ix_(kept[a], kept[b])]
                for (a, b), cost in zip(self.problem.edges, costs, strict=True)
            )

        problem = dataclasses.replace(
            self.problem,
            node_costs=tuple(
                cost[own]
                for cost, own in zip(self.problem.node_costs, kept, strict=True)
            ),
            edge_costs=cut(self.problem.edge_costs),
            memory=tuple(
                dataclasses.replace(term, usage=term.usage[kept[term.node]])
                for term in self.problem.memory
            ),
        )
        return dataclasses.replace(
            self,
            problem=problem,
            spaces=(*spaces, *copies),
            own=tuple(own[:, k] for own, k in zip(self.own, kept, strict=False)),
            whole=cut(self.whole),
        )


def _weigh(
    weights: Weights, costs: Sequence[np.ndarray], parts: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    return tuple(
        lower_seconds(weights, c, p) for c, p in zip(costs, parts, strict=True)
    )


def _weighted_nodes(
    weights: Weights, own: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    factors = np.append(weights.kinds, 1.0)
    return tuple(factors @ seconds for seconds in own)


def contraction_partials(graph: OperatorGraph, node: Node, space: Space) -> list[Axes]:
    """For each strategy of a contraction, the axes over which its result is partial.

    A partial result has to be summed over these axes.
    """
    reduced = node.factors_reduced(graph.operators[node.root])
    return [partial_axes(s, reduced) for s in space.strategies]


def small_state(
    graph: OperatorGraph, contraction: Contraction, device_bytes: float
) -> frozenset[int]:
    """Returns the nodes of carried state that are too small to be worth sharding.

    Biases and scales stay unsharded, the smallest first, as long as together they stay
    below `SMALL_OF_DEVICE` of a device's memory and `SMALL_OF_STATE` of the state.
    Sharding them saves almost no memory and adds collectives whose time is mostly
    latency. A program with at most `FEW_NODES` nodes may shard all of its state.
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
    weights: Weights = WHOLE,
    small: frozenset[int] = frozenset(),
    known: Formulation | None = None,
) -> Formulation:
    """Prices every strategy and every resharding of a program on one mesh.

    Args:
      analysis: the program.
      pricer: the mesh and cluster.
      restriction: says which strategies are allowed.
      memory_limit: bytes of one device. With a limit the problem has memory terms.
        Without a limit (None) the problem has no memory terms and is smaller.
      prices: the prices, in seconds, of a codec's error and of a second on the links.
        With them, gradients may be sent by codecs; None: no codecs.
      weights: the factors for seconds that may overlap with other seconds.
      small: nodes whose arrays stay unsharded if the restriction allows it.
      known: the same problem, formulated before with other message sizes and without
        ``prices``. The costs of arrays that share no message with others are copied
        from it.
    """
    judge, pricer = pricer, with_joined_bytes(analysis, pricer)
    packed = prices is not None
    spaces, own = _node_costs(
        analysis, pricer, restriction, small, known, packed=packed
    )
    edges: list[tuple[int, int]] = []
    matrices: list[np.ndarray] = []
    parts: list[np.ndarray] = []

    def add(edge: tuple[int, int], make: Priced, shared: bool) -> None:
        number = len(edges)
        edges.append(edge)
        if known is None or shared:
            matrix, counted = make()
        else:
            matrix, counted = known.whole[number], known.parts[number]
        matrices.append(matrix)
        parts.append(counted)

    for row in _result_edges(analysis, spaces, pricer, prices, weights):
        add(*row)
    for edge, matrix in _partial_work_edges(analysis, spaces, pricer):
        if edge[0] != edge[1]:
            add(edge, functools.partial(_whole, matrix), shared=True)
        elif known is None or own[edge[0]] is not known.own[edge[0]]:
            own[edge[0]][-1] += matrix.diagonal()
    copies: list[Copy] = []
    for source in analysis.sources.values():
        start = len(analysis.contraction.nodes) + len(copies)
        memory = memory_limit is not None
        made = make_copies(analysis, source, start, pricer, memory=memory)
        copies.extend(made)
        for row in _source_edges(analysis, source, made, spaces, pricer):
            add(*row)
    terms: tuple[MemoryTerm, ...] = ()
    if memory_limit is not None:
        terms = memory_terms(analysis, pricer, spaces, copies)
    problem = ShardingProblem(
        name="step",
        node_costs=(
            *_weighted_nodes(weights, own),
            *(np.zeros(len(c.space.strategies)) for c in copies),
        ),
        edges=tuple(edges),
        edge_costs=_weigh(weights, matrices, parts),
        memory=terms,
        memory_limit=memory_limit,
    )
    all_spaces = (*spaces, *(c.space for c in copies))
    return Formulation(
        problem,
        all_spaces,
        tuple(copies),
        judge,
        tuple(own),
        tuple(parts),
        weights,
        tuple(matrices),
    )


def with_joined_bytes(analysis: Analysis, pricer: Pricer) -> Pricer:
    """A pricer that knows the bytes of a step's arrays that may share a message."""
    sums = sum(
        nbytes * times
        for index in analysis.independent.summing
        for nbytes, times in analysis.sums[index]
    )
    rounds = pricer.cluster.device.rounds_operands
    gathers = 0.0
    for source in analysis.sources.values():
        if source.value_class[0] in analysis.independent.gathered:
            # A value is gathered at most once over each axis on the way to its readers.
            times = sum(use.weight for use in source.foreign)
            gathers += times * sent_bytes(analysis, source.example, rounds=rounds)
    return dataclasses.replace(pricer, joined_bytes=(float(sums), gathers))


def _node_costs(
    analysis: Analysis,
    pricer: Pricer,
    restriction: Restriction | None,
    small: frozenset[int],
    known: Formulation | None,
    *,
    packed: bool,
) -> tuple[list[Space], list[np.ndarray]]:
    """Returns the strategies of each node, and their seconds (`Formulation.own`)."""
    spaces: list[Space] = []
    costs: list[np.ndarray] = []
    graph, contraction = analysis.graph, analysis.contraction
    for node in contraction.nodes:
        if known is not None and analysis.independent.summing.isdisjoint(node.members):
            spaces.append(known.spaces[node.index])
            costs.append(known.own[node.index])
            continue
        space = strategy_space(graph, contraction, node, pricer.sizes)
        kept = allowed_strategies(
            restriction, node, space.strategies, node.index in small
        )
        space = Space(kept)
        spaces.append(space)
        work, sums, rest = node_seconds(analysis, node, space, pricer, packed=packed)
        weighed = in_kinds(work, np.zeros((1, len(rest))), sums)
        costs.append(np.vstack([weighed, rest]))
    for node, seconds in exchange_seconds(analysis, spaces, pricer).items():
        if known is None or costs[node] is not known.own[node]:
            costs[node][-1] += seconds
    return spaces, costs


def _result_edges(
    analysis: Analysis,
    spaces: Sequence[Space],
    pricer: Pricer,
    prices: Prices | None,
    weights: Weights,
) -> Iterator[tuple[tuple[int, int], Priced, bool]]:
    """Edges from a contraction to its results; these edges carry the cost of the
    reduction.
    """
    for node in analysis.contraction.nodes:
        if node.kind != "contraction":
            continue
        op = analysis.graph.operators[node.root]
        for slot, value in enumerate(op.outputs):
            home = analysis.contraction.homes.get(value)
            if home is not None:
                make = functools.partial(
                    *(_result_matrix, analysis, node, slot),
                    *(spaces, pricer, prices, weights),
                )
                shared = op.class_index in analysis.independent.summing
                shared = shared or (prices is not None and slot == 0)
                yield (node.index, home.node), make, shared


def _partial_work_edges(
    analysis: Analysis, spaces: Sequence[Space], pricer: Pricer
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Edges from contractions to operators that compute with their partial results.

    The edges exist only for partial results whose reduction over devices is postponed
    in a loop. Outside of loops a reduction is postponed only for codecs.
    """
    graph, contraction = analysis.graph, analysis.contraction
    for (maker, member), trips in partial_runs(analysis, pricer).items():
        node = contraction.nodes[contraction.node_of[maker]]
        reader = contraction.node_of[member]
        reduced = node.factors_reduced(graph.operators[maker])
        own = spaces[node.index].strategies
        partials = [partial_axes(s, reduced) for s in own]
        strategies = spaces[reader].strategies
        matrix = trips * partial_work_s(analysis, member, strategies, partials, pricer)
        if matrix.any():
            yield (node.index, reader), matrix


def _result_matrix(
    analysis: Analysis,
    node: Node,
    slot: int,
    spaces: Sequence[Space],
    pricer: Pricer,
    prices: Prices | None,
    weights: Weights,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the sum from each strategy of a contraction to a result's layout."""
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
    share = share_of(analysis, pricer, op.class_index)
    judge = pricer.packed if final and prices is not None else pricer
    matrix = np.sum(
        [
            weight
            * judge.reshard_matrix(
                starts, targets, op.rule.reduction, nbytes, together, share
            )
            for nbytes, weight in sums
        ],
        axis=0,
    )
    parts = _NO_PARTS
    if final:
        parts = in_kinds(0.0, 0.0, analysis.positions.sum_parts[op.class_index])
    coded = analysis.coded_gradients.get(op.class_index)
    if prices is None or not coded or slot != 0:
        return matrix, parts
    sent = [
        weight * coded_matrix(pricer, prices, starts, targets, shape)
        for shape, weight in coded
    ]
    return prices.choose_seconds(
        lower_seconds(weights, matrix, parts), np.sum(sent, axis=0)
    ), _NO_PARTS


def make_copies(
    analysis: Analysis, source: HomeValue, start: int, pricer: Pricer, *, memory: bool
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
    source: HomeValue,
    copies: Sequence[Copy],
    spaces: Sequence[Space],
    pricer: Pricer,
) -> Iterator[tuple[tuple[int, int], Priced, bool]]:
    """Edges from a value to its readers; if the value has copies, through the
    copies.
    """
    known = analysis.independent.gathered
    together = GATHERS if source.value_class[0] in known else ALONE
    rounds = pricer.cluster.device.rounds_operands
    nbytes = sent_bytes(analysis, source.example, rounds=rounds)
    home = spaces[source.home.node].layouts(source.home.dims)
    coded = gather_rate(analysis, pricer, source.example)

    def move(starts: Sequence[Layout], use: Use) -> tuple[np.ndarray, np.ndarray]:
        target = spaces[use.node].layouts(use.dims)
        matrix = _matrix(starts, target, nbytes, pricer, together, coded)
        return use.weight * matrix, parts((use,))

    def fetch(copy: Copy) -> tuple[np.ndarray, np.ndarray]:
        layouts = copy.space.layouts(copy.dims)
        matrix = _matrix(home, layouts, nbytes, pricer, together, coded)
        matrix = _by_mode(copy, home, layouts, matrix * times_made(copy.uses))
        return matrix, parts(copy.uses)

    def parts(uses: Sequence[Use]) -> np.ndarray:
        """Returns the fractions of a gather that may overlap with work, by kind."""
        return _in_passes(analysis, uses) if together else _NO_PARTS

    shared = bool(together)
    for use in source.foreign if not copies else ():
        make = functools.partial(move, home, use)
        yield (source.home.node, use.node), make, shared
    for copy in copies:
        yield (source.home.node, copy.node), functools.partial(fetch, copy), shared
        layouts = copy.space.layouts(copy.dims)
        for use in copy.uses:
            yield (copy.node, use.node), functools.partial(move, layouts, use), shared
    if len(copies) == 2:
        make = functools.partial(_reuse_matrix, *copies)
        yield (copies[0].node, copies[1].node), make, False


def _whole(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the costs of an edge if none of its seconds may overlap with work."""
    return matrix, _NO_PARTS


def _in_passes(analysis: Analysis, uses: Sequence[Use]) -> np.ndarray:
    """For each segment of work, the fraction of gathers that is first read there.

    Gathers for readers in the forward or backward pass may overlap with the work of
    that pass. The optimizer update waits for the gathers of arrays that it reads.
    """
    first: dict[int, int] = {}
    for use in uses:
        for value, (reader, _, _) in use.readers.items():
            first[value] = min(first.get(value, reader), reader)
    return in_kinds(0.0, analysis.positions.gather_parts(list(first.values())), 0.0)


def _matrix(
    starts: Sequence[Layout],
    targets: Sequence[Layout],
    nbytes: float,
    pricer: Pricer,
    together: frozenset[str],
    coded: CodedRate | None,
) -> np.ndarray:
    whole = [(s, ()) for s in starts]
    return pricer.reshard_matrix(whole, targets, "", nbytes, together, coded=coded)


def _reuse_matrix(forward: Copy, backward: Copy) -> tuple[np.ndarray, np.ndarray]:
    """Returns the edge between a value's forward copy and its backward copy.

    If the backward pass reuses the forward copy, the edge forbids different layouts of
    the two copies.
    """
    same = np.array(
        [[a == b for b in backward.space.strategies] for a in forward.space.strategies]
    )
    reuse = np.array([m is Mode.REUSE for m in backward.modes])[None, :]
    fetched = np.array([m is not Mode.SAME for m in forward.modes])[:, None]
    return _whole(np.where(reuse & ~(same & fetched), np.inf, 0.0))


def _by_mode(
    copy: Copy, home: Sequence[Layout], layouts: Sequence[Layout], fetch: np.ndarray
) -> np.ndarray:
    """Returns the seconds of making a copy, for each layout of the value and each mode.

    The modes (`autopar.layouts.strategies.Mode`) are: resharding the value, using the
    value itself if it has the copy's layout, and reusing the forward copy.
    """
    if Mode.SAME in copy.modes:
        same = np.array([[a == b for b in layouts] for a in home])
        mine = np.array([m is Mode.SAME for m in copy.modes])[None, :]
        fetch = np.where(mine & ~same, np.inf, fetch)
    reuse = np.array([m is Mode.REUSE for m in copy.modes])
    return np.where(reuse[None, :], 0.0, fetch)
