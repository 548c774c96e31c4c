"""All reductions in turn, until none finds anything."""

import time
from collections.abc import Callable

from autopar_solver.graph import Graph
from autopar_solver.reductions.capacity import (
    drop_loose_rows,
    drop_oversized,
    settle_memory,
)
from autopar_solver.reductions.dominated import drop_dominated
from autopar_solver.reductions.followers import fold_followers
from autopar_solver.reductions.forbidden import (
    drop_infinite,
    drop_single,
    drop_unsupported,
)
from autopar_solver.reductions.low_degree import eliminate_low_degree
from autopar_solver.reductions.separable import drop_separable
from autopar_solver.solution import ReductionReport

REDUCTIONS: tuple[tuple[str, Callable[[Graph], None]], ...] = (
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


def reduce_graph(
    graph: Graph, deadline: float | None = None
) -> tuple[ReductionReport, ...]:
    """Reduces a graph in place; stops early, still exact, at the deadline.

    Raises:
        ContradictionError: no choice is possible.
    """
    totals = {name: (0, 0, 0) for name, _ in REDUCTIONS}
    changed = True
    while changed:
        before_round = _size(graph)
        for name, reduction in REDUCTIONS:
            if deadline is not None and time.monotonic() > deadline:
                return _reports(totals)
            before = _size(graph)
            reduction(graph)
            after = _size(graph)
            totals[name] = tuple(
                t + b - a for t, b, a in zip(totals[name], before, after, strict=True)
            )
        changed = _size(graph) != before_round
    return _reports(totals)


def _size(graph: Graph) -> tuple[int, int, int]:
    return len(graph.costs), graph.num_links, graph.num_strategies


def _reports(
    totals: dict[str, tuple[int, int, int]],
) -> tuple[ReductionReport, ...]:
    return tuple(
        ReductionReport(name=name, nodes=nodes, edges=edges, strategies=strategies)
        for name, (nodes, edges, strategies) in totals.items()
    )
