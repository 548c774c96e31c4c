"""Tests solutions of all sorts of sharding problems by brute force."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from property_tests import examples
from sharding_problems import brute_force, ladder, problems, random_problem

from autopar_solver import MemoryTerm, ShardingProblem, Status, solve
from autopar_solver.sharding.problem import check_solution, evaluate_choices


def assert_best(problem, solution):
    check_solution(problem, solution)
    best = brute_force(problem)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.bound == math.inf
    else:
        assert solution.status is Status.OPTIMAL
        assert math.isclose(solution.cost, best, rel_tol=1e-9, abs_tol=1e-300)
        assert solution.bound <= best + 1e-9 * abs(best)


@settings(max_examples=examples(300), deadline=None)
@given(problems())
def test_matches_brute_force_within_memory(problem):
    assert_best(problem, solve(problem, gap=0.0))


@settings(max_examples=examples(150), deadline=None)
@given(problems(memory=False, max_edges=14))
def test_matches_brute_force_without_memory(problem):
    assert_best(problem, solve(problem, gap=0.0))


@settings(max_examples=examples(60), deadline=None)
@given(problems(max_edges=14, max_nodes=7, max_strategies=4))
def test_default_gap(problem):
    """Within 1e-4 of the best, and never a bound above it."""
    solution = solve(problem)
    check_solution(problem, solution)
    best = brute_force(problem)
    assert math.isinf(best) == (solution.status is Status.INFEASIBLE)
    if not math.isinf(best):
        assert solution.cost <= best * (1 + 1e-4) + 1e-12
        assert solution.bound <= best + 1e-9 * abs(best)


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1.0, 1e11])
@pytest.mark.parametrize("seed", range(8))
def test_any_scale(scale, seed):
    """Seconds of 1e-9 and contest costs of 1e11 are solved alike."""
    problem = random_problem(seed, scale=scale, max_edges=12)
    assert_best(problem, solve(problem, gap=0.0))


@pytest.mark.parametrize("seed", range(10))
def test_negative_costs(seed):
    problem = random_problem(seed, max_edges=12)
    shifted = dataclasses.replace(
        problem, node_costs=tuple(costs - 30.0 for costs in problem.node_costs)
    )
    assert_best(shifted, solve(shifted, gap=0.0))


@pytest.mark.parametrize("seed", range(4))
def test_cbc_agrees(seed):
    problem = ladder(seed, length=4, strategies=4, tightness=0.5)
    highs = solve(problem, gap=0.0)
    cbc = solve(problem, gap=0.0, backend="cbc")
    check_solution(problem, cbc)
    assert math.isclose(highs.cost, cbc.cost, rel_tol=1e-9)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend 'glop'"):
        solve(random_problem(0), backend="glop")


@pytest.mark.parametrize("seed", range(20))
def test_warm_start_is_never_worsened(seed):
    """Even without any time, a valid start comes back or something better."""
    problem = random_problem(seed, max_nodes=6, max_edges=12, forbidden=0.0)
    best = solve(problem, gap=0.0)
    if not best.choices:
        return
    for seconds in (0.0, None):
        again = solve(problem, gap=0.0, warm_start=best.choices, seconds=seconds)
        check_solution(problem, again)
        assert again.cost <= best.cost
    assert again.status is Status.OPTIMAL


def test_invalid_warm_start_is_ignored():
    usage = np.array([2.0, 0.0])
    problem = ShardingProblem(
        name="one",
        node_costs=(np.array([1.0, 5.0]),),
        memory=(MemoryTerm(node=0, start=0, end=1, usage=usage),),
        memory_limit=1.0,
    )
    assert solve(problem, warm_start=(0,)).choices == (1,)
    with pytest.raises(ValueError, match="2 choices for 1 nodes"):
        solve(problem, warm_start=(0, 0))


def test_memory_limit_is_exact():
    """One unit decides; the limit itself may be reached."""
    usages = [np.array([float(2**40 + i), 1.0]) for i in range(4)]
    problem = ShardingProblem(
        name="exact",
        node_costs=tuple(np.array([0.0, 1.0 + 0.1 * i]) for i in range(4)),
        memory=tuple(
            MemoryTerm(node=i, start=0, end=1, usage=usage)
            for i, usage in enumerate(usages)
        ),
        memory_limit=float(2 * 2**40 + 5 + 2),
    )
    solution = solve(problem, gap=0.0)
    assert_best(problem, solution)
    assert evaluate_choices(problem, solution.choices).peak == problem.memory_limit
    less = dataclasses.replace(problem, memory_limit=problem.memory_limit - 1)
    assert_best(less, solve(less, gap=0.0))


def test_zero_and_missing_limits():
    problem = random_problem(5)
    free = dataclasses.replace(problem, memory_limit=None)
    assert_best(free, solve(free, gap=0.0))
    none = dataclasses.replace(problem, memory_limit=0.0)
    assert_best(none, solve(none, gap=0.0))


def test_no_nodes():
    empty = ShardingProblem(name="empty", node_costs=())
    solution = solve(empty)
    assert (solution.choices, solution.cost, solution.status) == (
        (),
        0.0,
        Status.OPTIMAL,
    )


@pytest.mark.parametrize("tightness", [None, 0.4])
def test_same_input_same_plan(tightness):
    problem = ladder(1, length=8, strategies=6, tightness=tightness)
    first, second = solve(problem), solve(problem)
    assert first.choices == second.choices
    assert first.bound == second.bound


def test_infeasible_combination():
    """Every pair is possible on its own, all together are not."""
    inf = np.inf
    differ = np.array([[inf, 0.0], [0.0, inf]])
    triangle = ShardingProblem(
        name="triangle",
        node_costs=tuple(np.zeros(2) for _ in range(3)),
        edges=((0, 1), (1, 2), (2, 0)),
        edge_costs=(differ, differ, differ),
    )
    solution = solve(triangle)
    assert solution.status is Status.INFEASIBLE
    assert solution.choices == ()


def test_dense_ladder_is_proved():
    """200 nodes with 40 strategies, dense tables, no limit: seconds at most."""
    problem = ladder(0, length=100, strategies=40, tightness=None)
    solution = solve(problem, seconds=60)
    check_solution(problem, solution)
    assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_time_limit_is_kept(seconds):
    problem = ladder(2, length=60, strategies=30, tightness=0.3)
    solution = solve(problem, seconds=seconds, gap=0.0)
    check_solution(problem, solution)
    # Generous: the test must pass on a busy machine.
    assert solution.seconds < seconds + 10.0


def test_many_terms_with_shared_usage():
    """Ninety-six repeats of a layer's live values cost time only once."""
    random = np.random.default_rng(0)
    usages = [random.integers(1, 50, 8).astype(np.float64) for _ in range(40)]
    terms = tuple(
        MemoryTerm(node=i, start=97 * i + repeat, end=97 * i + 150, usage=usage)
        for i, usage in enumerate(usages)
        for repeat in range(96)
    )
    problem = ShardingProblem(
        name="repeats",
        node_costs=tuple(1.0 / usage for usage in usages),
        edges=tuple((i, i + 1) for i in range(39)),
        edge_costs=tuple(random.random((8, 8)) * 0.01 for _ in range(39)),
        memory=terms,
        memory_limit=3000.0,
    )
    solution = solve(problem, seconds=20)
    check_solution(problem, solution)
    assert solution.status is Status.OPTIMAL
