"""Tests PowerSGD against the singular value decomposition."""

import doctest

import numpy as np
import pytest
from compression_workers import (
    assert_conserved,
    assert_same_everywhere,
    flat_total,
    initial_states,
    relative_error,
    simulate,
    wire_cost,
)

from autopar.compression.codecs import lowrank
from autopar.compression.codecs.lowrank import PowerSGD, matrix_shape
from autopar.compression.codecs.registry import parse_codec

WORKERS = 4


def noise(shape, seed=0, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, *shape)).astype(np.float32)


def of_rank(rank, rows, columns, seed=0):
    """Gradients of a given rank, whose sum has this rank, too."""
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((rows, rank))
    right = rng.standard_normal((WORKERS, rank, columns))
    return (left @ right).astype(np.float32)


def test_examples():
    assert doctest.testmod(lowrank).failed == 0


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shape", [(30, 20), (5, 6, 4, 7)])
def test_a_matrix_of_low_rank_is_sent_exactly(rank, shape):
    rows, columns = matrix_shape(shape)
    g = of_rank(rank, rows, columns).reshape(WORKERS, *shape)
    result = simulate(PowerSGD(rank=rank), g)

    assert relative_error(result, g) < 1e-5
    np.testing.assert_allclose(
        result.sent.reshape(WORKERS, -1)[:, : rows * columns],
        g.reshape(WORKERS, -1),
        atol=1e-4,
    )


def test_the_warm_start_converges_to_the_best_approximation():
    g = noise((24, 16), seed=1)
    exact = g.sum(axis=0).astype(np.float64)
    singular = np.linalg.svd(exact, compute_uv=False)
    best = np.sqrt((singular[3:] ** 2).sum() / (singular**2).sum())

    result = simulate(PowerSGD(rank=3), g)
    cold = relative_error(result, g)
    for step in range(1, 150):
        result = simulate(PowerSGD(rank=3), g, result.states, step=step)
    warm = relative_error(result, g)
    assert best * (1 - 1e-6) <= warm <= best * (1 + 1e-3)
    assert cold > warm * 1.01


def test_contributions_add_up_and_all_agree():
    result = simulate(PowerSGD(rank=2), noise((19, 23)))

    assert_conserved(result, exact=False)
    assert_same_everywhere(result)
    np.testing.assert_allclose(result.total[0], result.sent.sum(axis=0), atol=1e-4)
    np.testing.assert_array_equal(*np.asarray(result.states)[:2])


def test_it_is_linear():
    """The sum of two workers' gradients on one worker gives the same total."""
    g = noise((20, 14), workers=2)
    two = simulate(PowerSGD(rank=2), g)
    one = simulate(PowerSGD(rank=2), g.sum(axis=0, keepdims=True))

    np.testing.assert_allclose(
        flat_total(two, 280), flat_total(one, 280), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_bytes(workers):
    cost = wire_cost(PowerSGD(rank=4), (3, 3, 64, 128), workers)

    numbers = 4 * (3 * 3 * 64 + 128)
    assert cost == (pytest.approx(8 * (workers - 1) / workers * numbers), 2)


def test_zeros_do_not_end_the_iteration():
    codec = PowerSGD(rank=2)
    zeros = simulate(codec, np.zeros((WORKERS, 12, 10), np.float32))
    assert not zeros.total.any()
    g = of_rank(2, 12, 10)
    assert relative_error(simulate(codec, g, zeros.states, step=1), g) < 1e-5


def test_nan_does_not_stay_in_the_state():
    codec = PowerSGD(rank=2)
    g = of_rank(2, 12, 10)
    bad = g.copy()
    bad[0, 3, 3] = np.nan
    result = simulate(codec, bad)
    assert np.isnan(result.total).any()
    assert relative_error(simulate(codec, g, result.states, step=1), g) < 1e-5


@pytest.mark.parametrize("scale", [1e-18, 1e15])
def test_the_scale_of_the_gradient_does_not_matter(scale):
    g = of_rank(2, 12, 10) * np.float32(scale)
    result = simulate(PowerSGD(rank=2), g)
    result = simulate(PowerSGD(rank=2), g, result.states, step=1)
    assert relative_error(result, g) < 1e-5


def test_a_rank_above_that_of_the_matrix_is_cut():
    assert initial_states(PowerSGD(rank=9), (6, 4), 2).shape == (2, 4, 4)
    g = noise((6, 4), workers=2)
    assert relative_error(simulate(PowerSGD(rank=9), g), g) < 1e-5


@pytest.mark.parametrize(
    ("shape", "scatter", "reason"),
    [
        ((300,), False, "a vector"),
        ((), False, "a vector"),
        ((1, 300), False, "a vector"),
        ((6, 6), False, "would send 48 numbers for the 36"),
        ((64, 64), True, "scattered"),
        ((64, 64), False, ""),
    ],
)
def test_what_it_is_not_for(shape, scatter, reason):
    said = PowerSGD(rank=4).check(shape, scatter=scatter)
    assert reason in said
    assert bool(said) == bool(reason)


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="rank must be positive, got 0"):
        parse_codec("powersgd:rank=0")


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("values", "bytes_each"), [("bf16", 2.0), ("int8", 1 + 2 / 64)]
)
def test_bytes_of_rounded_factors(values, bytes_each, workers):
    codec = PowerSGD(rank=4, values=values)
    nbytes, rounds = wire_cost(codec, (512, 128), workers)

    # Chunks are whole blocks of 64, so nothing is padded.
    share = (workers - 1) / workers
    assert nbytes == pytest.approx(2 * share * 4 * (512 + 128) * bytes_each)
    assert rounds == 4


@pytest.mark.parametrize(("values", "bound"), [("bf16", 2**-7), ("int8", 0.02)])
def test_rounded_factors_send_nearly_the_same(values, bound):
    """Also where the singular values, and so the columns, differ by a thousand."""
    rng = np.random.default_rng(5)
    left = np.linalg.qr(rng.standard_normal((256, 3)))[0] * [1000.0, 30.0, 1.0]
    right = rng.standard_normal((WORKERS, 3, 128))
    g = (left @ right).astype(np.float32)
    codec = PowerSGD(rank=3, values=values)
    result = simulate(codec, g)
    for step in range(1, 5):
        result = simulate(codec, g, result.states, step=step)

    assert 0 < relative_error(result, g) < bound


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_workers_agree_on_rounded_factors(values):
    result = simulate(PowerSGD(rank=2, values=values), noise((19, 23)))

    assert_conserved(result, exact=False)
    assert_same_everywhere(result)
    np.testing.assert_array_equal(*np.asarray(result.states)[:2])


def test_rounded_factors_as_text():
    codec = parse_codec("powersgd:rank=8,values=int8")
    assert codec == PowerSGD(rank=8, values="int8")
    with pytest.raises(ValueError, match="values must be one of f32, bf16, int8"):
        PowerSGD(values="int2")  # pyright: ignore[reportArgumentType]
