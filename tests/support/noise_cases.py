"""Steps with known gradient noise, and the exact norms that tests compare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import autopar

WIDTH = 32
# With so many rows, plans that gather weights are faster than plans that gather rows.
ROWS = 1024
REPLICATED = {"batch": PartitionSpec("data"), "w/*": PartitionSpec()}
SPLIT = {"batch": PartitionSpec("data"), "w/*": PartitionSpec("data")}
MODEL = {
    "w/up": PartitionSpec(None, "model"),
    "w/down": PartitionSpec("model"),
    "w/bias": PartitionSpec("model"),
}


def loss_of(w: Any, batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ w["up"] + w["bias"])
    return jnp.mean((hidden @ w["down"] - 1.0) ** 2)


def step(w: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(w, batch)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), loss


def state() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    weights = {k: 0.3 * draw.standard_normal((WIDTH, WIDTH)) for k in ("up", "down")}
    weights["bias"] = 0.1 * draw.standard_normal(WIDTH)
    return {k: jnp.asarray(x, jnp.float32) for k, x in weights.items()}


def batch(rows: int = ROWS, seed: int = 1) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows, WIDTH)).astype(np.float32)


def groups(rows: int, replicas: int, microbatches: int) -> list[np.ndarray]:
    """The rows of each group: contiguous per replica, alternating per microbatch."""
    parts = np.arange(rows).reshape(replicas, -1)
    return [part[m::microbatches] for part in parts for m in range(microbatches)]


@functools.cache
def _row_gradients(rows: int, seed: int) -> np.ndarray:
    """The gradient of each single row, float64 (rows, elements)."""
    one = jax.grad(lambda w, row: loss_of(w, row[None]))
    found = jax.jit(jax.vmap(one, in_axes=(None, 0)))(state(), batch(rows, seed))
    leaves = jax.tree.leaves(found)
    return np.concatenate(
        [np.asarray(x, np.float64).reshape(rows, -1) for x in leaves], axis=1
    )


@dataclasses.dataclass(frozen=True)
class Norms:
    """The squared norms of gradients, computed from the gradient of every row."""

    local: float
    total: float


def expected(
    parts: Sequence[np.ndarray], rows: int = ROWS, seed: int = 1, scale: Any = 1.0
) -> Norms:
    """The norms of the groups' gradients, with each element divided by its scale."""
    by_row = _row_gradients(rows, seed) / scale
    means = np.stack([by_row[part].mean(0) for part in parts])
    local = float(np.square(means).sum(1).mean())
    return Norms(local, float(np.square(means.mean(0)).sum()))


def parallel(**options: Any) -> Any:
    """The step under a plan for 8 devices that measures the gradient noise."""
    kept: dict[str, Any] = {
        "cluster": "8:cpu",
        "noise_scale": True,
        "seconds": None,
        **options,
    }
    return autopar.parallelize(step, **kept)
