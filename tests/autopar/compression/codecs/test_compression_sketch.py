"""Tests that the count sketch is linear and unbiased, and finds large elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_workers import (
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
from autopar.compression.codecs.sketch import Sketch, median, sketch, unsketch
from autopar.compression.codecs.sparse import shared_salt

WORKERS = 4
SALT = shared_salt(jnp.int32(3), 11)


def vectors(size, seed=0, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, size)).astype(np.float32)


def planted(size, heavy, seed=0):
    """Gradients of small noise, with the same few large elements on all workers."""
    rng = np.random.default_rng(seed)
    g = 0.01 * rng.standard_normal((WORKERS, size))
    places = rng.choice(size, heavy, replace=False)
    g[:, places] += rng.choice([-1, 1], heavy) * rng.uniform(2, 3, heavy)
    return g.astype(np.float32), places


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_sketch_is_linear(rows):
    a, b = vectors(500, workers=2)
    added = sketch(jnp.asarray(a + b), rows, 60, SALT)
    apart = sketch(jnp.asarray(a), rows, 60, SALT) + sketch(
        jnp.asarray(b), rows, 60, SALT
    )

    np.testing.assert_allclose(added, apart, atol=1e-4)
    assert added.shape == (rows, 60)


def test_every_element_is_in_one_bucket_of_each_row():
    @jax.jit
    def there_and_back(unit):
        table = sketch(unit, 3, 60, SALT)
        return table, *unsketch(table, table, 500, SALT)

    for place in (0, 7, 59, 60, 123, 499):
        table, estimates, own = there_and_back(jnp.zeros(500).at[place].set(2.0))
        np.testing.assert_array_equal((np.asarray(table) != 0).sum(axis=1), 1)
        np.testing.assert_array_equal(np.abs(table).sum(axis=1), 2.0)
        assert estimates[place] == own[place] == 2.0


def test_the_estimate_is_right_on_average():
    (x,) = vectors(90, workers=1)
    steps, columns = 600, 30

    def estimate(step):
        salt = shared_salt(step, 5)
        table = sketch(jnp.asarray(x), 1, columns, salt)
        return unsketch(table, table, 90, salt)[0]

    found = jax.jit(jax.vmap(estimate))(jnp.arange(steps))

    # Two of the 90 may meet in a bucket if their pieces differ: the noise of an
    # estimate has the variance of the other two pieces over C.
    deviation = np.sqrt((x**2).sum() / columns / steps)
    assert (np.abs(np.mean(found, axis=0) - x) < 5 * deviation).all()


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from([1, 3, 5]), st.integers(0, 1000))
def test_median_is_numpys(count, seed):
    values = np.random.default_rng(seed).integers(-3, 4, (count, 50)).astype("f4")
    found = median([jnp.asarray(v) for v in values])
    np.testing.assert_array_equal(found, np.median(values, axis=0))


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("exact", [False, True])
def test_the_heavy_elements_are_recovered(rows, exact):
    """There is room for four more, which share two buckets with heavy ones."""
    g, places = planted(4000, 4)
    result = simulate(Sketch(ratio=0.5, rows=rows, heavy=8 / 4000, exact=exact), g)

    total = flat_total(result, 4000)
    assert np.count_nonzero(total) == 8
    np.testing.assert_allclose(total[places], g.sum(axis=0)[places], atol=0.5)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_contributions_add_up_and_all_agree(rows, scatter):
    g = vectors(40 * WORKERS, seed=4)
    codec = Sketch(ratio=0.5, rows=rows, heavy=0.2)
    result = simulate(codec, g, scatter=scatter)

    assert_conserved(result, exact=False)
    total = result.total if scatter else result.total[0]
    # Elements that share all their buckets have the same estimate.
    assert 32 <= np.count_nonzero(total) <= 40
    np.testing.assert_allclose(total, result.sent.sum(axis=0), atol=1e-4)
    if not scatter:
        assert_same_everywhere(result)


def test_with_feedback_a_constant_gradient_arrives():
    g, _ = planted(2000, 10, seed=1)
    codec = Sketch(ratio=0.6, heavy=0.01)
    received = np.zeros(2000)
    error = np.zeros_like(g)
    steps = 40
    for step in range(steps):
        result = simulate(codec, g, step=step, chunks=None if step == 0 else error)
        received += flat_total(result, 2000)
        error = result.chunks - result.sent + g.reshape(result.chunks.shape)
    exact = g.sum(axis=0) * steps
    assert np.linalg.norm(received - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_bytes(workers, rows):
    cost = wire_cost(Sketch(ratio=0.1, rows=rows), (6000,), workers)

    numbers = rows * round(600 / rows)
    assert cost == (pytest.approx(8 * (workers - 1) / workers * numbers), 1)


def test_edge_cases():
    one = simulate(Sketch(), np.array([[2.0], [3.0]]))
    assert flat_total(one, 1)[0] == 5.0
    zeros = simulate(Sketch(), np.zeros((2, 300), np.float32))
    assert not zeros.total.any()
    bad = vectors(300)
    bad[2, 5] = np.nan
    assert np.isnan(simulate(Sketch(), bad).total).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sketch:rows=2", "1, 3 or 5, got 2"),
        ("sketch:ratio=0", "got 0.0"),
        ("sketch:heavy=0", "heavy is the share"),
    ],
)
def test_bad_fields_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_codec(text)
