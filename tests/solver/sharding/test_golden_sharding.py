"""Compares bounds, prices and work of the sharding solver with golden files.

A changed search can reach the same optimum and be slower or weaker on other problems.
So the golden files also contain the steps of the search. Without a time limit the steps
depend only on the problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from figures import arrays_of, digest, digest_all, row
from golden import assert_golden
from sharding_problems import ladder, random_problem

from autopar_solver import MemoryTerm, ShardingProblem, explain_infeasibility, solve
from autopar_solver.clock import Clock
from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import StopCriteria
from autopar_solver.sharding import rounds
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.exact import build_program, exclusion_cut, memory_cut
from autopar_solver.sharding.exact import solve_field as solve_exactly
from autopar_solver.sharding.field import Field, flatten
from autopar_solver.sharding.graph import ContradictionError, Graph
from autopar_solver.sharding.moves.neighbourhood import (
    NeighbourhoodSearch,
    Position,
    mend,
    polish,
)
from autopar_solver.sharding.problem import evaluate_choices
from autopar_solver.sharding.reductions import pipeline
from autopar_solver.sharding.rounds import Incumbent

HIGHS = backend_of("highs")
OFFER, PROOF, TICK = 1.0, 2.0, 3.0
REDUCTIONS = (
    pipeline.drop_infinite,
    pipeline.drop_unsupported,
    pipeline.settle_memory,
    pipeline.drop_oversized,
    pipeline.drop_loose_rows,
    pipeline.drop_separable,
    pipeline.fold_followers,
    pipeline.drop_single,
    pipeline.drop_dominated,
    pipeline.eliminate_low_degree,
)


def grid(seed: int, side: int, tightness: float | None) -> ShardingProblem:
    """Nodes in a square grid, which elimination of low-degree nodes cannot solve."""
    random = np.random.default_rng(seed)
    nodes = side * side
    edges = [(i, i + 1) for i in range(nodes) if (i + 1) % side]
    edges += [(i, i + side) for i in range(nodes - side)]
    usages = random.integers(1, 1000, (nodes, 4)).astype(float)
    terms = tuple(
        MemoryTerm(node=i, start=i, end=i + 5, usage=usage)
        for i, usage in enumerate(usages)
    )
    peak = sum(usage.max() for usage in usages[:5])
    return ShardingProblem(
        name=f"grid-{seed}",
        node_costs=tuple(random.random(4) for _ in range(nodes)),
        edges=tuple(edges),
        edge_costs=tuple(random.random((4, 4)) for _ in edges),
        memory=() if tightness is None else terms,
        memory_limit=None if tightness is None else float(int(tightness * peak)),
    )


def problems() -> list[ShardingProblem]:
    small = [
        random_problem(seed, max_nodes=10, max_strategies=5, max_edges=18, scale=0.37)
        for seed in range(24)
    ]
    free = [
        random_problem(seed, max_nodes=24, max_strategies=5, max_edges=60, memory=False)
        for seed in range(3)
    ]
    tight = [
        ladder(seed, length=5, strategies=4, tightness=tightness)
        for seed, tightness in enumerate((0.4, 0.5, 0.6, 0.7, None))
    ]
    return [*small, *free, *tight, grid(0, 4, None), grid(1, 4, 0.7)]


@contextlib.contextmanager
def noted(log: list[tuple[float, ...]]) -> Iterator[None]:
    """Appends offered solutions, proved bounds and counted work to the log."""
    offer, prove, tick = Incumbent.offer, Incumbent.prove, Clock.tick

    def noted_offer(self: Incumbent, choices: Any) -> bool:
        taken = offer(self, choices)
        log.append((OFFER, float(taken), self.cost))
        return taken

    def noted_proof(self: Incumbent, bound: float) -> None:
        prove(self, bound)
        log.append((PROOF, self.bound))

    def noted_tick(self: Clock, seconds: float) -> None:
        tick(self, seconds)
        log.append((TICK, seconds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incumbent, "offer", noted_offer)
        patch.setattr(Incumbent, "prove", noted_proof)
        patch.setattr(Clock, "tick", noted_tick)
        yield


def solution_lines(problem: ShardingProblem, **options: Any) -> Iterator[str]:
    log: list[tuple[float, ...]] = []
    with noted(log):
        found = solve(problem, **options)
    yield row(
        "solution",
        status=found.status.name,
        cost=found.cost,
        bound=found.bound,
        choices=digest(found.choices),
        steps=len(log),
        order=digest([kind for kind, *_ in log]),
        offered=digest_all(x for kind, *x in log if kind == OFFER),
        proved=digest_all(x for kind, *x in log if kind == PROOF),
        work=digest_all(x for kind, *x in log if kind == TICK),
    )
    removed = [(r.nodes, r.edges, r.strategies) for r in found.reductions]
    yield row("reductions", rounds=len(removed), removed=digest_all(removed))


def graph_figures(graph: Graph) -> dict[str, object]:
    return {
        "nodes": len(graph.costs),
        "links": graph.num_links,
        "constant": graph.constant,
        "costs": digest_all(graph.costs.values()),
        "tables": digest_all(t for own in graph.links.values() for t in own.values()),
        "room": digest(graph.room),
        "usage": digest_all(m.usage for m in graph.memory.values()),
    }


def reduction_lines(problem: ShardingProblem) -> Iterator[str]:
    graph = pipeline.build_graph(problem)
    for reduce in REDUCTIONS:
        try:
            reduce(graph)
        except ContradictionError:
            yield row(reduce.__name__, contradiction=True)
            return
        yield row(reduce.__name__, graph_figures(graph))


def dual_lines(problem: ShardingProblem) -> Iterator[str]:
    graph = pipeline.build_graph(problem)
    try:
        pipeline.drop_infinite(graph)
        pipeline.drop_unsupported(graph)
        pipeline.settle_memory(graph)
    except ContradictionError:
        return
    if not graph.costs:
        return
    field = flatten(graph)
    yield row(
        "field",
        pairs=field.num_pairs,
        forbidden=field.forbidden,
        slack=field.memory.slack,
        usage=digest(field.memory.usage),
        spans=digest_all((field.memory.starts, field.memory.ends)),
    )
    dual = Dual(field)
    upper = float(np.abs(field.costs[field.costs < np.inf]).sum()) + 10.0
    for name, turns in (("sweep", 0), ("ascent", 12), ("deepened", 12), ("light", 3)):
        if name == "deepened" and not dual.deepen(30, 5000):
            yield row(name, too_large=True)
            continue
        if name == "light":
            dual.lighten()
        if not turns:
            dual.sweep()
        for _ in range(turns):
            dual.ascend(upper)
        yield row(
            name,
            bound=dual.bound,
            bounds=digest(dual.bounds),
            prices=digest(dual.prices),
            best=digest(dual.best_prices),
            rises=digest(dual.rises),
            use=digest(dual.expected_use(0.5)),
            bucket=digest(
                dual.bucket_choices if dual.bucket_choices is not None else 0
            ),
            seconds=dual.step_seconds,
        )
    yield from move_lines(field, dual)


def move_lines(field: Field, dual: Dual) -> Iterator[str]:
    """Lines of each move from decoded choices: repair, descent, parts and a program."""
    for backward in (False, True):
        choices = dual.messages.decode(dual.costs, backward=backward)
        position = Position(field, choices, dual.messages.links)
        fits = mend(position, dual.costs, 60)
        mended = position.choices.copy()
        if fits:
            polish(position)
        yield row(
            "moves",
            decoded=digest(choices),
            fits=fits,
            mended=digest(mended),
            polished=digest(position.choices),
            local=digest(position.local),
            used=digest(position.used),
            cost=field.cost(position.choices),
        )
    if fits:
        clock = Clock(0.0, None).within(0.3)
        search = NeighbourhoodSearch(dual, HIGHS)
        found = search.improve(position.choices, np.inf, clock)
        yield row(
            "parts",
            cost=field.cost(found),
            choices=digest(found),
            pairs=search.pairs,
            work=clock.now,
        )
    first = tuple(range(min(2, len(field.memory.room))))
    cuts = [memory_cut(field, r) for r in first]
    cuts += [exclusion_cut(field, r, mended) for r in first]
    program = build_program(field, 2.0, cuts)
    answer = solve_exactly(field, HIGHS, StopCriteria(None, 1e-6, np.inf, 500), first)
    yield row(
        "program",
        **arrays_of(program),
        cost=answer.cost,
        bound=answer.bound,
        finished=answer.finished,
        broken=answer.rows,
    )


def infeasible_lines(problem: ShardingProblem) -> Iterator[str]:
    found = explain_infeasibility(problem)
    yield row(
        "memory",
        time=found.time,
        peak=found.least_peak,
        fixed=found.fixed,
        proves=found.proves_infeasible,
        terms=digest_all((t.term, t.node, t.least) for t in found.terms),
    )
    zeros = evaluate_choices(problem, [0] * len(problem.node_costs))
    yield row("zeros", cost=zeros.cost, peak=zeros.peak)


def test_searches() -> None:
    lines: list[str] = []
    for problem in problems():
        lines += ["", problem.name, *solution_lines(problem)]
        lines += [*infeasible_lines(problem), *reduction_lines(problem)]
        lines += dual_lines(problem)

    assert_golden("\n".join(lines).strip(), "searches/sharding.txt")


def test_searches_of_large_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done where a field is too large for a program, on small fields."""
    monkeypatch.setattr(rounds, "PROGRAM_PAIRS", 600)
    monkeypatch.setattr(rounds, "NARROW_PAIRS", 400)
    lines: list[str] = []
    for seed, tightness in enumerate((None, None, 0.6, 0.7)):
        problem = grid(seed, 5, tightness)
        start = evaluate_choices(problem, [0] * len(problem.node_costs))
        lines += ["", problem.name]
        lines += solution_lines(problem, gap=0.05)
        lines += solution_lines(problem, gap=0.05, below=0.7 * start.cost)

    assert_golden("\n".join(lines).strip(), "searches/large_sharding.txt")
