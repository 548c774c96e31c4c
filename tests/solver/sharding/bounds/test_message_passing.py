"""Tests that messages bound every strategy, and that no sweep lowers the bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import ladder, problems
from solver_fields import field_of, graph_of_problem, minima
from solver_graphs import graph_of

from autopar_solver.sharding.bounds.message_passing import (
    MessagePassing,
    carry_messages,
)
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import Follow


@settings(max_examples=examples(80), deadline=None)
@given(problems(memory=False, max_nodes=5, max_strategies=3), st.integers(1, 6))
def test_message_bounds(problem, sweeps):
    field = field_of(problem)
    messages = MessagePassing(field)
    best = minima(field, field.costs)
    last = -np.inf
    for _ in range(sweeps):
        swept = messages.sweep(field.costs)
        assert last <= swept.bound + 1e-9
        assert swept.base <= swept.bound + 1e-9
        assert (swept.base + swept.rises <= best + 1e-9).all()
        last = swept.bound


@settings(deadline=None)
@given(problems(max_nodes=6), st.integers(0, 10**6))
def test_shifting_keeps_every_cost(problem, seed):
    field = field_of(problem)
    messages = MessagePassing(field)
    messages.sweep(field.costs)
    costs, tables = messages.shift(field.costs)
    random = np.random.default_rng(seed)
    choices = np.array([int(random.integers(size)) for size in field.sizes])
    total = costs[field.offsets[:-1] + choices].sum()
    for (k, m), table in zip(field.edges, tables, strict=True):
        total += table[choices[k], choices[m]]
    expected = field.cost(choices) - field.constant
    if np.isfinite(expected):
        assert total == pytest.approx(expected, abs=1e-9)


def test_messages_resume():
    field = field_of(ladder(1, length=5, strategies=4, tightness=None))
    first = MessagePassing(field)
    for _ in range(5):
        first.sweep(field.costs)
    second = MessagePassing(field)
    second.resume(first.by_link())
    np.testing.assert_array_equal(first.buffer, second.buffer)


def chain(*tables, costs=None):
    """A field whose nodes form a chain."""
    sizes = [len(tables[0]), *(len(table[0]) for table in tables)]
    own = [np.zeros(size) for size in sizes] if costs is None else costs
    links = {(k, k + 1): table for k, table in enumerate(tables)}
    return flatten(graph_of(own, links))


def test_one_sweep_is_exact_on_a_chain():
    """Without cycles the bound is the least cost, and decoding finds it."""
    random = np.random.default_rng(0)
    field = chain(*(random.integers(0, 50, (4, 4)).tolist() for _ in range(5)))
    messages = MessagePassing(field)
    swept = messages.sweep(field.costs)
    best = minima(field, field.costs)
    assert swept.bound == pytest.approx(best.min())
    np.testing.assert_allclose(swept.base + swept.rises, best)
    for backward in (False, True):
        choices = messages.decode(field.costs, backward=backward)
        assert field.cost(choices) == pytest.approx(best.min())


def test_first_strategies_win_ties():
    field = chain([[0, 0], [0, 0]], [[1, 1], [1, 1]])
    messages = MessagePassing(field)
    messages.sweep(field.costs)
    assert messages.decode(field.costs).tolist() == [0, 0, 0]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(memory=False, max_nodes=5, max_strategies=3), st.integers(0, 10**6))
def test_bounds_hold_at_any_costs_and_any_messages(problem, seed):
    """Sweeps at other costs leave messages behind; what they prove stays true."""
    field = field_of(problem)
    messages = MessagePassing(field)
    random = np.random.default_rng(seed)
    for _ in range(3):
        costs = field.costs + random.integers(0, 9, field.num_strategies)
        swept = messages.sweep(costs)
        best = minima(field, costs)
        assert swept.bound <= best.min() + 1e-9
        assert (swept.base + swept.rises <= best + 1e-9).all()


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problems(memory=False, max_nodes=5, max_strategies=3))
def test_every_node_has_a_strategy_that_does_not_rise(problem):
    field = field_of(problem)
    rises = MessagePassing(field).sweep(field.costs).rises
    assert (rises >= 0).all()
    assert (np.minimum.reduceat(rises, field.offsets[:-1]) == 0).all()


def test_messages_of_other_links_start_at_zero():
    field = field_of(ladder(1, length=3, strategies=3, tightness=None))
    first, second = MessagePassing(field), MessagePassing(field)
    first.sweep(field.costs)
    known = first.by_link()
    receiver, sender = next(iter(known))
    second.resume({(receiver, sender): known[receiver, sender], (98, 99): np.ones(3)})
    again = second.by_link()
    assert again[receiver, sender].tolist() == known[receiver, sender].tolist()
    assert not any(again[link].any() for link in again if link != (receiver, sender))


def test_carried_messages_follow_the_kept_strategies():
    graph = graph_of([[0, 0, 0], [0, 0], [0]], {(0, 1): np.zeros((3, 2))})
    messages = {
        (0, 1): np.array([1.0, 2.0, 3.0]),
        (1, 0): np.array([4.0, 5.0]),
        (1, 2): np.array([6.0, 7.0]),
    }
    graph.restrict(1, np.array([0, 1]))
    first_step = len(graph.trail)
    graph.restrict(0, np.array([0, 2]))
    graph.restrict(0, np.array([1]))
    graph.drop_node(2, Follow(2, 1, np.zeros(2, np.int64)))
    carried = carry_messages(messages, graph, first_step)
    assert {link: message.tolist() for link, message in carried.items()} == {
        (0, 1): [3.0],
        (1, 0): [4.0, 5.0],
    }


def test_carried_messages_keep_the_bound():
    """What a smaller field resumes with proves at least as much as before."""
    graph = graph_of_problem(ladder(5, length=5, strategies=4, tightness=None))
    field = flatten(graph)
    messages = MessagePassing(field)
    for _ in range(5):
        swept = messages.sweep(field.costs)
    known = messages.by_link()
    for node in range(5):
        graph.restrict(node, np.array([0, 2, 3]))
    smaller = flatten(graph)
    resumed = MessagePassing(smaller)
    resumed.resume(carry_messages(known, graph, 0))
    assert resumed.sweep(smaller.costs).bound >= swept.bound - 1e-9
