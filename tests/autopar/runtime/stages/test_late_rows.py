"""Tests updates that read rows of the batch, in stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

RATE = 0.1


def forward(ws: Any, x: Any) -> tuple[Any, list[Any]]:
    seen: list[Any] = []
    for w in ws:
        seen.append(jnp.stack([jnp.max(jnp.abs(x)), jnp.min(x), jnp.any(x > 1)]))
        x = jnp.tanh(x @ w) + x
    return x, seen


def step(state: Any, x: Any, y: Any) -> Any:
    def loss(ws: Any) -> Any:
        out, seen = forward(ws, x)
        rows = jnp.mean((out - y) ** 2, 1)
        return jnp.mean(rows), (rows, jnp.stack(seen))

    ws, mean, _ = state
    (value, (rows, seen)), grads = jax.value_and_grad(loss, has_aux=True)(ws)
    ws = jax.tree.map(lambda w, g: w - RATE * g, ws, grads)
    mean = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, mean, ws)
    of_mean = jnp.mean((forward(mean, x)[0] - y) ** 2)
    told = {"loss": value, "median": jnp.median(rows), "of mean": of_mean}
    return (ws, mean, seen), told


@pytest.mark.parametrize("count", [1, 2])
def test_updates_read_all_rows(count: int) -> None:
    """Largest activations, sorted losses and the loss of averaged weights."""
    keys = jax.random.split(jax.random.key(0), 4)
    ws = [jax.random.normal(key, (8, 8)) / 4 for key in keys]
    plain = planned = (ws, ws, jnp.zeros((4, 3)))
    run = autopar.parallelize(
        step, cluster="4:cpu", stages=2, microbatches=count, seconds=1, donate=False
    )
    for k in range(2):
        rng = np.random.default_rng(k)
        x, y = (rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2))
        plain, want = jax.jit(step)(plain, x, y)
        planned, got = run(planned, x, y)
        for a, b in zip(
            jax.tree.leaves((plain, want)), jax.tree.leaves((planned, got)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not run.plan.local
