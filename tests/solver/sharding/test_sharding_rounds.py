"""Tests that rounds close the gap from any start, and prove only true bounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import brute_force, ladder, problems
from solver_fields import graph_of_problem

from autopar_solver import ShardingProblem, evaluate_choices
from autopar_solver.clock import Clock
from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import ProgramAnswer
from autopar_solver.sharding import rounds
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.reductions.pipeline import reduce_graph
from autopar_solver.sharding.rounds import Incumbent, close_gap

HIGHS = backend_of("highs")


def rounds_of(problem, backend=HIGHS, seconds=None, choices=None):
    """The rounds of a problem, after the reductions."""
    incumbent = Incumbent(problem, gap=0.0)
    if choices is not None:
        incumbent.offer(choices)
    graph = graph_of_problem(problem)
    try:
        reduce_graph(graph)
    except ContradictionError:
        return None
    clock = Clock(0.0, None)
    close_gap(
        graph, incumbent, clock if seconds is None else clock.within(seconds), backend
    )
    return incumbent


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(max_nodes=6, max_edges=12), st.integers(0, 10**6))
def test_any_start_ends_at_the_optimum(problem, seed):
    random = np.random.default_rng(seed)
    start = [int(random.integers(size)) for size in problem.num_strategies]
    incumbent = rounds_of(problem, choices=start)
    best = brute_force(problem)
    if incumbent is None:
        assert math.isinf(best)
        return
    assert incumbent.cost == best
    assert incumbent.bound <= best + 1e-9
    assert incumbent.is_proved or math.isinf(best)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", [0, 3])
def test_bounds_are_true_whenever_time_is_out(seed, seconds):
    """Stopped after any amount of counted work, choices are valid and bounds hold."""
    problem = ladder(seed, length=8, strategies=5, tightness=0.5)
    best = rounds_of(problem).cost
    incumbent = rounds_of(problem, seconds=seconds)
    assert incumbent.bound <= best + 1e-9
    assert incumbent.cost >= best - 1e-9
    if incumbent.choices is not None:
        found = evaluate_choices(problem, incumbent.choices.tolist())
        assert (found.cost, found.peak <= problem.memory_limit) == (
            incumbent.cost,
            True,
        )


def test_no_integer_program_is_needed_where_bounds_meet():
    """Without a limit on memory messages and elimination alone prove a ladder."""

    def unused(program, stop, start):
        raise AssertionError("the integer program was asked")

    problem = ladder(1, length=6, strategies=4, tightness=None)
    assert rounds_of(problem, unused).is_proved


def test_a_backend_that_answers_nothing_costs_no_truth():
    """The rounds go on with bounds and moves until their time is out."""

    def nothing(program, stop, start):
        return ProgramAnswer(None, -math.inf, False)

    problem = ladder(0, length=8, strategies=5, tightness=0.5)
    best = rounds_of(problem).cost
    incumbent = rounds_of(problem, nothing, seconds=2.0)
    assert incumbent.bound <= best + 1e-9
    assert incumbent.cost >= best - 1e-9


def test_what_is_proved_is_left_alone():
    problem = ladder(1, length=4, strategies=3, tightness=None)
    incumbent = rounds_of(problem)
    graph = graph_of_problem(problem)
    before = len(graph.trail)
    close_gap(graph, incumbent, Clock(0.0, None), HIGHS)
    assert len(graph.trail) == before


class _Asked(Exception):
    """Raised by a back end that is asked to solve a program."""


def dense_problem(nodes: int, strategies: int) -> ShardingProblem:
    """Half of all pairs of nodes have costs; elimination would take too much memory."""
    random = np.random.default_rng(0)
    edges = [(i, j) for i in range(nodes) for j in range(i) if random.random() < 0.5]
    return ShardingProblem(
        name="dense",
        node_costs=tuple(random.random(strategies) for _ in range(nodes)),
        edges=tuple(edges),
        edge_costs=tuple(random.random((strategies, strategies)) for _ in edges),
        memory=(),
        memory_limit=None,
        fixed_memory=(),
    )


def test_a_large_field_gets_a_program_where_time_has_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its rounds would never end."""

    def ask(*_: object, **__: object) -> ProgramAnswer:
        raise _Asked

    monkeypatch.setattr(rounds, "solve_field", ask)
    monkeypatch.setattr(rounds, "PROGRAM_PAIRS", 0)
    monkeypatch.setattr(rounds, "LONG_SLICE", 0.2)
    # Nothing else helps: no smaller problem, and no elimination.
    monkeypatch.setattr(rounds, "NARROW_PARTS", ())
    monkeypatch.setattr(rounds, "WORK_PER_SECOND", 0)
    with pytest.raises(_Asked):
        rounds_of(dense_problem(12, 4))
