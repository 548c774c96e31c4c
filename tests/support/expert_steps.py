"""Steps of models whose tokens are sorted by their experts, without a capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

EXPERTS, CHOSEN, WIDTH, INNER = 8, 2, 16, 32

Products = Callable[[jax.Array, jax.Array, Any], jax.Array]


def _products(rows: jax.Array, sizes: jax.Array, p: Any) -> jax.Array:
    gate = jax.lax.ragged_dot(rows, p["gate"], sizes)
    up = jax.lax.ragged_dot(rows, p["up"], sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)


def _routed(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
    gates = jax.nn.softmax(x.astype(jnp.float32) @ p["router"])
    return jax.lax.top_k(gates, CHOSEN)


def by_inverse(x: jax.Array, p: Any) -> jax.Array:
    """Rows come back by the inverse of their order; groups are counted by bins."""
    weights, chosen = _routed(x, p)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    sizes = jnp.bincount(keys, length=EXPERTS)
    made = _products(x[order // CHOSEN], sizes, p)
    back = made[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return (back * weights[..., None].astype(x.dtype)).sum(1)


def by_addition(x: jax.Array, p: Any) -> jax.Array:
    """Rows are added to their token; a shared expert works beside the others."""
    weights, chosen = _routed(x, p)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32).sum((0, 1))
    token = order // CHOSEN
    made = _products(jnp.take(x, token, axis=0), sizes, p)
    made = made * weights.reshape(-1)[order][:, None].astype(x.dtype)
    out = jnp.zeros_like(x).at[token].add(made)
    return out + jax.nn.silu(x @ p["up"][0]) @ p["down"][0]


def by_setting(x: jax.Array, p: Any) -> jax.Array:
    """Rows are put to their place, each with its expert's bias."""
    weights, chosen = _routed(x, p)
    keys = chosen.reshape(-1)
    keys, order = jax.lax.sort_key_val(keys, jnp.arange(keys.size))
    sizes = jnp.bincount(keys, length=EXPERTS)
    made = _products(x[order // CHOSEN], sizes, p) + p["bias"][keys]
    back = jnp.zeros_like(made).at[order].set(made).reshape(*chosen.shape, -1)
    return jnp.einsum("tkd,tk->td", back, weights.astype(x.dtype))


FORMS = {"inverse": by_inverse, "addition": by_addition, "setting": by_setting}


def training(
    form: str = "inverse",
    rows: int = 16,
    length: int = 4,
    layers: int = 2,
    again: bool = False,
    scanned: bool = False,
) -> tuple[Callable[..., Any], Any, jax.Array]:
    """A step of layers of experts, its state and a batch (rows, length, width).

    Args:
      form: one of `FORMS`.
      rows: rows of the batch.
      length: tokens of a row.
      layers: number of layers.
      again: whether the backward pass computes the layers again.
      scanned: whether the layers are stacked, in a scan.
    """
    optimizer, experts = optax.sgd(0.02, momentum=0.9), FORMS[form]

    def layer(x: jax.Array, p: Any) -> jax.Array:
        y = x + jnp.tanh(x @ p["mix"])
        flat = y.reshape(-1, WIDTH)
        return y + experts(flat, p).reshape(x.shape)

    if again:
        layer = jax.checkpoint(layer)

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        y = x
        if scanned:
            y, _ = jax.lax.scan(lambda y, p: (layer(y, p), None), y, params)
        else:
            for p in params:
                y = layer(y, p)
        return jnp.mean((y - x[..., ::-1]) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, moments = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments}, value

    shapes = {
        "mix": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, INNER),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
        "bias": (EXPERTS, WIDTH),
    }
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes) + 1))
    every = [
        {n: 0.2 * jax.random.normal(next(keys), s) for n, s in shapes.items()}
        for _ in range(layers)
    ]
    if form != "setting":
        for p in every:
            del p["bias"]
    params = every
    if scanned:
        params = jax.tree.map(lambda *x: jnp.stack(x), *every)
    x = jax.random.normal(next(keys), (rows, length, WIDTH))
    return step, {"params": params, "opt": optimizer.init(params)}, x
