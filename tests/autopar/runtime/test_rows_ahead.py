"""Tests microbatches if a step mixes rows of the batch, or draws for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, WIDTH = 16, 6
R = jax.random


def arguments(kind: str | None = None) -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    w = jnp.asarray(0.3 * draw.standard_normal((WIDTH, WIDTH)), jnp.float32)
    x = draw.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return w, x, R.key(3, impl=kind) if kind != "raw" else R.PRNGKey(3)


Mixed = Callable[[Any, Any, Any], Any]


def step_of(mixed: Mixed) -> Callable[..., Any]:
    """A step whose loss weights rows by a function of input, outputs and key."""

    def step(w: Any, x: Any, key: Any) -> Any:
        def loss_of(w: Any) -> Any:
            y, weights = mixed(x, x @ w, key)
            rows = jnp.tanh(y @ w).reshape(len(weights), -1)
            return jnp.mean(weights[:, None] * (rows - 1.0) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    return step


def split(mixed: Mixed, kind: str | None = None) -> tuple[Any, Any, Any]:
    """The results of the split and the plain step, and the split step."""
    step, args = step_of(mixed), arguments(kind)
    want = jax.jit(step)(*args)
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=4, donate=False)
    found = run(*args)
    assert run.plan.microbatches == 4
    return found, want, run


def moved(x: Any, h: Any, key: Any) -> Any:
    """Rows are reversed, rolled, sorted, permuted, selected and weighted by number."""
    del h
    count, (a, b) = len(x), R.split(key)
    y = x[::-1] + jnp.roll(x, 1, 0) + jnp.sort(x, 0) + R.permutation(a, x)
    share = R.beta(a, 0.4, 0.4, (count, 1))
    y = share * y + (1 - share) * x[R.permutation(b, count)]
    y += x[R.choice(b, count, (count,))] - x.mean(0) + (x @ x.T) @ x
    return y, jnp.cos(jnp.arange(count)) + np.arange(count) / count


def paired(x: Any, h: Any, key: Any) -> Any:
    """Half as many rows as the batch, and a mask whose sum is that of another draw."""
    del h
    keep = R.bernoulli(key, 0.7, (len(x) // 2,))
    return x[::2] + x[1::2], keep / jnp.maximum(jnp.sum(keep), 1)


def of_each_row(x: Any, h: Any, key: Any) -> Any:
    """Keys of the rows; the draws depend on outputs of the model."""
    size = jnp.exp(0.3 * h[:, 0]) + 0.5
    keys = jax.vmap(R.fold_in, (None, 0))(key, jnp.arange(len(x)))
    kept = jax.vmap(lambda k, row: row * R.bernoulli(k, 0.5, row.shape))(keys, h)
    weights = jax.vmap(R.gamma)(R.split(key, len(x)), size)
    until = jax.vmap(lambda a: jax.lax.while_loop(lambda b: b < 9, lambda b: b + a, a))
    labels = jax.vmap(lambda label: R.normal(R.key(label)))(jnp.argmax(h, 1))
    return kept, weights + jax.lax.stop_gradient(until(size)) + labels


def given(x: Any, h: Any, key: Any) -> Any:
    """Samplers that repeat until all rows are accepted, and rows of the input."""
    del h
    rate = jnp.exp(x[:, 0])
    weights = R.poisson(key, 3 * rate) + R.binomial(key, 9.0, jnp.exp(-rate))
    return x, weights + R.gamma(key, rate)


@pytest.mark.parametrize(
    ("mixed", "kind"),
    [(moved, None), (paired, "rbg"), (of_each_row, "raw"), (given, None)],
)
def test_rows_are_those_of_the_whole_batch(mixed: Mixed, kind: str | None) -> None:
    found, want, run = split(mixed, kind)

    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert not run.plan.local


def test_a_sampler_of_outputs_draws_for_each_microbatch() -> None:
    """The numbers are others than those of the whole batch; the plan says it."""

    def sampled(x: Any, h: Any, key: Any) -> Any:
        size = jax.lax.stop_gradient(jnp.exp(0.3 * h[:, 0]) + 0.5)
        return x, R.gamma(key, size) + R.poisson(key, size)

    found, want, run = split(sampled)
    again = run(*arguments())

    assert any("random numbers" in line for line in run.plan.local)
    assert found[1] == again[1]
    np.testing.assert_allclose(found[1], want[1], rtol=0.8)
    assert found[1] != want[1]


def test_rows_that_are_sorted_and_put_back_are_made_once() -> None:
    """The backward pass needs the order ahead, and the update rows of it."""

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            order = jnp.argsort(x[:, 0])
            return jnp.mean((x[order] @ w)[jnp.argsort(order)] * x[:, :1])

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    w, x, _ = arguments()
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=4, donate=False)

    for a, b in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
