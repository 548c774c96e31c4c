"""Tests that elimination bounds every strategy, exactly if no bucket is split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import ladder, problems
from solver_fields import UNLIMITED, field_of, minima
from solver_graphs import graph_of

from autopar_solver.sharding.bounds.dual import TooLargeError, mini_bucket_bounds
from autopar_solver.sharding.bounds.message_passing import MessagePassing
from autopar_solver.sharding.field import flatten


@settings(max_examples=examples(60), deadline=None)
@given(
    problems(memory=False, max_nodes=6, max_strategies=3, max_edges=14),
    st.sampled_from([1, 4, 9, 30, UNLIMITED]),
)
def test_elimination_bounds(problem, limit):
    field = field_of(problem)
    best = minima(field, field.costs)
    costs, tables = MessagePassing(field).shift(field.costs)
    found = mini_bucket_bounds(field, costs, tables, limit, UNLIMITED)
    assert (found.bound + found.rises <= best + 1e-9).all()
    if limit == UNLIMITED:
        assert found.exact
        possible = best < np.inf
        np.testing.assert_allclose(
            (found.bound + found.rises)[possible], best[possible]
        )
        if possible.any():
            assert field.cost(found.choices) == pytest.approx(found.bound)


def test_elimination_after_messages_is_no_worse():
    field = field_of(ladder(3, length=6, strategies=5, tightness=None))
    messages = MessagePassing(field)
    for _ in range(10):
        swept = messages.sweep(field.costs)
    costs, tables = messages.shift(field.costs)
    for limit in (25, 125, UNLIMITED):
        found = mini_bucket_bounds(field, costs, tables, limit, UNLIMITED)
        assert found.bound >= swept.bound - 1e-9
    with pytest.raises(TooLargeError):
        mini_bucket_bounds(field, costs, tables, UNLIMITED, 10)


def eliminated(field, max_entries=UNLIMITED):
    tables = [np.minimum(table, field.forbidden) for table in field.tables]
    return mini_bucket_bounds(field, field.costs, tables, max_entries, UNLIMITED)


def test_a_cycle_is_solved_exactly():
    """Every two nodes of a triangle can differ, all three cannot."""
    differ = [[5.0, 0.0], [0.0, 5.0]]
    links = {(0, 1): differ, (1, 2): differ, (0, 2): differ}
    field = flatten(graph_of([[0, 0], [0, 0], [0, 1]], links))
    found = eliminated(field)
    assert (found.bound, found.exact) == (5.0, True)
    assert field.cost(found.choices) == 5.0
    assert found.rises.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    split = eliminated(field, max_entries=4)
    assert not split.exact
    assert split.bound <= 5.0


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(memory=False, max_nodes=5, max_strategies=3, max_edges=14))
def test_choices_cost_no_less_than_the_bound(problem):
    field = field_of(problem)
    for limit in (1, 9, UNLIMITED):
        found = eliminated(field, limit)
        cost = field.cost(found.choices) - field.constant
        assert cost >= found.bound - 1e-9


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(memory=False, max_nodes=5, max_strategies=3, max_edges=14))
def test_splits_only_lower_the_bound(problem):
    field = field_of(problem)
    exact = eliminated(field).bound
    assert all(eliminated(field, limit).bound <= exact + 1e-9 for limit in (1, 3, 9))


def test_nodes_without_links_add_up():
    field = flatten(graph_of([[3.0, 1.0], [5.0, 9.0]], {}))
    found = eliminated(field)
    assert (found.bound, found.choices.tolist()) == (6.0, [1, 0])
    assert found.rises.tolist() == [2.0, 0.0, 0.0, 4.0]


def test_work_is_counted():
    """A node of 3 and a pair of 2 x 2: the buckets have 3, 4 and 2 entries."""
    links = {(1, 2): np.ones((2, 2))}
    field = flatten(graph_of([[0, 0, 0], [0, 0], [0, 0]], links))
    mini_bucket_bounds(field, field.costs, field.tables, UNLIMITED, 9)
    with pytest.raises(TooLargeError):
        mini_bucket_bounds(field, field.costs, field.tables, UNLIMITED, 8)
