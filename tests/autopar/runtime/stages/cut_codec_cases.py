"""A step whose stages send each other encoded values, for one process and for two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

WIDTH, ROWS, LAYERS, COUNT = 32, 256, 4, 4
CODECS = "int4:block=32/int8:block=32"
ASKED: dict[str, Any] = {
    "cluster": "4:cpu", "microbatches": COUNT, "axis_names": ("data",),
    "pins": {"batch/*": P("data"), "received/*": P("data")}, "seconds": 1,
}  # fmt: skip


def weights() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 4.0 for key in keys]


def batch(seed: int = 0, bad: bool = False) -> dict[str, np.ndarray]:
    x, y = np.random.default_rng(seed).standard_normal((2, ROWS, WIDTH))
    x[3] *= np.inf if bad else 1.0
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


Cuts = Mapping[int, Callable[[Any], Any]]
NONE: Cuts = {}


def chain_loss(params: Any, batch: Any, cuts: Cuts = NONE) -> Any:
    x = batch["x"]
    for k, w in enumerate(params):
        x = x + jnp.tanh(x @ w)
        x = cuts[k](x) if k in cuts else x
    return jnp.mean((x - batch["y"]) ** 2)


def descended(loss: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def run(step: Any, params: Any, steps: int = 2) -> tuple[Any, list[float]]:
    losses: list[float] = []
    for seed in range(steps):
        params, loss = step(params, batch(seed))
        losses.append(float(loss))
    return params, losses
