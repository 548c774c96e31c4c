"""Runs all reductions in turn, until a round finds too little."""

from collections.abc import Callable

from autopar_solver.clock import Clock
from autopar_solver.sharding.graph import Graph
from autopar_solver.sharding.reductions.capacity import (
    drop_loose_rows,
    drop_oversized,
    settle_memory,
)
from autopar_solver.sharding.reductions.dominated import drop_dominated
from autopar_solver.sharding.reductions.followers import fold_followers
from autopar_solver.sharding.reductions.forbidden import (
    drop_infinite,
    drop_single,
    drop_unsupported,
)
from autopar_solver.sharding.reductions.low_degree import eliminate_low_degree
from autopar_solver.sharding.reductions.separable import drop_separable
from autopar_solver.sharding.solution import ReductionReport

Reduction = Callable[[Graph], None]

WORTHWHILE = 0.02
"""A round that removes a smaller share of nodes, edges and strategies is the last."""

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
    """Reduces a graph in place; stops early, still exact, when the clock is out.

    Rounds end when one removes too little; what is left is then tidied, so that no
    node has an infinite cost, a single strategy or memory that is certain.

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
    """Whether a round removed less than a small share of everything."""
    return all(a >= (1 - WORTHWHILE) * b for b, a in zip(before, after, strict=True))


def _size(graph: Graph) -> tuple[int, int, int]:
    return len(graph.costs), graph.num_links, graph.num_strategies
