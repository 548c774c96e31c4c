"""Tests the threshold codec: its selection, its controller and its refreshes."""

import jax
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

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.codecs.threshold import (
    Threshold,
    compact,
    kth_largest,
    quantile,
)

WORKERS = 4
SHAPE = (40, 50)
SIZE = 2000
COMPACT = jax.jit(compact, static_argnums=1)
KTH_LARGEST = jax.jit(kth_largest)


def gradients(seed=0, shape=SHAPE, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, *shape)).astype(np.float32)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_compact_finds_the_true_elements(data):
    size = data.draw(st.sampled_from([1, 33, 2500]))
    density = data.draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    seed = data.draw(st.integers(0, 1000))
    slots = data.draw(st.sampled_from([1, 64]))
    rng = np.random.default_rng(seed)
    mask = rng.random(size) < density
    indices, count = COMPACT(mask, slots, np.uint32(seed))

    indices = np.asarray(indices)
    true = np.flatnonzero(mask)
    assert count == true.size
    assert len(set(indices)) == slots
    used = indices[indices < size]
    assert used.size == min(slots, true.size)
    assert set(used) <= set(true)
    assert (indices >= 0).all()


def test_compact_spares_others_when_it_starts_elsewhere():
    mask = np.ones(320, bool)
    first, second = (
        set(np.asarray(compact(mask, 32, np.uint32(w))[0])) for w in (0, 5)
    )

    assert len(first) == len(second) == 32
    assert first != second


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 3, 50, 77]))
def test_kth_largest_is_the_sorted_one(seed, k):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(77) * 10.0 ** rng.integers(-30, 30, 77)).astype("f4")
    x[rng.integers(0, 77, 10)] = x[0]

    assert KTH_LARGEST(x, k) == np.sort(np.abs(x))[::-1][k - 1]


def test_quantile_of_a_sample():
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    found = float(quantile(x, 0.01, np.uint32(3)))

    # The sample has 60,000 elements, of which 600 are larger: 5 sigma is 20 %.
    assert np.mean(np.abs(x) >= found) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("values", ["bf16", "f32"])
def test_a_refresh_sends_the_largest(scatter, values):
    g = gradients()
    codec = Threshold(ratio=0.05, values=values, exact=True)
    result = simulate(codec, g, scatter=scatter)

    assert_conserved(result)
    for sent, own in zip(result.sent, as_chunks(codec, g, scatter), strict=True):
        floor = np.sort(np.abs(own.reshape(-1)))[::-1][99]
        above = np.abs(own) >= floor
        if not scatter:
            np.testing.assert_array_equal(sent != 0, above)
        else:  # A chunk has room for 25 of its elements.
            assert ((sent != 0) <= above).all()
            expected = np.minimum(above.sum(axis=1), 25)
            np.testing.assert_array_equal((sent != 0).sum(axis=1), expected)
    np.testing.assert_allclose(
        result.total if scatter else result.total[0],
        result.sent.sum(axis=0),
        rtol=1e-6,
        atol=1e-6,
    )
    if not scatter:
        assert_same_everywhere(result)


def test_the_threshold_is_kept_and_follows_the_count():
    codec = Threshold(ratio=0.05, every=10, exact=True, values="f32")
    g = gradients()
    first = simulate(codec, g)
    floors = [np.sort(np.abs(own.reshape(-1)))[::-1][99] for own in g]
    # Exactly as many exceed it as there is room for: it stays.
    np.testing.assert_array_equal(first.states, floors)

    doubled = simulate(codec, 2 * g, first.states, step=1)
    for own, sent, floor, state in zip(
        g, doubled.sent, floors, doubled.states, strict=True
    ):
        count = np.count_nonzero(np.abs(2 * own) >= floor)
        assert count > 150
        # No room for all of them; the rest is in the error.
        assert np.count_nonzero(sent) == 100
        factor = min(2.0, (count / 100) ** 0.1)
        assert float(state) == pytest.approx(floor * factor, rel=1e-6)

    refreshed = simulate(codec, 2 * g, doubled.states, step=10)
    np.testing.assert_array_equal(refreshed.states, 2 * np.array(floors))


def test_the_controller_settles_at_the_wanted_count():
    codec = Threshold(ratio=0.05, every=1000)
    states = simulate(codec, 100 * gradients()).states
    for step in range(1, 30):
        states = simulate(codec, gradients(step), states, step=step).states

    g = gradients(99)
    counts = [np.mean(np.abs(x) >= t) for x, t in zip(g, states, strict=True)]
    np.testing.assert_allclose(counts, 0.05, rtol=0.4)


def test_with_feedback_everything_is_sent_in_the_end():
    codec = Threshold(ratio=0.1, values="f32")
    g = gradients(5)
    result = simulate(codec, g)
    received = result.total[0].astype(np.float64)
    for step in range(1, 60):
        left = result.chunks - result.sent
        result = simulate(codec, g, result.states, step=step, chunks=left)
        received += result.total[0]

    np.testing.assert_allclose(
        received.reshape(-1)[:SIZE], g.sum(axis=0).reshape(-1), atol=1e-5
    )


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_bytes_are_those_of_top_k(workers):
    nbytes = wire_cost(Threshold(ratio=0.01), (24_000,), workers)
    assert nbytes == (pytest.approx((workers - 1) * 240 * (2 + 4)), 1)
    nbytes = wire_cost(Threshold(ratio=0.01), (24_000,), workers, scatter=True)
    assert nbytes == (pytest.approx((workers - 1) * 240 / workers * 6), 1)


def test_edge_cases():
    one = simulate(Threshold(values="f32"), np.array([[2.0], [3.0]]))
    assert flat_total(one, 1)[0] == 5.0

    zeros = simulate(Threshold(), np.zeros((2, 99), np.float32))
    assert not zeros.total.any()
    assert not np.asarray(zeros.states).any()
    # The next step looks for a threshold again, though it is no step of refresh.
    after = simulate(Threshold(), gradients(0, (99,), 2), zeros.states, step=1)
    assert np.count_nonzero(after.sent[0]) == 1

    ties = simulate(Threshold(ratio=0.1), np.ones((2, 100), np.float32))
    assert np.count_nonzero(ties.sent[0]) == 10


def test_nan_is_sent_and_does_not_stay_in_the_state():
    g = gradients(1, (500,))
    g[0] = np.nan
    result = simulate(Threshold(ratio=0.1), g)
    assert np.isnan(result.total).any()

    after = simulate(Threshold(ratio=0.1), gradients(2, (500,)), result.states, step=1)
    assert np.isfinite(after.total).all()
    assert (np.count_nonzero(after.sent.reshape(WORKERS, -1), axis=1) > 30).all()
    assert np.isfinite(np.asarray(after.states)).all()


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="every counts steps"):
        parse_codec("threshold:every=0")
    with pytest.raises(ValueError, match=r"got 2\.0"):
        parse_codec("threshold:ratio=2")
