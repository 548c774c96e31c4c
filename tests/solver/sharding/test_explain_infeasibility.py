"""Tests that explanations of infeasibility name the time and the binding terms."""

import numpy as np
import pytest
from hypothesis import given, settings
from property_tests import examples
from sharding_problems import brute_force, problems

from autopar_solver import (
    MemoryTerm,
    ShardingProblem,
    Status,
    evaluate_choices,
    explain_infeasibility,
    solve,
)


def problem(limit):
    def term(node, start, end, *usage):
        return MemoryTerm(node=node, start=start, end=end, usage=np.array(usage))

    return ShardingProblem(
        name="three",
        node_costs=(np.zeros(2), np.array([0.0, np.inf]), np.zeros(1)),
        memory=(
            term(0, 0, 5, 7.0, 4.0),
            term(1, 3, 9, 6.0, 1.0),
            term(2, 4, 6, 5.0),
            term(2, 8, 8, 100.0),
        ),
        memory_limit=limit,
        fixed_memory=((4, 7, 2.0),),
    )


def test_explains_the_tightest_time():
    why = explain_infeasibility(problem(10.0))
    # At 4: 4 (frugal), 6 (the other is forbidden), 5, and 2 fixed.
    assert (why.time, why.least_peak, why.fixed, why.limit) == (4, 17.0, 2.0, 10.0)
    assert [(term.term, term.node, term.least) for term in why.terms] == [
        (1, 1, 6.0),
        (2, 2, 5.0),
        (0, 0, 4.0),
    ]
    assert why.proves_infeasible
    assert solve(problem(10.0)).status is Status.INFEASIBLE
    assert solve(problem(17.0)).status is Status.OPTIMAL


@pytest.mark.parametrize("limit", [17.0, None])
def test_not_infeasible(limit):
    assert not explain_infeasibility(problem(limit)).proves_infeasible


def test_nothing_live():
    why = explain_infeasibility(ShardingProblem(name="empty", node_costs=()))
    assert (why.least_peak, why.terms) == (0.0, ())


@settings(deadline=None)
@given(problems())
def test_proof_is_right(problem):
    if explain_infeasibility(problem).proves_infeasible:
        assert brute_force(problem) == np.inf


@settings(deadline=None)
@given(problems())
def test_the_peak_is_real(problem):
    """It is the sum of what every node takes at least then, and no time needs more."""
    why = explain_infeasibility(problem)

    def least_at(time):
        fixed = sum(f[2] for f in problem.fixed_memory if f[0] <= time < f[1])
        return fixed + sum(
            float(term.usage[np.isfinite(problem.node_costs[term.node])].min())
            for term in problem.memory
            if term.start <= time < term.end
        )

    assert why.least_peak == least_at(why.time)
    assert why.least_peak == max(map(least_at, range(10)))
    assert why.fixed + sum(term.least for term in why.terms) == why.least_peak


@settings(deadline=None)
@given(problems())
def test_terms_are_the_live_ones_the_largest_first(problem):
    why = explain_infeasibility(problem)
    sizes = [term.least for term in why.terms]
    assert sizes == sorted(sizes, reverse=True)
    for term in why.terms:
        found = problem.memory[term.term]
        assert found.node == term.node
        assert found.start <= why.time < found.end
        assert term.least in found.usage


@settings(max_examples=examples(30), deadline=None)
@given(problems(max_nodes=4))
def test_no_choice_stays_below_the_least_peak(problem):
    why = explain_infeasibility(problem)
    for choices in np.ndindex(*problem.num_strategies):
        found = evaluate_choices(problem, choices)
        assert found.cost == np.inf or found.peak >= why.least_peak
