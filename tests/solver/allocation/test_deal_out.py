"""Tests the division of microbatches over unequal replicas by brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar_solver import deal_out

ROWS = st.lists(st.floats(0, 10), min_size=1, max_size=6).map(sorted)


def brute_force(seconds: list[list[float]], count: int) -> float:
    every = itertools.product(*(range(1, len(row) + 1) for row in seconds))
    return min(
        max(row[n - 1] for row, n in zip(seconds, counts, strict=True))
        for counts in every
        if sum(counts) == count
    )


@settings(deadline=None, derandomize=True)
@given(st.lists(ROWS, min_size=1, max_size=4), st.data())
def test_the_last_replica_ends_as_early_as_can_be(seconds, data):
    most = sum(len(row) for row in seconds)
    count = data.draw(st.integers(len(seconds), most))
    counts = deal_out(seconds, count)

    assert sum(counts) == count
    assert all(1 <= n <= len(row) for n, row in zip(counts, seconds, strict=True))
    ends = [row[n - 1] for n, row in zip(counts, seconds, strict=True)]
    assert max(ends) == brute_force(seconds, count)


@pytest.mark.parametrize(
    ("seconds", "count", "says"),
    [
        ([[1.0], [1.0]], 1, "need one each"),
        ([[1.0], [1.0]], 3, "may have 2 together"),
        ([[2.0, 1.0]], 2, "must not decrease"),
        ([[1.0], []], 2, "need one each"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(seconds, count, says):
    with pytest.raises(ValueError, match=says):
        deal_out(seconds, count)
