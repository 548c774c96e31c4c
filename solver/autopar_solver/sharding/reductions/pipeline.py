"""Runs all reductions in rounds, until a round removes too little.

One reduction, *folding*, merges a node into a neighbour (its leader) whose strategy
determines the node's. If every row of a link ``(i, j)`` has at most one finite entry,
the strategy of ``i`` determines the strategy of ``j``: ``j`` follows ``i``. The costs,
links and memory of ``j`` then move to ``i``. Folding runs in rounds. In each round
every node picks at most one leader, maps are composed along the chains of leaders, and
every link of a follower is rewritten once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.sharding.graph import (
    ContradictionError,
    Eliminate,
    Follow,
    Graph,
    NodeMemory,
    find_rows,
    sum_memories,
)
from autopar_solver.sharding.problem import ReductionReport, ShardingProblem

RELATIVE_ROUNDING = 1e-13
"""Differences below this multiple of the largest entry count as rounding."""


def drop_separable(graph: Graph) -> None:
    """Moves links with ``cost[a, b] = u[a] + v[b]`` into the nodes' costs."""
    for i, links in graph.links.items():
        for j, table in list(links.items()):
            if i > j:
                continue
            if (parts := split_separable(table)) is not None:
                graph.costs[i] = graph.costs[i] + parts[0]
                graph.costs[j] = graph.costs[j] + parts[1]
                graph.drop_link(i, j)


def split_separable(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The ``u`` and ``v`` of a separable table; None if the table is not separable.

    >>> split_separable(np.array([[1.0, 2.0], [4.0, 5.0]]))
    (array([1., 4.]), array([0., 1.]))
    """
    # Most tables fail the test at one corner, so testing corners first saves time.
    corners = table[[0, -1, 0, -1], [0, -1, -1, 0]]
    if not np.isfinite(corners).all():
        return None
    corner = corners @ (1.0, 1.0, -1.0, -1.0)
    if not abs(corner) <= 4 * RELATIVE_ROUNDING * abs(table).max() < np.inf:
        return None
    u, v = table[:, 0], table[0] - table[0, 0]
    error = abs(table - u[:, None] - v).max()
    return (u, v) if error <= RELATIVE_ROUNDING * abs(table).max() else None


def drop_infinite(graph: Graph) -> None:
    """Removes strategies of infinite cost."""
    for i in list(graph.costs):
        finite = np.isfinite(graph.costs[i])
        if not finite.all():
            graph.restrict(i, np.flatnonzero(finite))


def drop_unsupported(graph: Graph) -> None:
    """Removes strategies that have no allowed partner in some neighbour.

    The method is arc consistency (Mackworth's AC-3): a removed strategy can leave
    strategies of neighbours without partners in turn.
    """
    waiting = deque(graph.costs)
    queued = set(waiting)
    while waiting:
        i = waiting.popleft()
        queued.discard(i)
        supported = _has_support(graph, i)
        if supported.all():
            continue
        graph.restrict(i, np.flatnonzero(supported))
        for j in graph.links[i]:
            if j not in queued:
                queued.add(j)
                waiting.append(j)


def _has_support(graph: Graph, i: int) -> np.ndarray:
    supported = np.isfinite(graph.costs[i])
    for table in graph.links[i].values():
        supported &= table.min(axis=1) < np.inf
    return supported


def drop_single(graph: Graph, nodes: Iterable[int] | None = None) -> None:
    """Removes nodes with one strategy: their links become costs of the neighbours.

    The graph holds only the memory beyond the least that a node needs. A node with one
    strategy therefore has no memory in the graph.
    """
    for i in list(graph.costs if nodes is None else nodes):
        if len(graph.costs[i]) > 1 or i in graph.memory:
            continue
        if graph.costs[i][0] == np.inf:
            raise ContradictionError(f"the only strategy of node {i} is forbidden")
        for j, table in graph.links[i].items():
            graph.costs[j] = graph.costs[j] + table[0]
        graph.constant += float(graph.costs[i][0])
        graph.drop_node(i, Eliminate(i, (), np.array(0)))


MAX_WORK = 4_000_000
"""Nodes that need more additions than this are not eliminated."""


def eliminate_low_degree(graph: Graph) -> None:
    """Removes nodes of degree 0, 1 and 2 whose best strategies need the least memory.

    The best strategy of ``v`` for strategies of the neighbours ``a`` and ``b`` costs
    ``min_k c[k] + T_a[k, a] + T_b[k, b]``. This becomes a cost of the only neighbour,
    or a link between the two neighbours. The reduction is exact if the best strategy
    needs no memory above the node's least at any row.
    """
    waiting = [(_work(graph, i), i) for i in graph.costs if len(graph.links[i]) <= 2]
    heapq.heapify(waiting)
    while waiting:
        work, i = heapq.heappop(waiting)
        if i not in graph.costs or work != _work(graph, i) or work > MAX_WORK:
            continue
        neighbours = tuple(graph.links[i])
        if _eliminate(graph, i, neighbours):
            for j in neighbours:
                if len(graph.links[j]) <= 2:
                    heapq.heappush(waiting, (_work(graph, j), j))


def _work(graph: Graph, i: int) -> int:
    work = len(graph.costs[i])
    for table in graph.links[i].values():
        work *= table.shape[1]
    return work if len(graph.links[i]) <= 2 else MAX_WORK + 1


def _eliminate(graph: Graph, i: int, neighbours: tuple[int, ...]) -> bool:
    total = graph.costs[i].reshape((-1,) + (1,) * len(neighbours))
    for axis, j in enumerate(neighbours):
        table = graph.links[i][j]
        shape = [len(table)] + [1] * len(neighbours)
        shape[axis + 1] = table.shape[1]
        total = total + table.reshape(shape)
    answer = total.argmin(axis=0)
    if not _is_free(graph, i, answer):
        return False
    least = np.take_along_axis(total, answer[None], axis=0)[0]
    if not (least < np.inf).any():
        raise ContradictionError(f"node {i} has no answer to its neighbours")
    if not neighbours:
        graph.constant += float(least)
    elif len(neighbours) == 1:
        graph.costs[neighbours[0]] = graph.costs[neighbours[0]] + least
    else:
        graph.add_link(neighbours[0], neighbours[1], least)
    graph.drop_node(i, Eliminate(i, neighbours, answer))
    return True


def _is_free(graph: Graph, i: int, answer: np.ndarray) -> bool:
    if i not in graph.memory:
        return True
    return not graph.memory[i].usage[:, np.unique(answer)].any()


MAX_PAIR_WORK = 20_000_000
"""Nodes that need more comparisons than this skip the test."""

AT_ONCE = 1_000_000
"""Number of table entries that are compared at once."""


def drop_dominated(graph: Graph) -> None:
    """Removes strategies that another one dominates (Goldstein's criterion).

    Strategy ``b`` dominates ``a`` at node ``i`` if replacing ``a`` by ``b`` never costs
    more for any choices of the neighbours, and ``b`` never needs more memory::

        c[b] - c[a] + sum_j max_k (T_j[b, k] - T_j[a, k]) <= 0
    """
    for i in list(graph.costs):
        if (
            _pair_work(graph, i) > MAX_PAIR_WORK
            or not np.isfinite(graph.costs[i]).all()
        ):
            continue
        replaceable = replaceable_by(graph, i)
        if np.count_nonzero(replaceable) == len(replaceable):
            continue
        instead = replacements(replaceable)
        kept = np.unique(instead)
        if len(kept) < len(instead):
            graph.restrict(i, kept, instead)


def _pair_work(graph: Graph, i: int) -> int:
    size = len(graph.costs[i])
    return size * size * (1 + sum(t.shape[1] for t in graph.links[i].values()))


def replaceable_by(graph: Graph, i: int) -> np.ndarray:
    """``[S, S]``: whether ``b`` dominates ``a``, at ``[b, a]``.

    First, each pair is compared only in the column of each table where ``a`` is
    cheapest. This rules out most pairs. The remaining pairs are compared in all
    columns.
    """
    costs = graph.costs[i]
    tables = sorted(graph.links[i].values(), key=lambda t: t.shape[1])
    loss = costs[:, None] - costs[None, :]
    candidates = loss < np.inf
    if i in graph.memory:
        for usage in graph.memory[i].usage:
            candidates &= usage[:, None] <= usage[None, :]
    least = [_least_loss(table) for table in tables]
    candidates &= sum(least, loss) <= 0
    np.fill_diagonal(candidates, False)
    better, worse = np.nonzero(candidates)
    total = loss[better, worse]
    for k, table in enumerate(tables):
        total = total + _largest_loss(table, better, worse)
        rest = sum(least[k + 1 :], np.zeros_like(loss))
        # The remaining tables add at least this much.
        kept = np.flatnonzero(total + rest[better, worse] <= 0)
        better, worse, total = better[kept], worse[kept], total[kept]
    out = np.eye(len(costs), dtype=bool)
    out[better, worse] = True
    return out


def _least_loss(table: np.ndarray) -> np.ndarray:
    """At most ``max_k (T[b, k] - T[a, k])``: the value at the least ``T[a, k]``."""
    column = table.argmin(axis=1)
    present = table[np.arange(len(table)), column]
    loss = table[:, column] - np.where(present < np.inf, present, 0.0)
    # If every column forbids ``a``, any strategy may replace it.
    return np.where(present < np.inf, loss, 0.0)


def _largest_loss(
    table: np.ndarray, better: np.ndarray, worse: np.ndarray
) -> np.ndarray:
    """``max_k (T[b, k] - T[a, k])`` of pairs, over the columns that ``a`` allows."""
    out = np.empty(len(better))
    step = max(1, AT_ONCE // table.shape[1])
    finite = bool(np.isfinite(table).all())
    for first in range(0, len(better), step):
        one, two = better[first : first + step], worse[first : first + step]
        if finite:
            out[first : first + step] = (table[one] - table[two]).max(axis=1)
            continue
        supported = table[two] < np.inf
        present = np.where(supported, table[two], 0.0)
        loss = np.where(supported, table[one] - present, -np.inf).max(axis=1)
        out[first : first + step] = np.where(supported.any(axis=1), loss, 0.0)
    return out


def replacements(replaceable: np.ndarray) -> np.ndarray:
    """For each strategy, the strategy to use instead; the first of equal ones is kept.

    >>> replacements(np.array([[True, True], [True, True]])).tolist()
    [0, 0]
    """
    instead = np.arange(len(replaceable))
    for a in reversed(range(len(replaceable))):
        better = replaceable[:, a] & (instead == np.arange(len(instead)))
        better[a] = False
        if better.any():
            instead[instead == a] = int(better.argmax())
    return instead


def settle_memory(graph: Graph) -> None:
    """Subtracts the memory that all strategies of a node need from the rows' limits.

    Raises:
        ContradictionError: the limit of a row becomes negative.
    """
    room = graph.room.copy()
    for i in list(graph.memory):
        memory = graph.memory[i]
        least = memory.usage.min(axis=1)
        spread = memory.usage.max(axis=1) > least
        if spread.all() and not least.any():
            continue
        for start, end, amount in zip(
            memory.starts.tolist(), memory.ends.tolist(), least.tolist(), strict=True
        ):
            room[start:end] -= amount
        if not spread.any():
            del graph.memory[i]
            continue
        graph.memory[i] = NodeMemory(
            memory.starts[spread],
            memory.ends[spread],
            memory.usage[spread] - least[spread, None],
        )
    graph.room = room
    if len(room) and room.min() < -graph.slack:
        raise ContradictionError("the least memory is over the limit")


def drop_oversized(graph: Graph) -> None:
    """Removes strategies that exceed a row even with the least of other nodes."""
    if not len(graph.room):
        return
    lows = _range_minima(graph.room)
    for i in list(graph.memory):
        memory = graph.memory[i]
        left = _range_min(lows, memory.starts, memory.ends) + graph.slack
        fits = (memory.usage <= left[:, None]).all(axis=0)
        if not fits.all():
            graph.restrict(i, np.flatnonzero(fits))


def drop_loose_rows(graph: Graph) -> None:
    """Removes rows that no choice can exceed any more."""
    if not len(graph.room):
        return
    change = np.zeros(len(graph.room) + 1)
    for memory in graph.memory.values():
        most = memory.usage.max(axis=1)
        np.add.at(change, memory.starts, most)
        np.subtract.at(change, memory.ends, most)
    # The sums are enlarged so that rounding cannot hide a row that can be exceeded.
    high = np.cumsum(change)[:-1] * (1 + 1e-12) + graph.slack
    kept = np.flatnonzero(high > graph.room)
    if len(kept) == len(graph.room):
        return
    graph.rows, graph.room = graph.rows[kept], graph.room[kept]
    for i, memory in list(graph.memory.items()):
        starts = np.searchsorted(kept, memory.starts)
        ends = np.searchsorted(kept, memory.ends)
        live = starts < ends
        if live.any():
            graph.memory[i] = NodeMemory(starts[live], ends[live], memory.usage[live])
        else:
            del graph.memory[i]


def _range_minima(values: np.ndarray) -> list[np.ndarray]:
    """Returns the minima of all ranges whose length is a power of two."""
    lows, width = [values], 1
    while 2 * width <= len(values):
        lows.append(np.minimum(lows[-1][:-width], lows[-1][width:]))
        width *= 2
    return lows


def _range_min(
    lows: list[np.ndarray], starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    levels = np.frexp(ends - starts)[1] - 1
    result = np.empty(len(starts))
    for level in np.unique(levels):
        at = np.flatnonzero(levels == level)
        low, width = lows[level], 1 << int(level)
        result[at] = np.minimum(low[starts[at]], low[ends[at] - width])
    return result


def fold_followers(graph: Graph) -> None:
    """Folds followers into leaders until no node follows another."""
    while maps := _compose(_pick_leaders(graph)):
        _apply(graph, maps)


def follows(table: np.ndarray) -> np.ndarray | None:
    """Row -> the only column that it allows; None if some row allows several.

    >>> inf = np.inf
    >>> follows(np.array([[inf, 3.0], [1.0, inf], [inf, 0.0]])).tolist()
    [1, 0, 1]
    """
    finite = table < np.inf
    if np.count_nonzero(finite) > len(table):
        return None
    if (finite.sum(axis=1) > 1).any():
        return None
    return finite.argmax(axis=1)


def _pick_leaders(graph: Graph) -> dict[int, tuple[int, np.ndarray]]:
    """Follower -> (leader, strategy of the leader -> strategy of the follower)."""
    leader: dict[int, tuple[int, np.ndarray]] = {}
    root: dict[int, int] = {}
    for i, links in graph.links.items():
        for j, table in links.items():
            if i in leader or not _worthwhile(graph, i, j):
                continue
            if _find(root, j) == i:
                continue
            strategy = follows(table.T)
            if strategy is not None:
                leader[i] = (j, strategy)
                root[i] = j
    return leader


def _worthwhile(graph: Graph, follower: int, leader: int) -> bool:
    """Whether folding is worthwhile: it must not enlarge the tables of many links."""
    grows = len(graph.costs[leader]) > len(graph.costs[follower])
    return not grows or len(graph.links[follower]) <= 4


def _find(root: dict[int, int], node: int) -> int:
    end = node
    while end in root:
        end = root[end]
    while node != end:
        root[node], node = end, root[node]
    return end


def _compose(
    leader: dict[int, tuple[int, np.ndarray]],
) -> dict[int, tuple[int, np.ndarray]]:
    """Composes chains of leaders, so that every follower maps to a remaining node."""
    done: dict[int, tuple[int, np.ndarray]] = {}
    for node in leader:
        chain = [node]
        while (above := leader[chain[-1]][0]) in leader and above not in done:
            chain.append(above)
        for member in reversed(chain):
            if member in done:
                continue
            above, strategy = leader[member]
            if above in done:
                top, to_above = done[above]
                done[member] = (top, strategy[to_above])
            else:
                done[member] = (above, strategy)
    return done


def _apply(graph: Graph, maps: dict[int, tuple[int, np.ndarray]]) -> None:
    memory: dict[int, list[NodeMemory]] = {}
    for node, (top, strategy) in maps.items():
        graph.costs[top] = graph.costs[top] + graph.costs[node][strategy]
        if node in graph.memory:
            memory.setdefault(top, []).append(graph.memory[node].take(strategy))
    _move_links(graph, maps)
    for top, parts in memory.items():
        own = [graph.memory[top]] if top in graph.memory else []
        graph.memory[top] = sum_memories(own + parts)
    for node, (top, strategy) in maps.items():
        graph.drop_node(node, Follow(node, top, strategy))


def _move_links(graph: Graph, maps: dict[int, tuple[int, np.ndarray]]) -> None:
    for node in maps:
        for other, table in list(graph.links[node].items()):
            graph.drop_link(node, other)
            i, j, moved = _relink(node, other, table, maps)
            if i == j:
                graph.costs[i] = graph.costs[i] + np.diagonal(moved)
            else:
                graph.add_link(i, j, moved)


def _relink(
    node: int, other: int, table: np.ndarray, maps: dict[int, tuple[int, np.ndarray]]
) -> tuple[int, int, np.ndarray]:
    """Rewrites a link for the remaining nodes that its two nodes map to."""
    i, rows = maps[node]
    table = table[rows]
    if other not in maps:
        return i, other, table
    j, columns = maps[other]
    return i, j, table[:, columns]


Reduction = Callable[[Graph], None]

WORTHWHILE = 0.02
"""The last round is one that removes a smaller share of nodes, edges and strategies."""

REDUCTIONS: tuple[tuple[str, Reduction], ...] = (
    ("forbidden strategies", drop_infinite),
    ("certain memory", settle_memory),
    ("single-strategy nodes", drop_single),
    ("followers", fold_followers),
    ("unsupported strategies", drop_unsupported),
    ("certain memory", settle_memory),
    ("strategies over the limit", drop_oversized),
    ("certain memory", settle_memory),
    ("memory rows", drop_loose_rows),
    ("single-strategy nodes", drop_single),
    ("separable edges", drop_separable),
    ("low-degree nodes", eliminate_low_degree),
    ("dominated strategies", drop_dominated),
)

TIDYING: tuple[tuple[str, Reduction], ...] = (
    ("forbidden strategies", drop_infinite),
    ("certain memory", settle_memory),
    ("single-strategy nodes", drop_single),
)


def reduce_graph(
    graph: Graph, clock: Clock | None = None
) -> tuple[ReductionReport, ...]:
    """Reduces a graph in place; stops early when time runs out, still exact.

    Rounds end after a round that removes too little. At the end, no node has a strategy
    of infinite cost, a single strategy, or memory that all its strategies need.

    Raises:
        ContradictionError: no choice is possible.
    """
    totals = {name: (0, 0, 0) for name, _ in REDUCTIONS}
    small = False
    while not small and not (clock is not None and clock.out):
        before = _size(graph)
        _run(graph, REDUCTIONS if len(graph.rows) else REDUCTIONS[:-1], totals, clock)
        small = _is_small(before, _size(graph))
    before = None
    while before != _size(graph):
        before = _size(graph)
        _run(graph, TIDYING, totals)
    return tuple(
        ReductionReport(name=name, nodes=nodes, edges=edges, strategies=strategies)
        for name, (nodes, edges, strategies) in totals.items()
    )


def _run(
    graph: Graph,
    reductions: tuple[tuple[str, Reduction], ...],
    totals: dict[str, tuple[int, int, int]],
    clock: Clock | None = None,
) -> None:
    for name, reduction in reductions:
        if clock is not None and clock.out:
            return
        before = _size(graph)
        reduction(graph)
        nodes, edges, strategies = (
            b - a for b, a in zip(before, _size(graph), strict=True)
        )
        total = totals[name]
        totals[name] = (total[0] + nodes, total[1] + edges, total[2] + strategies)


def _is_small(before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    """Whether a round removed less than `WORTHWHILE` of nodes, links, strategies."""
    return all(a >= (1 - WORTHWHILE) * b for b, a in zip(before, after, strict=True))


def _size(graph: Graph) -> tuple[int, int, int]:
    return len(graph.costs), graph.num_links, graph.num_strategies


def build_graph(problem: ShardingProblem) -> Graph:
    """Copies a problem into a graph, and its memory limit into memory rows."""
    graph = Graph()
    for i, costs in enumerate(problem.node_costs):
        graph.add_node(i, costs.astype(np.float64))
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        if i == j:
            graph.costs[i] = graph.costs[i] + np.diagonal(table)
        else:
            graph.add_link(i, j, table)
    rows, graph.memory = find_rows(problem)
    graph.rows, graph.room, graph.slack = np.arange(len(rows)), rows.room, rows.slack
    return graph
