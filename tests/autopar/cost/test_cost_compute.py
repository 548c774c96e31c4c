"""Tests the roofline model against its formula."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import DeviceSpec
from autopar.cost.compute import attained_flops_per_s, roofline_s

DEVICE = DeviceSpec(
    name="round numbers",
    kind="gpu",
    peak_flops_per_s=(("float32", 1e12), ("bfloat16", 4e12)),
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e10,
    matmul_efficiency=0.5,
    kernel_latency_s=1e-6,
    vector_flops_per_s=2e11,
)

amounts = st.floats(0, 1e18)
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"])


def test_compute_bound_product():
    expected = 1e12 / (0.5 * 4e12)
    assert roofline_s(1e12, 1e3, "bfloat16", DEVICE, is_matrix=True) == pytest.approx(
        expected
    )


def test_memory_bound_product():
    expected = 1e9 / 1e10
    assert roofline_s(1e6, 1e9, "bfloat16", DEVICE, is_matrix=True) == pytest.approx(
        expected
    )


def test_other_operators_run_on_the_vector_units():
    expected = 1e12 / 2e11
    assert roofline_s(1e12, 0, "bfloat16", DEVICE, is_matrix=False) == pytest.approx(
        expected
    )


def test_vector_rate_defaults_to_the_float32_peak():
    device = dataclasses.replace(DEVICE, vector_flops_per_s=0.0)
    assert attained_flops_per_s("bfloat16", device, False) == 1e12


def test_nothing_to_do_takes_no_time():
    assert roofline_s(0, 0, "float32", DEVICE, is_matrix=True) == 0


def test_what_is_wasted_of_a_tile_does_not_slow_memory():
    """Efficiency lowers the rate of arithmetic alone."""
    slow = roofline_s(1e12, 1e9, "float32", DEVICE, is_matrix=True, efficiency=0.25)
    assert slow == pytest.approx(1e12 / (0.25 * 0.5e12))
    bound = roofline_s(1e6, 1e9, "float32", DEVICE, is_matrix=True, efficiency=0.25)
    assert bound == pytest.approx(1e9 / 1e10)


@given(amounts, amounts, dtypes, st.booleans())
def test_never_faster_than_either_roof(flops, nbytes, dtype, is_matrix):
    time_s = roofline_s(flops, nbytes, dtype, DEVICE, is_matrix=is_matrix)
    assert time_s >= flops / DEVICE.peak(dtype)
    assert time_s >= nbytes / DEVICE.memory_bandwidth_bytes_per_s


@given(amounts, amounts, st.floats(1, 100), dtypes, st.booleans())
def test_monotone(flops, nbytes, factor, dtype, is_matrix):
    time_s = roofline_s(flops, nbytes, dtype, DEVICE, is_matrix=is_matrix)
    assert (
        roofline_s(flops * factor, nbytes, dtype, DEVICE, is_matrix=is_matrix) >= time_s
    )
    assert (
        roofline_s(flops, nbytes * factor, dtype, DEVICE, is_matrix=is_matrix) >= time_s
    )


@given(st.lists(st.tuples(amounts, amounts), max_size=8), dtypes, st.booleans())
def test_array_form_agrees(pairs, dtype, is_matrix):
    flops = np.array([pair[0] for pair in pairs])
    nbytes = np.array([pair[1] for pair in pairs])
    expected = [
        float(roofline_s(f, n, dtype, DEVICE, is_matrix=is_matrix)) for f, n in pairs
    ]
    found = roofline_s(flops, nbytes, dtype, DEVICE, is_matrix=is_matrix)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
