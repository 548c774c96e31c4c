"""Messages prove a bound for every strategy, and a sweep never lowers the bound."""

import numpy as np
import pytest
from fields import field_of, minima
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_problems import ladder, problems

from autopar_solver.sharding.bounds.message_passing import MessagePassing


@settings(max_examples=80, deadline=None)
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


@given(problems(max_nodes=6), st.integers(0, 10**6))
def test_shifting_keeps_every_cost(problem, seed):
    field = field_of(problem)
    messages = MessagePassing(field)
    messages.sweep(field.costs)
    costs, tables = messages.shifted(field.costs)
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
