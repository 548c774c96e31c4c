"""Losses, parameters and batches of the planner's test steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Workload = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed: int, *shape: int, scale: float = 0.5) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def trained(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Makes ``step(params, opt_state, batch)`` from a loss."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def training(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> Workload:
    optimizer = optimizer or optax.sgd(0.1)
    return trained(loss, optimizer), (params, optimizer.init(params), batch)


def mlp_params(width: int = 16, hidden: int = 32, layers: int = 2) -> Any:
    # With large weights, units saturate. Their gradients are rounding noise, which Adam
    # would scale up.
    return [
        {
            "up": normal(2 * i, width, hidden, scale=0.2),
            "bias": normal(50 + i, hidden, scale=0.2),
            "down": normal(2 * i + 1, hidden, width, scale=0.2),
        }
        for i in range(layers)
    ]


def mlp_block(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for p in params:
        x = mlp_block(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


def mlp_batch(batch: int = 8, width: int = 16) -> Any:
    return {"x": normal(90, batch, width), "y": normal(91, batch, width)}
