"""Tests codecs that send every element."""

import jax.numpy as jnp
import numpy as np
import pytest
from compression_workers import (
    assert_conserved,
    assert_same_everywhere,
    flat_total,
    relative_error,
    simulate,
    wire_cost,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.compression.codecs.quantise import Bf16, Dense


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def to_bf16(values):
    return np.asarray(jnp.asarray(values, jnp.bfloat16).astype(jnp.float32))


def test_dense_is_the_sum():
    gradients = normal(4, 5, 7)
    result = simulate(Dense(), gradients)

    assert_same_everywhere(result)
    np.testing.assert_array_equal(result.sent, result.chunks)
    np.testing.assert_allclose(
        flat_total(result, 35), gradients.sum(axis=0).reshape(-1), rtol=1e-5, atol=1e-6
    )


def test_dense_scattered_gives_each_worker_its_row():
    gradients = normal(4, 8, 3)
    result = simulate(Dense(), gradients, scatter=True)

    assert result.total.shape == (4, 6)
    np.testing.assert_allclose(
        result.total, gradients.sum(axis=0).reshape(4, 6), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_bf16_rounds_what_is_sent_and_the_sum_once(workers):
    gradients = normal(workers, 1003)
    result = simulate(Bf16(), gradients)

    assert_same_everywhere(result)
    assert_conserved(result)
    np.testing.assert_array_equal(result.sent, to_bf16(result.chunks))
    total = np.zeros_like(result.chunks[0])
    for sent in result.sent:
        total = total + sent
    # The order of the float32 sum may move a value over a rounding boundary.
    np.testing.assert_allclose(result.total[0], to_bf16(total), rtol=2**-7, atol=1e-6)
    # A relative error of at most 2 ** -9 per rounding, of norms in the rms.
    assert relative_error(result, gradients) < 2 * 2**-9


def test_bf16_scattered_sums_in_float32():
    gradients = normal(4, 8, 3)
    result = simulate(Bf16(), gradients, scatter=True)

    expected = result.sent.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(result.total, expected, rtol=1e-6, atol=1e-6)


# Few lengths: each is compiled.
@given(
    values=st.sampled_from([1, 2, 9]).flatmap(
        lambda n: st.lists(st.floats(width=32), min_size=n, max_size=n)
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_bf16_bytes_round_trip(values):
    """Infinities and NaN included; denormals to the rounding of bfloat16."""
    rows = jnp.asarray([values], jnp.float32)
    payload = Bf16().encode(rows, jnp.int32([len(values)]), jnp.uint32(0))

    assert payload.dtype == jnp.uint8
    assert payload.shape == (1, 2 * len(values))
    decoded = np.asarray(Bf16().decode(payload, len(values)))
    np.testing.assert_array_equal(decoded, to_bf16(rows))


@pytest.mark.parametrize("size", [1, 3, 4, 1000])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_wire(size, workers):
    share = (workers - 1) / workers
    padded = workers * -(-size // workers)
    assert wire_cost(Dense(), (size,), workers) == (2 * share * 4 * padded, 1)
    assert wire_cost(Bf16(), (size,), workers) == (2 * share * 2 * padded, 2)


def test_wire_of_a_scattered_sum_is_half():
    for codec in (Dense(), Bf16()):
        whole = codec.wire_bytes((64,), 4)
        assert codec.wire_bytes((64,), 4, scatter=True) == whole / 2


def test_linear_codec_sends_the_sum_of_parts():
    assert Dense.linear
    assert not Bf16.linear
    assert not Dense.feedback
    assert not Bf16.feedback
