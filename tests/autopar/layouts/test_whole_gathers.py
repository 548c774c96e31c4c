"""Tests that gathers over all devices of a TPU slice are stated axis by axis."""

from __future__ import annotations

import math

import pytest

from autopar.cluster.presets import PRESETS
from autopar.layouts.assignment import apart_bytes, stated_layouts
from autopar.layouts.layout import Layout, reshard_steps

SIZES = (8, 8)
WHOLE: Layout = ((), ())
BOTH: Layout = ((0, 1), ())
MIB = 2**20


@pytest.mark.parametrize(
    ("device", "devices", "most"),
    [
        ("v5e", 64, 16 * MIB),
        ("v5e", 32, 0),
        ("v5p", 64, math.inf),
        ("v5p", 16, 0),
        ("h100", 64, 0),
        ("cpu", 64, 0),
    ],
)
def test_which_arrays_are_gathered_apart(
    device: str, devices: int, most: float
) -> None:
    assert apart_bytes(PRESETS[device].device, devices) == most


def layouts(
    start: Layout, nbytes: float, sizes: tuple[int, ...] = SIZES
) -> list[Layout]:
    steps = reshard_steps(start, WHOLE, (), "", sizes)
    return list(stated_layouts(start, steps, sizes, nbytes, 16 * MIB))


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_the_last_axis_is_gathered_first(axes: tuple[int, ...]) -> None:
    assert layouts((axes, ()), 16 * MIB) == [(axes[:1], ()), WHOLE]


def test_three_axes() -> None:
    assert layouts(((), (2, 0, 1)), 1.0, (4, 4, 4)) == [
        ((), (2, 0)),
        ((), (2,)),
        WHOLE,
    ]


def test_large_arrays_and_parts_of_the_mesh_are_gathered_at_once() -> None:
    assert layouts(BOTH, 16 * MIB + 1) == [WHOLE]
    assert layouts(BOTH, 1.0, (8, 8, 2)) == [WHOLE]
    assert layouts(((0,), (1,)), 1.0) == [((), (1,)), WHOLE]


def test_bytes_are_those_of_one_gather() -> None:
    """What each device sends of an array: 7/64 and 7/8 are 63/64."""
    once = reshard_steps(BOTH, WHOLE, (), "", SIZES)
    sent = 0.0
    for before, after in zip([BOTH, ((0,), ())], layouts(BOTH, 1.0), strict=True):
        (step,) = reshard_steps(before, after, (), "", SIZES)
        assert step.kind == "all_gather"
        sent += step.fraction * 7 / 8

    assert sent == pytest.approx(once[0].fraction * 63 / 64)


def test_other_steps_are_stated_as_they_are() -> None:
    start, target = ((0, 1), ()), ((0,), (1,))
    steps = reshard_steps(start, target, (), "", SIZES)

    assert stated_layouts(start, steps, SIZES, 1.0, math.inf) == tuple(
        s.layout for s in steps
    )
