"""Tests combinations of piecewise linear curves against the single curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.curves import TimeCurve, highest, line, lowest, through, total

sizes = st.floats(0.0, 1e12)
lines = st.builds(line, st.floats(0.0, 1e-3), st.floats(1e-13, 1e-8))


@st.composite
def knotted(draw: st.DrawFn) -> TimeCurve:
    """An increasing curve through knots."""
    gaps = draw(st.lists(st.floats(2.0, 64.0), min_size=2, max_size=8))
    steps = draw(st.lists(st.floats(0.0, 1e-3), min_size=8, max_size=8))
    at = np.cumprod([1024.0, *gaps[1:]])
    return through(at.tolist(), np.cumsum(steps[: len(at)]).tolist())


curves = st.lists(lines | knotted(), min_size=1, max_size=4)


def agree(found: float, want: float) -> None:
    assert found == pytest.approx(want, rel=1e-6, abs=1e-15)


@given(curves, sizes)
def test_combinations_are_pointwise(parts: list[TimeCurve], size: float) -> None:
    values = [curve.seconds(size) for curve in parts]
    agree(lowest(parts).seconds(size), min(values))
    agree(highest(parts).seconds(size), max(values))
    agree(total(parts).seconds(size), sum(values))


@given(curves, curves, sizes)
def test_combinations_combine(
    a: list[TimeCurve], b: list[TimeCurve], size: float
) -> None:
    both = lowest([highest(a), total(b)])
    want = min(max(c.seconds(size) for c in a), sum(c.seconds(size) for c in b))
    agree(both.seconds(size), want)


@given(curves, st.sampled_from([lowest, highest, total]))
def test_combinations_are_continuous(parts: list[TimeCurve], combine: object) -> None:
    assert callable(combine)
    found: TimeCurve = combine(parts)
    assert found.starts[0] == 0.0
    assert list(found.starts) == sorted(set(found.starts))
    for k, start in enumerate(found.starts[1:]):
        latency, slope = found.lines[k]
        agree(found.seconds(start), latency + slope * start)


@given(curves, st.floats(0.01, 1.0), sizes)
def test_a_phase_sees_its_part(
    parts: list[TimeCurve], part: float, size: float
) -> None:
    curve = lowest(parts)
    agree(curve.seeing(part).seconds(size), curve.seconds(part * size))


@given(curves, st.floats(1.0, 1e12))
def test_no_byte_takes_less_than_the_least(parts: list[TimeCurve], size: float) -> None:
    curve = total(parts)
    assert curve.seconds(size) >= curve.s_per_byte * size * (1 - 1e-9)


@given(knotted())
def test_knots_are_met(curve: TimeCurve) -> None:
    latency, slope = curve.lines[0]
    assert slope == 0.0
    agree(curve.seconds(curve.starts[1]), latency)


def test_three_lines_through_one_point() -> None:
    """The flattest holds beyond it."""
    parts = [line(1.0 - slope * 0.1, slope) for slope in (3.0, 2.0, 1.0)]
    agree(lowest(parts).seconds(1.0), 1.9)
    agree(highest(parts).seconds(1.0), 3.7)
