"""Tests the predicting codec: what it sends, and when it updates its scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_workers import (
    as_chunks,
    assert_conserved,
    assert_same_everywhere,
    flat_total,
    initial_states,
    relative_error,
    simulate,
    wire_cost,
)

from autopar.compression.codecs.predicted import PredictedState, PredictedTopK, largest
from autopar.compression.codecs.quantise import Int8
from autopar.compression.codecs.registry import format_codec, parse_codec

WORKERS = 4
SIZE = 800
SHAPE = (SIZE,)
LARGEST = jax.jit(largest, static_argnums=1)


def gradients(seed=0, places=(), size=SIZE):
    """Gradients of small noise, with large values at ``places`` on all workers."""
    rng = np.random.default_rng(seed)
    g = 0.01 * rng.standard_normal((WORKERS, size))
    places = np.asarray(places, int)
    g[:, places] += np.where(places % 2, -1, 1) * rng.uniform(1, 2, places.size)
    return g.astype(np.float32)


def train(codec, steps, make, *, state=None, start=0):
    """Runs steps with error feedback; returns the last result and all totals."""
    error = 0.0
    totals = []
    result = None
    for step in range(start, start + steps):
        g = make(step)
        chunks = as_chunks(codec, g) + error
        result = simulate(codec, g, state, step=step, chunks=chunks)
        error = result.chunks - result.sent
        state = result.states
        totals.append(flat_total(result, SIZE))
    return result, totals


PLANTED = np.random.default_rng(9).choice(SIZE, 40, replace=False)


@pytest.mark.parametrize("score", ["second_moment", "previous"])
def test_the_planted_support_is_found(score):
    codec = PredictedTopK(ratio=0.06, explore=0.0, every=1, score=score, values="f32")
    # The elements are sent once in turn, 17 steps; then they are known.
    result, _ = train(codec, 18, lambda step: gradients(step, PLANTED))

    found = np.asarray(result.states.indices[0])
    assert set(PLANTED) <= set(found)
    sent = np.flatnonzero(flat_total(result, SIZE))
    assert set(PLANTED) <= set(sent)
    assert len(sent) <= 48


def test_at_equal_bytes_it_errs_less_than_what_knows_nothing():
    codec = PredictedTopK(ratio=0.06, explore=0.0, every=1)
    result, _ = train(codec, 20, lambda step: gradients(step, PLANTED))
    g = gradients(99, PLANTED)

    known = relative_error(simulate(codec, g, result.states, step=20), g)
    unknown = relative_error(simulate(codec, g, step=20), g)
    noise = np.linalg.norm(np.delete(g.sum(axis=0), PLANTED))
    bound = noise / np.linalg.norm(g.sum(axis=0))
    assert known < bound + 0.02  # 0.02: what int8 adds.
    assert unknown > 0.9


def test_at_first_all_elements_are_sent_in_turn():
    codec = PredictedTopK(ratio=0.1, explore=0.0, values="f32")
    _, totals = train(codec, 10, lambda step: gradients(step, PLANTED))

    for step, total in enumerate(totals):
        expected = np.arange(80) + 80 * step
        np.testing.assert_array_equal(np.flatnonzero(total), expected)


def test_the_slice_brings_back_what_became_large():
    codec = PredictedTopK(ratio=0.06, explore=0.05, every=1, values="f32")
    result, _ = train(codec, 20, lambda step: gradients(step, PLANTED))
    other = np.setdiff1d(np.random.default_rng(3).choice(SIZE, 30), PLANTED)

    # Each element is in the slice once in 20 steps; PLANTED fades as 0.9 ** t.
    result, _ = train(
        codec,
        60,
        lambda step: gradients(step, other),
        state=result.states,
        start=20,
    )
    assert set(other) <= set(np.asarray(result.states.indices[0]))


def test_without_the_slice_what_became_large_stays_unknown():
    codec = PredictedTopK(ratio=0.05, explore=0.0, every=1, values="f32")
    result, _ = train(codec, 21, lambda step: gradients(step, PLANTED))
    rest = np.setdiff1d(np.arange(SIZE), np.asarray(result.states.indices[0]))
    result = simulate(codec, gradients(1, rest[:5]), result.states, step=21)

    assert not flat_total(result, SIZE)[rest[:5]].any()


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize(
    "codec",
    [
        PredictedTopK(values="f32"),
        PredictedTopK(values="f32", explore=0.0, score="previous"),
        PredictedTopK(values="f32", sketch=0.1, heavy=0.02),
    ],
    ids=format_codec,
)
def test_without_a_second_shot_contributions_add_up(codec, scatter):
    states = initial_states(codec, SHAPE, WORKERS)
    for step in range(3):
        g = gradients(step, PLANTED)
        result = simulate(codec, g, states, step=step, scatter=scatter)
        states = result.states
        assert_conserved(result, exact=not codec.sketch)
        total = result.total if scatter else result.total[0]
        np.testing.assert_allclose(total, result.sent.sum(axis=0), atol=1e-5)
        if not scatter:
            assert_same_everywhere(result)


@pytest.mark.parametrize("values", ["int8", "bf16"])
def test_two_shots_agree_everywhere_and_keep_the_error_small(values):
    codec = PredictedTopK(ratio=1.0, explore=0.0, values=values)
    g = gradients(0, np.arange(SIZE))
    result = simulate(codec, g)

    assert_conserved(result, exact=False)
    assert_same_everywhere(result)
    for leaf in result.states:
        np.testing.assert_array_equal(*np.asarray(leaf)[:2])
    assert relative_error(result, g) < 0.01


def test_scores_follow_the_formula():
    codec = PredictedTopK(ratio=0.5, explore=0.0, every=1, values="f32")
    score = np.linspace(0, 1, SIZE, dtype=np.float32)
    state = PredictedState(
        jnp.asarray(score), jnp.zeros(SIZE // 2, jnp.int32), jnp.int32(50)
    )
    states = PredictedState(*(jnp.stack([leaf] * WORKERS) for leaf in state))
    g = gradients(0, np.arange(SIZE))
    result = simulate(codec, g, states, step=50)

    upper = np.arange(SIZE) >= SIZE // 2
    np.testing.assert_array_equal(flat_total(result, SIZE) != 0, upper)
    expected = np.where(upper, 0.9 * score + 0.1 * g.sum(axis=0) ** 2, score)
    np.testing.assert_allclose(result.states.score[0], expected, rtol=1e-5)


def test_what_is_sent_late_is_not_taken_for_large():
    """A total of t steps' gradients counts as their mean square."""
    codec = PredictedTopK(ratio=0.25, explore=0.0, values="f32")
    result, totals = train(codec, 4, lambda step: gradients(step))

    ages = np.repeat([1, 2, 3, 4], SIZE // 4)
    square = np.sum(np.square(totals), axis=0)
    np.testing.assert_allclose(result.states.score[0], square / ages, rtol=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_bytes(workers):
    n, size, k, e = workers, 80_000, 4000, 400
    two_shots = 2 * (n - 1) / n
    plain = PredictedTopK(explore=0.0)
    # One scale of two bytes for 256 codes; the last block of a chunk is whole.
    blocks = -(-(k // n) // 256)
    assert plain.wire_bytes((size,), n) == pytest.approx(
        two_shots * n * (k / n + 2 * blocks), rel=0.04
    )
    assert plain.wire_bytes((size,), n) == Int8().wire_bytes((k,), n)
    half = wire_cost(PredictedTopK(values="bf16"), (size,), n)
    assert half == (pytest.approx(two_shots * 2 * (k + e)), 2)
    full = wire_cost(PredictedTopK(values="f32", sketch=0.03), (size,), n)
    assert full == (pytest.approx(two_shots * 4 * (k + e + 2400)), 2)


def test_the_largest_scores():
    scores = np.random.default_rng(0).chisquare(1, 5000).astype(np.float32)
    found = np.asarray(LARGEST(jnp.asarray(scores), 250, jnp.uint32(1)))

    used = found[found < 5000]
    assert len(set(used)) == used.size
    # Eight bisections of a bracket of half the threshold leave about one slot.
    assert 240 <= used.size <= 250
    np.testing.assert_array_equal(
        np.sort(used), np.sort(np.argsort(-scores)[: used.size])
    )


def test_equal_scores_fill_the_slots():
    found = np.asarray(LARGEST(jnp.ones(5000), 250, jnp.uint32(1)))
    assert (found < 5000).sum() == 250
    found = np.asarray(LARGEST(jnp.zeros(5000), 250, jnp.uint32(1)))
    assert (found >= 5000).all()


def test_edge_cases():
    one = np.array([[2.0], [3.0]])
    assert flat_total(simulate(PredictedTopK(values="f32", explore=0.0), one), 1) == 5.0
    states = None
    for step in range(14):
        zeros = simulate(PredictedTopK(), np.zeros((2, 90)), states, step=step)
        states = zeros.states
        assert not zeros.total.any()
    assert not np.asarray(states.score).any()


def test_nan_does_not_stay_in_the_state():
    codec = PredictedTopK(ratio=0.5, values="f32", explore=0.0)
    bad = gradients()
    bad[1, 3] = np.nan
    result = simulate(codec, bad)
    assert np.isnan(flat_total(result, SIZE)[3])
    assert np.isfinite(np.asarray(result.states.score)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("predicted:ratio=0", "got 0.0"),
        ("predicted:explore=-0.1", r"explore is a share.*got -0.1"),
        ("predicted:sketch=2", "sketch is a share"),
        ("predicted:sketch=0.1,heavy=0", "heavy"),
        ("predicted:every=0", "every counts steps"),
        ("predicted:score=age", "second_moment, previous"),
        ("predicted:values=int3", "int8, bf16, f32"),
    ],
)
def test_bad_fields_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_codec(text)
