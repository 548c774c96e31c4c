"""A step of residual layers under Adam, whose moments may be in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

OPTIMIZER = optax.adam(1e-2)


def update(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of residual layers."""

    def output(weights: Any) -> jax.Array:
        h = x
        for w in weights:
            h = h + jnp.tanh(h @ w)
        return h

    return _updated(output, state)


def scanned_update(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """The same step, whose layers are the slices of one array in a loop."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w), None

    return _updated(lambda w: jax.lax.scan(jax.checkpoint(layer), x, w)[0], state)


def _updated(output: Callable[[Any], jax.Array], state: Any) -> tuple[Any, jax.Array]:
    weights, moments = state
    loss, grads = jax.value_and_grad(
        lambda weights: jnp.mean((output(weights) - 1.0) ** 2)
    )(weights)
    grads, moments = OPTIMIZER.update(grads, moments, weights)
    return (optax.apply_updates(weights, grads), moments), loss
