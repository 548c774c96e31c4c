"""Tests the checker, which computes cost and peak by definition."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_problems import problems, random_problem

from autopar_solver import MemoryTerm, ShardingProblem, Solution, Status
from autopar_solver.sharding.problem import (
    check_solution,
    evaluate_choices,
    memory_profile,
    usage_over_time,
)


def by_definition(problem, choices):
    """Cost and peak by the formula, computed at one time after another."""
    cost = sum(float(c[k]) for c, k in zip(problem.node_costs, choices, strict=True))
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        cost += float(table[choices[i], choices[j]])
    peak = 0.0
    for time in range(10):
        used = sum(
            term.usage[choices[term.node]]
            for term in problem.memory
            if term.start <= time < term.end
        )
        used += sum(f[2] for f in problem.fixed_memory if f[0] <= time < f[1])
        peak = max(peak, float(used))
    return cost, peak


@settings(deadline=None)
@given(problems(), st.integers(0, 10**6))
def test_evaluates_by_definition(problem, seed):
    random = np.random.default_rng(seed)
    choices = [int(random.integers(size)) for size in problem.num_strategies]
    found = evaluate_choices(problem, choices)
    assert (found.cost, found.peak) == by_definition(problem, choices)


def test_peak_time_is_the_first():
    terms = tuple(
        MemoryTerm(node=0, start=start, end=start + 2, usage=np.array([3.0]))
        for start in (4, 1)
    )
    problem = ShardingProblem(
        name="two", node_costs=(np.zeros(1),), memory=terms, memory_limit=3.0
    )
    assert evaluate_choices(problem, [0]).peak_time == 1
    times, usage = memory_profile(problem, [0])
    assert dict(zip(times.tolist(), usage.tolist(), strict=True)) == {
        1: 3.0,
        3: 0.0,
        4: 3.0,
        6: 0.0,
    }


def test_profile_does_not_drift():
    """A huge amount that comes and goes leaves no error behind."""
    starts = np.array([0, 1, 2])
    ends = np.array([9, 2, 9])
    _, usage = usage_over_time(starts, ends, np.array([3.0, 2.0**62, 5.0]))
    assert usage[2] == 8.0


@pytest.mark.parametrize("choices", [[0], [0, 0, 0], [0, 1], [2, 0], [-1, 0]])
def test_rejects_choices(choices):
    problem = ShardingProblem(name="p", node_costs=(np.zeros(2), np.zeros(1)))
    with pytest.raises(ValueError, match=r"p: .*(choices for|has no strategy)"):
        evaluate_choices(problem, choices)


def solution(**changes):
    fields = {
        "choices": (0,),
        "cost": 1.0,
        "bound": 1.0,
        "status": Status.OPTIMAL,
        "seconds": 0.0,
    }
    return Solution(**(fields | changes))


def test_check_solution():
    usage = np.array([2.0, 0.0])
    problem = ShardingProblem(
        name="one",
        node_costs=(np.array([1.0, np.inf]),),
        memory=(MemoryTerm(node=0, start=0, end=1, usage=usage),),
        memory_limit=2.0,
    )
    check_solution(problem, solution())
    check_solution(problem, solution(choices=(), cost=np.inf, status=Status.INFEASIBLE))
    tight = dataclasses.replace(problem, memory_limit=1.0)
    for bad, message in [
        (solution(cost=2.0), "cost 1.0, not 2.0"),
        (solution(bound=2.0), "bound 2.0 above"),
        (solution(choices=(1,)), "forbidden"),
        (solution(status=Status.UNKNOWN), "but has choices"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_solution(problem, bad)
    with pytest.raises(ValueError, match=r"memory 2\.0 at time 0 is over"):
        check_solution(tight, solution())


def test_gap():
    assert solution(cost=4.0, bound=3.0).gap == 0.25
    assert solution(cost=-4.0, bound=-5.0).gap == 0.25
    assert solution(cost=0.0, bound=0.0).gap == 0.0


def test_random_problem_is_reproducible():
    assert random_problem(3).edges == random_problem(3).edges
