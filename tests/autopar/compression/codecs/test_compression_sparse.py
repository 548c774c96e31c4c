"""Tests top-k, random-k and block top-k against NumPy, and their bytes."""

import math

import ml_dtypes
import numpy as np
import pytest
from compression_workers import (
    as_chunks,
    assert_conserved,
    assert_same_everywhere,
    flat_total,
    simulate,
    wire_cost,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.compression.codecs.sparse import (
    BlockTopK,
    RandK,
    TopK,
    add_all,
    elements_in_share,
)

WORKERS = 4
BYTES = {"bf16": 2, "f32": 4}
CODECS = [
    TopK(ratio=0.1),
    TopK(ratio=0.1, values="f32"),
    RandK(ratio=0.1),
    BlockTopK(k=1, block=10),
    BlockTopK(k=3, block=16, values="f32"),
]


def gradients(shape, seed=0, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, *shape)).astype(np.float32)


def rounded(values, kind):
    """Float32 values after they were sent in another dtype."""
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float32
    return values.astype(dtype).astype(np.float32)


def largest(vector, k):
    """The vector with only its k largest elements; the lowest index wins ties."""
    order = np.argsort(-np.abs(vector), kind="stable")[:k]
    out = np.zeros_like(vector)
    out[order] = vector[order]
    return out


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=format_codec)
def test_nothing_is_lost_and_all_agree(codec, scatter):
    result = simulate(codec, gradients((24, 20)), scatter=scatter)

    assert_conserved(result)
    total = result.total if scatter else result.total[0]
    # Worker after worker in float32, as the codec adds; an all-reduce has an order of
    # its own, so that each of its additions may round otherwise.
    expected = np.zeros_like(result.sent[0])
    for sent in result.sent:
        expected = expected + sent
    orders = WORKERS * np.finfo(np.float32).eps if codec.linear else 0.0
    slack = orders * np.sum(np.abs(result.sent), axis=0)
    assert (np.abs(total - expected) <= slack).all()
    if not scatter:
        assert_same_everywhere(result)


@pytest.mark.parametrize("values", ["bf16", "f32"])
def test_top_k_is_numpys(values):
    g = gradients((30, 11))
    result = simulate(TopK(ratio=0.07, values=values), g)

    k = round(0.07 * 330)
    for sent, own in zip(result.sent, g, strict=True):
        expected = rounded(largest(own.reshape(-1), k), values)
        np.testing.assert_array_equal(sent.reshape(-1)[:330], expected)
        assert np.count_nonzero(sent) == k


def test_scattered_top_k_selects_in_each_chunk():
    g = gradients((WORKERS * 50,))
    result = simulate(TopK(ratio=0.1, values="f32"), g, scatter=True)

    for worker in range(WORKERS):
        for chunk in range(WORKERS):
            own = g[worker].reshape(WORKERS, 50)[chunk]
            np.testing.assert_array_equal(result.sent[worker, chunk], largest(own, 5))


@pytest.mark.parametrize(("k", "block"), [(1, 100), (3, 7), (4, 4), (2, 256)])
def test_block_top_k_keeps_the_largest_of_each_block(k, block):
    codec = BlockTopK(k=k, block=block, values="f32")
    g = gradients((37, 19), seed=1)
    result = simulate(codec, g)

    chunks = as_chunks(codec, g)
    columns = chunks.reshape(WORKERS, WORKERS, block, -1)
    sent = result.sent.reshape(columns.shape)
    for worker, chunk, column in np.ndindex(*columns.shape[:2], columns.shape[3]):
        own = columns[worker, chunk, :, column]
        np.testing.assert_array_equal(sent[worker, chunk, :, column], largest(own, k))


def test_block_top_k_of_blocks_that_do_not_divide_a_scattered_chunk():
    codec = BlockTopK(k=2, block=8, values="f32")
    g = gradients((WORKERS * 13,), seed=2)
    result = simulate(codec, g, scatter=True)

    assert result.total.shape == (WORKERS, 13)
    assert_conserved(result)
    # Two blocks of 8 hold the 13 elements, so 4 of them are sent.
    kept_counts = np.count_nonzero(result.sent, axis=2)
    assert (kept_counts == 4).all()
    np.testing.assert_allclose(result.total, result.sent.sum(axis=0), rtol=1e-6)


def test_random_k_sends_one_of_each_block_everywhere_the_same():
    codec = RandK(ratio=0.1)
    g = gradients((40, 10), seed=3)
    first, second = (simulate(codec, g, step=step) for step in (0, 1))

    columns = (first.sent != 0).reshape(WORKERS, WORKERS, 10, -1)
    assert (columns.sum(axis=2) == 1).all()
    assert (columns == columns[0]).all()
    assert ((second.sent != 0) != (first.sent != 0)).any()


def test_unbiased_random_k_is_right_on_average():
    codec = RandK(ratio=0.25, unbiased=True)
    g = gradients((16,), seed=4)
    steps = 1200
    totals = [flat_total(simulate(codec, g, step=s), 16) for s in range(steps)]

    exact = g.sum(axis=0)
    # A value is 4 x with probability 1 / 4: its variance is 3 x ** 2.
    deviation = np.abs(exact) * math.sqrt(3 / steps)
    assert (np.abs(np.mean(totals, axis=0) - exact) < 5 * deviation).all()
    result = simulate(codec, g)
    np.testing.assert_array_equal(result.sent, result.chunks)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("values", ["bf16", "f32"])
def test_bytes(workers, values, scatter):
    size = 8000
    n, v = workers, BYTES[values]
    shared = 1 / n if scatter else 1.0

    top = wire_cost(TopK(ratio=0.01, values=values), (size,), n, scatter=scatter)
    assert top == (pytest.approx((n - 1) * 80 * (v + 4) * shared), 1)
    codec = BlockTopK(k=2, block=100, values=values)
    block = wire_cost(codec, (size,), n, scatter=scatter)
    # The blocks of a chunk are whole, so a chunk of 8000 / n is rounded up.
    blocks = n * math.ceil(size / n / 100)
    assert block == (pytest.approx((n - 1) * blocks * 2 * (v + 1) * shared), 1)
    random = wire_cost(RandK(ratio=0.01), (size,), n, scatter=scatter)
    factor = 4 if scatter else 8
    assert random == (pytest.approx(factor * (n - 1) / n * blocks), 1)


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from([1, 2, 33, 300]),
    st.sampled_from([0.001, 0.3, 1.0]),
    st.integers(0, 99),
)
def test_any_size(size, ratio, seed):
    g = gradients((size,), seed, workers=2)
    result = simulate(TopK(ratio=ratio, values="f32"), g)

    expected = sum(largest(own, elements_in_share(ratio, size)) for own in g)
    np.testing.assert_array_equal(flat_total(result, size), expected)


@pytest.mark.parametrize("codec", CODECS, ids=format_codec)
@pytest.mark.parametrize("workers", [1, 3])
def test_one_element(codec, workers):
    g = np.arange(1, workers + 1, dtype=np.float32)[:, None]
    result = simulate(codec, g)

    assert_conserved(result)
    if isinstance(codec, TopK):
        assert flat_total(result, 1)[0] == g.sum()


@pytest.mark.parametrize("codec", CODECS, ids=format_codec)
def test_zeros_stay_zeros(codec):
    result = simulate(codec, np.zeros((WORKERS, 50), np.float32))

    assert not result.total.any()
    assert not result.sent.any()


@pytest.mark.parametrize("codec", CODECS[:2] + CODECS[3:], ids=format_codec)
def test_nan_is_sent_and_stays_at_its_place(codec):
    g = gradients((60,))
    g[1, 17] = np.nan
    result = simulate(codec, g)

    total = flat_total(result, 60)
    assert np.isnan(total[17])
    assert np.isfinite(np.delete(total, 17)).all()


def test_ties_are_broken_by_the_lower_index():
    result = simulate(TopK(ratio=0.1, values="f32"), np.ones((2, 40), np.float32))

    np.testing.assert_array_equal(np.flatnonzero(result.sent[0]), np.arange(4))


def test_add_all_drops_empty_slots():
    indices = np.array([[0, 9], [0, 2]], np.int32)
    values = np.array([[1.0, 5.0], [2.0, 3.0]], np.float32)

    np.testing.assert_array_equal(add_all(indices, values, 4), [3.0, 0.0, 3.0, 0.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:ratio=0", r"in \(0, 1\]; got 0.0"),
        ("topk:ratio=1.5", "got 1.5"),
        ("topk:values=f16", "bf16, f32"),
        ("randk:ratio=-1", "got -1.0"),
        ("blocktopk:block=257", "one byte; got 257"),
        ("blocktopk:k=9,block=8", "block = 8, got 9"),
    ],
)
def test_bad_fields_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_codec(text)
