"""A small step with noisy gradients, and runs whose batch size follows the noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import autopar
from autopar.goodput import NoiseOptions, scale_updates

BASE, WIDTH = 16, 32
PINS = {"batch/*": PartitionSpec("data"), "state/*": PartitionSpec()}


def optimizer(rule: Any = "adascale", base: int = BASE) -> Any:
    return scale_updates(optax.sgd(0.01), rule, base_batch=base)


def loss_of(w: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def parallel(tx: Any = None, **options: Any) -> Any:
    """The step on four devices, with a sharded batch and a replicated state."""
    made = tx or optimizer()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
        updates, opt = made.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

    kept: dict[str, Any] = {
        "cluster": "4:cpu",
        "axis_names": ("data",),
        "pins": PINS,
        "noise_scale": NoiseOptions(base_batch=BASE, decay=0.9),
        "seconds": None,
    }
    return autopar.parallelize(step, **kept | options)


def create(tx: Any = None) -> Any:
    w = jnp.zeros((WIDTH, WIDTH))
    return {"w": w, "opt": (tx or optimizer()).init(w)}


def source(position: int, rows: int) -> Any:
    """Noisy samples that depend on their positions, not on how many are requested."""
    draws = [np.random.default_rng(position + k) for k in range(rows)]
    x = np.stack([d.standard_normal(2 * WIDTH) for d in draws]).astype(np.float32)
    return {"x": x[:, :WIDTH], "y": x[:, :WIDTH] + 20 * x[:, WIDTH:]}
