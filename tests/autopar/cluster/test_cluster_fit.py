"""Tests that fits recover the parameters of their points, and are never negative."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.profiling.kernels import (
    fit_collective,
    fit_line,
    fit_slope,
    relative_rms,
    round_off,
)

SIZES = (4096.0, 65536.0, 2.0**19, 2.0**21, 2.0**23)
latencies = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-11, 1e-6)


@given(latencies, slopes)
def test_recovers_a_line(latency_s, slope):
    """To the accuracy at which it is visible at either end of the sizes."""
    times_s = [latency_s + slope * n for n in SIZES]
    a, b = fit_line(SIZES, times_s)
    predicted = [a + b * n for n in SIZES]
    np.testing.assert_allclose(predicted, times_s, rtol=1e-4)


@given(st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5))
def test_never_negative_and_no_worse_than_simpler_fits(times_s):
    a, b = fit_line(SIZES, times_s)
    assert a >= 0
    assert b >= 0
    error = relative_rms([a + b * n for n in SIZES], times_s)
    slope = fit_slope(SIZES, times_s)
    assert error <= relative_rms([slope * n for n in SIZES], times_s) + 1e-4
    inverse = [1 / t for t in times_s]
    constant = sum(inverse) / sum(x * x for x in inverse)
    assert error <= relative_rms([constant] * 5, times_s) + 1e-4


def test_recovers_a_floor():
    """Points of max(a + b n, c n) that bend between the third and fourth size."""
    points = [(n, max(1e-4 + 1e-10 * n, 2.5e-10 * n)) for n in SIZES]
    found = fit_collective("all_reduce", 8, points)
    assert found.latency_s == pytest.approx(1e-4, rel=1e-4)
    assert found.s_per_byte == pytest.approx(1e-10, rel=1e-4)
    assert found.large_s_per_byte == pytest.approx(2.5e-10, rel=1e-4)
    assert found.relative_error < 1e-4
    assert [found.seconds(n) for n, _ in points] == pytest.approx(
        [time_s for _, time_s in points], rel=1e-4
    )


def test_a_line_needs_no_floor():
    points = [(n, 1e-4 + 1e-9 * n) for n in SIZES]
    found = fit_collective("all_gather", 4, points)
    assert found.large_s_per_byte == 0.0
    assert found.latency_s == pytest.approx(1e-4, rel=1e-4)
    assert found.s_per_byte == pytest.approx(1e-9, rel=1e-4)
    assert found.relative_error < 1e-5


def test_order_of_the_points_does_not_matter():
    points = [(n, 1e-4 + 1e-9 * n * (1 + n / 1e7)) for n in SIZES]
    backwards = fit_collective("all_gather", 4, points[::-1])
    assert fit_collective("all_gather", 4, points) == backwards


def test_relative_rms():
    assert relative_rms([1.1, 0.9], [1.0, 1.0]) == pytest.approx(0.1)


def test_round_off():
    assert round_off(1 / 3) == 0.333333
    assert round_off(0.0) == 0.0
    assert not math.isnan(round_off(1e300))
