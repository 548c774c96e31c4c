"""Tests tiles of arrays, and the parts of an array that they cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.elastic.processes import tiles


def grid(shape: tuple[int, int], parts: tuple[int, int]) -> list[tiles.Tile]:
    """The tiles of an evenly split array."""
    height, width = (n // p for n, p in zip(shape, parts, strict=True))
    return [
        ((i * height, k * width), ((i + 1) * height, (k + 1) * width))
        for i in range(parts[0])
        for k in range(parts[1])
    ]


DIVISORS = st.sampled_from([1, 2, 3, 4, 6, 12])


@settings(deadline=None, max_examples=examples(30))
@given(st.tuples(DIVISORS, DIVISORS), st.tuples(DIVISORS, DIVISORS))
def test_any_split_can_be_put_together_from_any_other(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    whole = np.arange(144).reshape(12, 12)
    held = {
        t: whole[tiles.within(t, tiles.whole((12, 12)))] for t in grid((12, 12), old)
    }
    for wanted in grid((12, 12), new):
        out = np.full(tiles.extent(wanted), -1)
        for tile, data in held.items():
            part = tiles.common(tile, wanted)
            if part is not None:
                out[tiles.within(part, wanted)] = data[tiles.within(part, tile)]
        index = tiles.within(wanted, tiles.whole((12, 12)))
        np.testing.assert_array_equal(out, whole[index])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_arrays_of_no_dimension_and_of_no_element(shape: tuple[int, ...]) -> None:
    tile = tiles.tile_of((slice(None),) * len(shape), shape)
    assert tile == tiles.whole(shape)
    assert tiles.covers(shape, [tile])
    out, data = np.zeros(shape), np.ones(shape)
    out[tiles.within(tile, tile)] = data[tiles.within(tile, tile)]
    assert (out == 1).all()


def test_what_is_complete() -> None:
    left, right = ([[0], [2]], [[2], [4]])
    shapes = {"w": [4], "b": []}
    one, other = {"w": [left], "b": [[[], []]]}, {"w": [right]}
    assert tiles.complete(shapes, [one, other])
    assert not tiles.complete(shapes, [one, one])
    assert not tiles.complete(shapes, [other])
