"""Tests on-chip memory, and arrays in tiles, against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.live import on_chip, room_bytes
from autopar.cost.local import tiled_bytes

SPANS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 50)), max_size=9
)


def held(spans: list[tuple[int, int, int]], room: float) -> list[bool]:
    starts, ends, sizes = (np.array([s[i] for s in spans], dtype=int) for i in range(3))
    return on_chip(starts, starts + ends, sizes.astype(float), room).tolist()


@given(SPANS, st.integers(0, 120))
def test_what_the_chip_holds_fits_at_every_time(
    spans: list[tuple[int, int, int]], room: int
) -> None:
    """And nothing leaves it that shares no time with too much."""
    chip = held(spans, float(room))

    for t in range(26):
        live = [s <= t <= s + n for s, n, _ in spans]
        rows = list(zip(spans, live, chip, strict=True))
        assert sum(span[2] for span, here, on in rows if here and on) <= room
    for (start, length, _), on in zip(spans, chip, strict=True):
        times = range(start, start + length + 1)
        most = max(sum(b for s, n, b in spans if s <= t <= s + n) for t in times)
        assert on or most > room


def test_what_waits_longest_leaves_first() -> None:
    """Two short buffers one after the other, and one beside both."""
    assert held([(0, 9, 6), (1, 1, 6), (5, 1, 6)], 10.0) == [False, True, True]
    assert held([(0, 9, 6), (1, 1, 4)], 10.0) == [True, True]
    assert held([(0, 9, 6)], 0.0) == [False]


def test_kernels_and_transfers_have_a_part_of_the_chip() -> None:
    """128 MiB: 16 for a kernel, a sixth of the rest for what arrives."""
    assert room_bytes(128 * 2**20) == 560 * 2**20 // 6
    assert room_bytes(2**20) == 0


@given(st.lists(st.integers(1, 300), max_size=4))
def test_tiles_lose_the_least(shape: list[int]) -> None:
    """As every choice of lanes and rows tried by hand."""

    def whole(order: tuple[int, ...]) -> int:
        *outer, rows, lanes = order
        filled = 8 * math.ceil(rows / 8) if rows > 7 else 1 << (rows - 1).bit_length()
        return math.prod(outer) * filled * 128 * math.ceil(lanes / 128)

    sizes = [n for n in shape if n > 1]
    expected = {0: 1, 1: 128 * math.ceil((sizes or [1])[0] / 128)}.get(len(sizes))
    if expected is None:
        expected = min(map(whole, itertools.permutations(sizes)))

    assert math.isclose(tiled_bytes(shape, 2.0), 2.0 * expected)
