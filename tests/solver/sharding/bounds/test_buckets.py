"""Elimination bounds every strategy, and is exact where nothing is split."""

import numpy as np
import pytest
from fields import UNLIMITED, field_of, minima
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_problems import ladder, problems

from autopar_solver.sharding.bounds.buckets import TooLargeError, mini_bucket_bounds
from autopar_solver.sharding.bounds.message_passing import MessagePassing


@settings(max_examples=60, deadline=None)
@given(
    problems(memory=False, max_nodes=6, max_strategies=3, max_edges=14),
    st.sampled_from([1, 4, 9, 30, UNLIMITED]),
)
def test_elimination_bounds(problem, limit):
    field = field_of(problem)
    best = minima(field, field.costs)
    costs, tables = MessagePassing(field).shifted(field.costs)
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
    costs, tables = messages.shifted(field.costs)
    for limit in (25, 125, UNLIMITED):
        found = mini_bucket_bounds(field, costs, tables, limit, UNLIMITED)
        assert found.bound >= swept.bound - 1e-9
    with pytest.raises(TooLargeError):
        mini_bucket_bounds(field, costs, tables, UNLIMITED, 10)
