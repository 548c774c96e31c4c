"""The smallest train step that is worth sharding, and its expected losses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

# The number of rows is divisible by 2, 3, 4, 6 and 8 devices.
ROWS, WIDTH = 24, 16


def step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(w)
    return w - 0.5 * grad, loss


def state() -> jax.Array:
    return 0.1 * jnp.eye(WIDTH)


def batch(rows: int = ROWS) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.standard_normal((rows, WIDTH)).astype(np.float32)


def structs(rows: int = ROWS) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
    )


@functools.cache
def plan(cluster: str, rows: int = ROWS) -> autopar.Plan:
    return autopar.plan(step, *structs(rows), cluster=cluster)


@functools.cache
def plain_losses(count: int) -> tuple[float, ...]:
    """The losses of the unplanned step on one device."""
    w, losses = state(), []
    for _ in range(count):
        w, loss = jax.jit(step)(w, batch())
        losses.append(float(loss))
    return tuple(losses)


def trained(run: Any, w: Any, count: int) -> tuple[Any, list[float]]:
    """Runs `count` steps; returns the state and the losses."""
    losses: list[float] = []
    for _ in range(count):
        w, loss = run(w, batch())
        losses.append(float(loss))
    return w, losses
