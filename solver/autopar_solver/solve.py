"""Solving a problem."""

import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.check import evaluate
from autopar_solver.field import flatten
from autopar_solver.graph import ContradictionError
from autopar_solver.ilp.backend import BackendName, Limits, backend
from autopar_solver.ilp.solve import solve_field
from autopar_solver.problem import ShardingProblem
from autopar_solver.reductions.build import build_graph
from autopar_solver.reductions.pipeline import reduce_graph
from autopar_solver.solution import Solution, Status


def solve(
    problem: ShardingProblem,
    *,
    seconds: float | None = None,
    gap: float = 1e-4,
    warm_start: Sequence[int] | None = None,
    backend: BackendName = "highs",
) -> Solution:
    """First version: reductions, then the integer program."""
    begin = time.monotonic()
    return _solve(problem, begin, seconds, gap, warm_start, backend)


def _solve(problem, begin, seconds, gap, warm_start, name):  # noqa
    best, best_cost = None, math.inf
    if warm_start is not None:
        found = evaluate(problem, warm_start)
        if problem.memory_limit is None or found.peak <= problem.memory_limit:
            best, best_cost = tuple(int(x) for x in warm_start), found.cost
            if best_cost == math.inf:
                best = None
    graph = build_graph(problem)
    reports = ()
    bound = -math.inf
    try:
        reports = reduce_graph(graph)
    except ContradictionError:
        return Solution(
            choices=(), cost=math.inf, bound=math.inf, status=Status.INFEASIBLE,
            seconds=time.monotonic() - begin, reductions=reports,
        )
    field = flatten(graph)
    choices = np.zeros(len(problem.node_costs), np.int64)
    if field.num_nodes:
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        answer = solve_field(field, backend(name), Limits(left, 0.0))
        bound = answer.bound
        if answer.choices is None:
            status = Status.INFEASIBLE if answer.finished else Status.UNKNOWN
            if best is None:
                return Solution(choices=(), cost=math.inf, bound=math.inf if answer.finished else bound, status=status, seconds=time.monotonic() - begin, reductions=reports)
        else:
            choices[list(field.nodes)] = answer.choices
    if not field.num_nodes or answer.choices is not None:
        choices = graph.expand(choices)
        found = evaluate(problem, choices)
        if not field.num_nodes:
            bound = found.cost
        if found.cost < best_cost:
            best, best_cost = tuple(choices.tolist()), found.cost
    bound = min(bound, best_cost)
    status = Status.OPTIMAL if best_cost - bound <= gap * abs(best_cost) else Status.FEASIBLE
    return Solution(choices=best, cost=best_cost, bound=bound, status=status, seconds=time.monotonic() - begin, reductions=reports)
