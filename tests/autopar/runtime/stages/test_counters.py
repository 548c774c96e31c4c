"""Tests an optimizer with a step counter, and metrics of its counters, in stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar

TX = optax.MultiSteps(optax.adam(1e-2), 2)


def step(ws: Any, state: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = jnp.tanh(h @ w) + h
        return jnp.mean((h - x) ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    updates, new = TX.update(grads, state, ws)
    done = new.mini_step == 0, new.gradient_step
    return optax.apply_updates(ws, updates), new, (value, *done)


def start() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    ws = [jax.random.normal(key, (16, 16)) / 4 for key in keys]
    return ws, TX.init(ws)


@pytest.mark.parametrize("cluster", ["8:cpu", "2x4:h100"])
def test_metrics_of_counters_are_planned(cluster: str) -> None:
    """A stage may have no operators of its own."""
    structs = jax.eval_shape(start)
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = autopar.plan(
        step, *structs, batch, cluster=cluster, stages=2, microbatches=4, seconds=1
    )
    assert len(plan.stages) == 2


@pytest.mark.parametrize("donate", [False, True])
def test_metrics_of_counters_are_those_of_one_program(donate: bool) -> None:
    """The next step does not consume a counter that is a metric, too."""
    run = autopar.parallelize(
        step, cluster="2:cpu", stages=2, microbatches=4, donate=donate, seconds=1
    )
    told: list[Any] = []
    plain, planned = start(), start()
    for k in range(4):
        x = np.random.default_rng(k).standard_normal((16, 16)).astype(np.float32)
        *plain, want = jax.jit(step)(*plain, x)
        *planned, got = run(*planned, x)
        np.testing.assert_allclose(np.stack(got), np.stack(want), rtol=1e-4)
        told.append(got)
    assert [int(counts[-1]) for counts in told] == [0, 1, 1, 2]
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
