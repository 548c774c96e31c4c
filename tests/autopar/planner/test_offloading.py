"""Plans that keep optimizer state in the memory of the hosts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.errors import InfeasibleError

OPTIMIZER = optax.adam(1e-2)


def update(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of residual layers."""
    weights, moments = state

    def loss_of(weights: Any) -> jax.Array:
        h = x
        for w in weights:
            h = h + jnp.tanh(h @ w)
        return jnp.mean((h - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    grads, moments = OPTIMIZER.update(grads, moments, weights)
    return (optax.apply_updates(weights, grads), moments), loss


def test_memory_that_is_too_small_moves_optimizer_state() -> None:
    row = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    weights = [row] * 40
    state = weights, jax.eval_shape(OPTIMIZER.init, weights)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    planned = functools.partial(
        autopar.plan, update, state, x, stages=1, compile_check=False
    )
    free, small = planned(cluster="8:a100"), "8:a100,memory=80MB"
    found = planned(cluster=small)
    assert found.offload
    assert not free.offload
    assert set(found.offload) < set(found.inputs)
    assert found.predicted.peak_memory_bytes <= 80e6
    assert found.predicted.step_s > free.predicted.step_s
    with pytest.raises(InfeasibleError):
        planned(cluster=small, offload="none")


def test_copies_take_the_rate_between_device_and_host() -> None:
    row = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    state = [row], jax.eval_shape(OPTIMIZER.init, [row])
    x = jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    cluster = autopar.Cluster.parse("1:a100")
    step_s = [
        autopar.plan(
            update, state, x, cluster=cluster, offload=offload, compile_check=False
        ).predicted.step_s
        for offload in ("none", "optimizer")
    ]
    # Two moments come to the device and go back.
    copies_s = 4 * 2048 * 2048 * 4 / cluster.device.host_bytes_per_s
    assert step_s[1] - step_s[0] == pytest.approx(copies_s, rel=0.1)
