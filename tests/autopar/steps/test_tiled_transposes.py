"""Tests transpositions that XLA's GPU compiler runs in tiles."""

from __future__ import annotations

import itertools

import pytest

from autopar.steps.orders import runs_in_tiles

# Weights of attention in groups: batch, keys, queries, heads of a group.
LIES = (0, 1, 2, 3)
FORWARD, BACKWARD = (0, 1, 3, 2), (0, 3, 2, 1)


# Seen in programs compiled for H100 (jax 0.10.2): kernels of the kind "input" are
# tiled, those of the kind "loop" are not.
@pytest.mark.parametrize(
    ("heads", "bits", "forward", "backward"),
    [
        (2, 32, False, False),
        (8, 32, False, False),
        (16, 32, True, True),
        (2, 16, False, True),
        (3, 16, False, False),
        (16, 16, True, True),
    ],
)
def test_weights_of_grouped_attention(
    heads: int, bits: int, forward: bool, backward: bool
) -> None:
    sizes = (64, 512, 512, heads)

    assert runs_in_tiles(sizes, LIES, FORWARD, bits) == forward
    assert runs_in_tiles(sizes, LIES, BACKWARD, bits) == backward


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_an_order_that_stays_moves_nothing(bits: int) -> None:
    for order in itertools.permutations(range(3)):
        assert not runs_in_tiles((64, 128, 256), order, order, bits)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_dimensions_that_stay_together_are_one(bits: int) -> None:
    """Four heads of four are as good as sixteen."""
    for order in ((2, 0, 1), (1, 2, 0)):
        halves = tuple(d for dim in order for d in ((2, 3) if dim == 2 else (dim,)))
        assert runs_in_tiles((8, 64, 16), (0, 1, 2), order, bits) == runs_in_tiles(
            (8, 64, 4, 4), (0, 1, 2, 3), halves, bits
        )


def test_a_minor_dimension_that_stays_has_to_be_narrow() -> None:
    assert runs_in_tiles((64, 64, 2), (0, 1, 2), (1, 0, 2), 32)
    assert not runs_in_tiles((64, 64, 4), (0, 1, 2), (1, 0, 2), 32)
