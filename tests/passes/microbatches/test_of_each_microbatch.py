"""Tests what steps compute for each microbatch alone, and random numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from microbatch_cases import assert_close, each, mean_of, rows_of, run, split

ROWS, WIDTH, CLASSES, COUNT = 16, 8, 5, 4


@pytest.fixture(autouse=True)
def _double_precision() -> Generator[None]:
    with jax.enable_x64(True):
        yield


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


W, X = drawn(WIDTH, CLASSES), drawn(ROWS, WIDTH, seed=1)
Y = np.random.default_rng(2).integers(0, CLASSES, ROWS)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, *batch)
        return w - 0.1 * grad, value

    return step


class Net(nn.Module):
    """Two layers with normalisation."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(8, param_dtype=jnp.float64)(x)
        x = nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x)
        x = nn.Dense(CLASSES, param_dtype=jnp.float64)(nn.gelu(x))
        return nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x)


# -- batch statistics ------------------------------------------------------------------


def normalised(state: Any, batch: Any) -> Any:
    """Batch normalisation, written without a library."""
    w, running = state

    def loss_of(w: Any) -> Any:
        h = batch[0] @ w
        mean, var = h.mean(0), h.var(0)
        y = (h - mean) * jax.lax.rsqrt(var + 1e-3)
        return jnp.mean(jnp.tanh(y) * batch[0][:, :CLASSES]), (mean, var)

    (loss, new), grad = jax.value_and_grad(loss_of, has_aux=True)(w)
    running = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, running, new)
    return (w - 0.1 * grad, running), loss


def linen_normalised(state: Any, batch: Any) -> Any:
    params, running = state

    def loss_of(params: Any) -> Any:
        logits, new = Net().apply(
            {"params": params, "batch_stats": running},
            batch[0],
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return loss.mean(), new["batch_stats"]

    (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return (jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), new), loss


def linen_state() -> Any:
    made = Net().init(jax.random.key(0), X)
    running = jax.tree.map(lambda x: x.astype(jnp.float64), made["batch_stats"])
    return made["params"], running


def test_normalisation_has_the_statistics_of_each_microbatch() -> None:
    """All results are linear in what the microbatches give, so they are their means."""
    state = (W, (np.zeros(CLASSES), np.ones(CLASSES)))
    found = run(normalised, (state, (X,)), COUNT)

    assert_close(found, mean_of(each(normalised, state, (X,), COUNT)))
    whole = jax.jit(normalised)(state, (X,))
    assert float(jnp.abs(found[1] - whole[1])) > 1e-6


def test_normalisation_of_a_library_has_them_too() -> None:
    state, batch = linen_state(), (X, Y)
    found = run(linen_normalised, (state, batch), COUNT)

    assert_close(found, mean_of(each(linen_normalised, state, batch, COUNT)))


def test_it_says_whose_statistics_those_are() -> None:
    found = split(linen_normalised, (linen_state(), (X, Y)), COUNT).split

    assert found is not None
    assert found.local == (
        "batch statistics of Net/BatchNorm_0",
        "batch statistics of Net/BatchNorm_1",
    )


def test_statistics_inside_of_loops_are_found() -> None:
    def step(state: Any, batch: Any) -> Any:
        w, running = state

        def layer(h: Any, given: Any) -> Any:
            weight, old = given
            h = h @ weight
            mean = h.mean(0)
            var = (h**2).mean(0) - mean**2
            y = jnp.tanh((h - mean) * jax.lax.rsqrt(var + 1e-3))
            return y, (0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * var)

        def loss_of(w: Any) -> Any:
            h, new = jax.lax.scan(layer, batch, (w, running))
            return jnp.mean(h * batch), new

        (loss, new), grad = jax.value_and_grad(loss_of, has_aux=True)(w)
        return (w - 0.1 * grad, new), loss

    running = (np.zeros((3, WIDTH)), np.ones((3, WIDTH)))
    state = (drawn(3, WIDTH, WIDTH), running)

    assert_close(run(step, (state, X), COUNT), mean_of(each(step, state, X, COUNT)))


# -- random numbers --------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_random_numbers_of_rows_are_those_of_the_whole_batch(raw: bool) -> None:
    def loss(w: Any, x: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, (x.shape[0], CLASSES))
        shift = jax.random.normal(jax.random.fold_in(key, 1), (CLASSES,))
        return jnp.mean((jnp.where(kept, x @ w, 0) + shift) ** 2)

    def step(state: Any, batch: Any) -> Any:
        w, key = state
        key, now = jax.random.split(key)
        value, grad = jax.value_and_grad(loss)(w, batch, now)
        return (w - grad, key), value

    key = jax.random.PRNGKey(3) if raw else jax.random.key(3)

    assert_close(run(step, ((W, key), X), COUNT), step((W, key), X))


@pytest.mark.parametrize("grouped", [False, True])
def test_so_they_are_inside_of_loops_and_in_other_shapes(grouped: bool) -> None:
    def step(state: Any, batch: Any) -> Any:
        if grouped:  # pairs of rows
            batch = batch.reshape(ROWS // 2, 2, -1)

        def layer(h: Any, key: Any) -> Any:
            flat = h.reshape(h.shape[0] * 8, -1)
            kept = jax.random.bernoulli(key, 0.5, flat.shape)
            each = jax.random.split(jax.random.fold_in(key, 1), len(h))
            noise = jax.vmap(lambda k: jax.random.normal(k, h.shape[1:]))(each)
            return jnp.where(kept, flat, 0).reshape(h.shape) + noise, jnp.sum(kept)

        keys = jax.random.split(state, 3)
        h, kept = jax.lax.scan(layer, batch, keys)
        return jax.random.fold_in(state, 1), {"units": h, "kept": kept}

    arguments = (jax.random.key(0), np.ones((ROWS, 64)))

    assert_close(run(step, arguments, COUNT), step(*arguments))


def test_other_keys_are_folded_and_it_is_said() -> None:
    def step(state: Any, batch: Any) -> Any:
        kept = jax.random.bernoulli(state, 0.5, batch.shape)
        return jax.random.fold_in(state, 1), {"kept": jnp.where(kept, batch, 0)}

    key, ones = jax.random.key(0, impl="rbg"), np.ones((ROWS, 64))
    found = split(step, (key, ones), COUNT).split
    assert found is not None
    _, out = run(step, (key, ones), COUNT)
    parts = [rows_of(out["kept"], COUNT, m) for m in range(COUNT)]

    assert len(found.local) == 1
    assert found.local[0].startswith("random numbers of ")
    assert all((parts[0] != other).any() for other in parts[1:])


# -- coupled batches -------------------------------------------------------------------


def spread(w: Any, x: Any) -> Any:
    return jnp.sum(jax.nn.relu(1 - jnp.std(x @ w, axis=0))) + jnp.mean((x @ w) ** 2)


def balanced(w: Any, x: Any) -> Any:
    """The auxiliary loss of a mixture of experts."""
    p = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(jnp.argmax(p, -1), CLASSES)
    return CLASSES * jnp.sum(chosen.mean(0) * p.mean(0)) + jnp.mean(p**2)


@pytest.mark.parametrize("loss", [spread, balanced])
def test_a_coupled_loss_may_be_that_of_each_microbatch(loss: Any) -> None:
    step = sgd(loss)
    (found, _), (expected, _) = (
        run(step, (W, (X,)), COUNT, couple=True),
        mean_of(each(step, W, (X,), COUNT)),
    )

    assert_close(found, expected)
