"""Tests that the incumbent only improves, and that its cost and bound are correct."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import problems

from autopar_solver import MemoryTerm, ShardingProblem, evaluate_choices
from autopar_solver.sharding.rounds import Incumbent


def one_node(*costs, usage=None, limit=None):
    """A problem of one node with these strategies; the usage is live at one time."""
    memory = ()
    if usage is not None:
        memory = (MemoryTerm(node=0, start=0, end=1, usage=np.array(usage)),)
    return ShardingProblem(
        name="one",
        node_costs=(np.array(costs, np.float64),),
        memory=memory,
        memory_limit=limit,
    )


def test_nothing_is_known_at_first():
    incumbent = Incumbent(one_node(1.0, 2.0), gap=0.1)
    assert incumbent.choices is None
    assert (incumbent.cost, incumbent.bound) == (math.inf, -math.inf)
    assert (incumbent.tolerance, incumbent.cutoff) == (0.0, math.inf)
    assert not incumbent.is_proved


def test_only_better_valid_choices_are_taken():
    problem = one_node(1.0, 2.0, 3.0, math.inf, usage=[9.0, 1.0, 1.0, 1.0], limit=5.0)
    incumbent = Incumbent(problem, gap=0.0)
    assert not incumbent.offer([0]), "over the memory limit"
    assert not incumbent.offer([3]), "forbidden"
    assert incumbent.offer([2])
    assert incumbent.offer([1])
    assert not incumbent.offer([2]), "worse"
    assert not incumbent.offer([1]), "the same"
    assert (incumbent.choices.tolist(), incumbent.cost) == ([1], 2.0)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(max_nodes=4), st.integers(0, 10**6))
def test_the_best_offer_stays(problem, seed):
    random = np.random.default_rng(seed)
    incumbent = Incumbent(problem, gap=0.0)
    best = math.inf
    for _ in range(12):
        choices = [int(random.integers(size)) for size in problem.num_strategies]
        found = evaluate_choices(problem, choices)
        valid = found.peak <= problem.memory_limit
        assert incumbent.offer(choices) == (valid and found.cost < best)
        best = min(best, found.cost if valid else math.inf)
        assert incumbent.cost == best
        if incumbent.choices is not None:
            again = evaluate_choices(problem, incumbent.choices.tolist())
            assert again.cost == best


def test_the_bound_rises_and_stays_below_the_cost():
    incumbent = Incumbent(one_node(4.0), gap=0.0)
    incumbent.offer([0])
    for bound, expected in [(1.0, 1.0), (0.5, 1.0), (3.0, 3.0), (9.0, 4.0)]:
        incumbent.prove(bound)
        assert incumbent.bound == expected
    assert incumbent.is_proved


@pytest.mark.parametrize(("gap", "bound"), [(0.5, 5.0), (0.1, 9.0), (0.0, 10.0)])
def test_proved_is_within_the_gap(gap, bound):
    incumbent = Incumbent(one_node(10.0), gap)
    incumbent.offer([0])
    incumbent.prove(bound - 0.01)
    assert not incumbent.is_proved
    incumbent.prove(bound)
    assert incumbent.is_proved


def test_cutoff_leaves_part_of_the_gap():
    """What costs less than the cutoff is better by most of what the gap allows."""
    incumbent = Incumbent(one_node(10.0), gap=0.1)
    incumbent.offer([0])
    assert incumbent.tolerance == 1.0
    assert incumbent.cutoff == pytest.approx(10.0 - 0.9)


def test_rounding_is_always_allowed():
    """A billionth of the cost, or of the smallest cost where the sum is zero."""
    incumbent = Incumbent(one_node(8.0), gap=0.0)
    incumbent.offer([0])
    assert incumbent.tolerance == 8e-9
    zero = Incumbent(one_node(0.0, 3.0, -5.0), gap=0.0)
    zero.offer([0])
    assert zero.unit == 3.0
    assert zero.tolerance == pytest.approx(3e-9)


def test_unit_of_no_costs_is_zero():
    assert Incumbent(one_node(0.0, math.inf), gap=0.0).unit == 0.0


def test_a_fork_proves_for_itself():
    incumbent = Incumbent(one_node(5.0, 4.0), gap=0.0)
    incumbent.offer([0])
    incumbent.prove(2.0)
    fork = incumbent.fork()
    assert (fork.cost, fork.bound) == (5.0, -math.inf)
    fork.offer([1])
    fork.prove(4.0)
    assert (incumbent.cost, incumbent.bound) == (5.0, 2.0)
