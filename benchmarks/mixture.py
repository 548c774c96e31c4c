"""A decoder with experts in every layer, as a train step.

Every token goes to its best experts. With a capacity, each expert takes a limited
number of tokens from each row, and einsums dispatch and combine (Lepikhin et al.,
GShard, 2020). Without one, tokens are sorted by their experts, whose products are
`jax.lax.ragged_dot` (Gale et al., MegaBlocks, 2022).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import decoder
import jax
import jax.numpy as jnp
import optax

CAPACITY = 1.25  # limit of tokens of an expert, divided by the mean number of tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """The experts of each layer.

    Attributes:
      count: experts of a layer.
      chosen: experts of a token.
      shared: experts of every token.
      dropless: whether experts take all tokens that are sent to them.
    """

    count: int
    chosen: int = 2
    shared: int = 0
    dropless: bool = False


def shapes(model: decoder.Decoder, given: Experts, sequence: int) -> decoder.Tree:
    """The parameters, by name: those of a decoder, with an MLP for each expert."""
    whole = decoder.shapes(model, sequence)
    d, f, experts = model.d_model, model.ffn, given.count
    inner = {"gate": (d, f), "up": (d, f), "down": (f, d)}
    wide = given.shared * f
    shared = {
        "shared_gate": (d, wide),
        "shared_up": (d, wide),
        "shared_down": (wide, d),
    }
    if not given.shared:
        shared = {}
    for k in range(model.layers):
        own = {
            name: jax.ShapeDtypeStruct((experts, *shape), jnp.float32)
            for name, shape in inner.items()
        }
        router = jax.ShapeDtypeStruct((d, experts), jnp.float32)
        beside = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in shared.items()
        }
        whole[f"block_{k}"] |= own | beside | {"router": router}
    return whole


def routed(gates: jax.Array, capacity: int) -> jax.Array:
    """The weight of each token in each expert's slots: (batch, token, expert, slot)."""
    weights, chosen = jax.lax.top_k(gates, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    masks = jax.nn.one_hot(chosen, gates.shape[-1])
    first, second = masks[..., 0, :], masks[..., 1, :]
    slots = (
        jnp.cumsum(first, 1) - 1,
        jnp.cumsum(second, 1) - 1 + first.sum(1, keepdims=True),
    )
    return sum(
        weights[..., k, None, None]
        * mask[..., None]
        * jax.nn.one_hot(slot.astype(jnp.int32), capacity)
        for k, (mask, slot) in enumerate(zip((first, second), slots, strict=True))
    )


def mlp(p: decoder.Tree, x: jax.Array) -> jax.Array:
    """The experts of one layer, applied to (batch, sequence, width)."""
    experts, kind = p["router"].shape[1], x.dtype
    capacity = int(2 * x.shape[1] * CAPACITY / experts)
    gates = jax.nn.softmax(x.astype(jnp.float32) @ p["router"])
    combine = routed(gates, capacity).astype(kind)
    sent = jnp.einsum("bsec,bsd->ebcd", (combine > 0).astype(kind), x)
    up = jnp.einsum("ebcd,edf->ebcf", sent, p["up"].astype(kind))
    gate = jnp.einsum("ebcd,edf->ebcf", sent, p["gate"].astype(kind))
    made = jax.nn.silu(gate) * up
    back = jnp.einsum("ebcf,efd->ebcd", made, p["down"].astype(kind))
    return jnp.einsum("bsec,ebcd->bsd", combine, back)


def dropless_mlp(p: decoder.Tree, x: jax.Array, chosen: int) -> jax.Array:
    """The experts of one layer without a capacity, on (batch, sequence, width)."""
    experts, kind = p["router"].shape[1], x.dtype
    rows = x.reshape(-1, x.shape[-1])
    gates = jax.nn.softmax(rows.astype(jnp.float32) @ p["router"])
    weights, ids = jax.lax.top_k(gates, chosen)
    weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(ids.reshape(-1))
    sizes = jnp.bincount(ids.reshape(-1), length=experts)
    sent = rows[order // chosen]
    up = jax.lax.ragged_dot(sent, p["up"].astype(kind), sizes)
    gate = jax.lax.ragged_dot(sent, p["gate"].astype(kind), sizes)
    made = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"].astype(kind), sizes)
    back = made[jnp.argsort(order)].reshape(*ids.shape, -1)
    out = jnp.einsum("tkd,tk->td", back, weights.astype(kind)).reshape(x.shape)
    if "shared_up" in p:
        up = x @ p["shared_up"].astype(kind)
        gate = x @ p["shared_gate"].astype(kind)
        out = out + (jax.nn.silu(gate) * up) @ p["shared_down"].astype(kind)
    return out


def block(p: decoder.Tree, x: jax.Array, how: str, given: Experts) -> jax.Array:
    """One layer."""
    y = decoder.normalised(x, p["norm_1"], "llama")
    q, k, v = (
        jnp.einsum("bsd,dhk->bshk", y, p[name].astype(x.dtype))
        for name in ("query", "key", "value")
    )
    mixed = decoder.attention(decoder.rotated(q), decoder.rotated(k), v, how)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, p["out"].astype(x.dtype))
    y = decoder.normalised(x, p["norm_2"], "llama")
    return x + (dropless_mlp(p, y, given.chosen) if given.dropless else mlp(p, y))


def _stacked(params: decoder.Tree, layers: int) -> decoder.Tree:
    """Abstract parameters with those of all layers in stacks."""
    rest = {k: v for k, v in params.items() if not k.startswith("block_")}
    blocks = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype), params["block_0"]
    )
    return rest | {"blocks": blocks}


def train_step(
    model: decoder.Decoder,
    experts: Experts,
    run: decoder.Run,
    *,
    scanned: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step ``(state, batch) -> (state, loss)`` and its abstract arguments.

    Args:
      model: the decoder.
      experts: the experts of each layer.
      run: batch, dtype and rematerialisation.
      scanned: whether the layers are a `jax.lax.scan` over stacked parameters.
    """
    optimizer = optax.adamw(1e-4)

    def layer(p: decoder.Tree, x: jax.Array) -> jax.Array:
        return block(p, x, run.attention, experts)

    if run.remat != "none":
        layer = jax.checkpoint(layer, policy=decoder.POLICIES[run.remat])

    def loss_of(params: decoder.Tree, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = params["embedding"].astype(run.dtype)[inputs]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["blocks"])
        for k in range(0 if scanned else model.layers):
            x = layer(params[f"block_{k}"], x)
        x = decoder.normalised(x, params["norm"], "llama")
        logits = (x @ params["head"].astype(run.dtype)).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return found.mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": moments}, loss

    params = shapes(model, experts, run.sequence)
    params = _stacked(params, model.layers) if scanned else params
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    tokens = jax.ShapeDtypeStruct((run.batch, run.sequence + 1), jnp.int32)
    return step, (state, tokens)
