"""Tests the placement of buffers in one block against a placement byte by byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.cost.live import lost_bytes

SPANS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 12)),
    min_size=1,
    max_size=8,
)


@given(SPANS)
@settings(max_examples=examples(200), deadline=None)
def test_each_buffer_lies_in_the_smallest_hole(
    spans: list[tuple[int, int, int]],
) -> None:
    """The largest first; of one size, the longest first."""
    taken = np.zeros((20, 200), dtype=bool)
    top = 0
    for start, length, size in sorted(spans, key=lambda s: (-s[2], -s[1])):
        beside = taken[start : start + length + 1].any(axis=0)
        edges = np.flatnonzero(np.diff(np.concatenate(([True], beside, [True]))))
        holes = [(b, e - b) for b, e in edges.reshape(-1, 2) if e - b >= size]
        inner = [hole for hole in holes if sum(hole) < 200]
        place = min(inner, key=lambda h: (h[1], h[0]))[0] if inner else holes[-1][0]
        taken[start : start + length + 1, place : place + size] = True
        top = max(top, place + size)
    first, length, sizes = (np.array([s[k] for s in spans]) for k in range(3))

    lost = lost_bytes(first, first + length, sizes.astype(float))
    assert lost == top - taken.sum(axis=1).max()
