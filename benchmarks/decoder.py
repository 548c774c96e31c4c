"""Decoder-only models from published training runs, as steps on abstract arrays.

There are two families. ``gpt`` has layer normalisation, an MLP with GELU, learned
positions, and output weights that are tied to the embedding. ``llama`` has RMS
normalisation, a gated MLP, rotary positions, grouped keys and values, and separate
output weights. Parameters are float32 and are cast where they are used. The optimizer
is AdamW, or Muon for the matrices of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu import flash_attention

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder-only model.

    Attributes:
      family: ``gpt`` or ``llama``.
      layers: number of layers.
      d_model: width.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      head_dim: width of each head.
      ffn: width of the MLP.
      vocab: number of tokens.
    """

    family: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a model was trained.

    Attributes:
      sequence: tokens of a row.
      batch: rows of a batch.
      dtype: dtype of the computation.
      remat: ``none``; ``dots``: results of products without batch dimensions are kept;
        ``full``; or ``whole``: as ``full``, and the last product of each layer is
        computed again, too, although the backward pass does not need it.
      attention: implementation of ``jax.nn.dot_product_attention``, ``pallas`` for
        JAX's flash attention on TPUs, or ``plain``.
      optimizer: ``adamw`` or ``muon``.
    """

    sequence: int
    batch: int
    dtype: str
    remat: str
    attention: str
    optimizer: str = "adamw"


POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": None,
    "whole": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def shapes(model: Decoder, sequence: int) -> Tree:
    """The parameters, by name."""
    d, f, h = model.d_model, model.ffn, model.head_dim
    layer = {
        "norm_1": (d,),
        "query": (d, model.heads, h),
        "key": (d, model.kv_heads, h),
        "value": (d, model.kv_heads, h),
        "out": (model.heads, h, d),
        "norm_2": (d,),
        "up": (d, f),
        "down": (f, d),
    }
    whole: Tree = {"embedding": (model.vocab, d), "norm": (d,)}
    if model.family == "llama":
        layer["gate"] = (d, f)
        whole["head"] = (d, model.vocab)
    else:
        whole["positions"] = (sequence, d)
    blocks = {f"block_{k}": dict(layer) for k in range(model.layers)}
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        whole | blocks,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def normalised(x: jax.Array, scale: jax.Array, family: str) -> jax.Array:
    """Normalises rows in float32, as both families do."""
    y = x.astype(jnp.float32)
    if family == "gpt":
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of (batch, sequence, heads, head_dim)."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * rates
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, how: str) -> jax.Array:
    """Causal attention of (batch, sequence, heads, head_dim)."""
    groups = q.shape[2] // k.shape[2]
    if how in ("pallas", "plain"):  # they take no groups
        k, v = (jnp.repeat(x, groups, 2) if groups > 1 else x for x in (k, v))
    if how == "pallas":
        turned = (x.swapaxes(1, 2) for x in (q, k, v))
        scale = 1 / math.sqrt(q.shape[-1])
        mixed = flash_attention.flash_attention(*turned, causal=True, sm_scale=scale)
        return mixed.swapaxes(1, 2)
    if how != "plain":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def block(p: Tree, x: jax.Array, *, family: str, how: str) -> jax.Array:
    """One layer."""
    y = normalised(x, p["norm_1"], family)
    q, k, v = (
        jnp.einsum("bsd,dhk->bshk", y, p[name].astype(x.dtype))
        for name in ("query", "key", "value")
    )
    if family == "llama":
        q, k = rotated(q), rotated(k)
    mixed = attention(q, k, v, how)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, p["out"].astype(x.dtype))
    y = normalised(x, p["norm_2"], family)
    up = y @ p["up"].astype(x.dtype)
    if family == "llama":
        up = jax.nn.silu(y @ p["gate"].astype(x.dtype)) * up
    else:
        up = jax.nn.gelu(up)
    return x + up @ p["down"].astype(x.dtype)


@jax.custom_vjp
def needed(x: jax.Array) -> jax.Array:
    """Returns the array unchanged, and makes the backward pass depend on it."""
    return x


def _needed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def _waits(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return jax.lax.optimization_barrier((gradient, x))[:1]


needed.defvjp(_needed, _waits)


# For each matrix of a layer: the contracted dimensions, and the output dimensions.
_DIMENSIONS = {"query": ((0,), (1, 2)), "out": ((0, 1), (2,))}
_DIMENSIONS |= {"key": _DIMENSIONS["query"], "value": _DIMENSIONS["query"]}
_DIMENSIONS |= dict.fromkeys(("up", "gate", "down"), ((0,), (1,)))


def matrices(params: Tree) -> Any:
    """The matrices of layers in the form that Muon needs; None for other parameters."""
    return {
        name: {
            part: optax.contrib.MuonDimensionNumbers(*_DIMENSIONS[part])
            if part in _DIMENSIONS
            else None
            for part in own
        }
        if isinstance(own, dict)
        else None
        for name, own in params.items()
    }


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-4),
    "muon": lambda: optax.contrib.muon(1e-4, muon_weight_dimension_numbers=matrices),
}


def train_step(model: Decoder, run: Run) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step ``(state, batch) -> (state, loss)`` and its abstract arguments."""
    optimizer = OPTIMIZERS[run.optimizer]()
    how = {"family": model.family, "how": run.attention}

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        y = block(p, x, **how)
        return needed(y) if run.remat == "whole" else y

    if run.remat != "none":
        layer = jax.checkpoint(layer, policy=POLICIES[run.remat])

    def loss_of(params: Tree, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        table = params["embedding"].astype(run.dtype)
        x = table[inputs]
        if model.family == "gpt":
            x = x + params["positions"].astype(run.dtype)
        for k in range(model.layers):
            x = layer(params[f"block_{k}"], x)
        x = normalised(x, params["norm"], model.family)
        head = table.T if model.family == "gpt" else params["head"].astype(run.dtype)
        logits = (x @ head).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return found.mean()

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": moments}, loss

    params = shapes(model, run.sequence)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    tokens = jax.ShapeDtypeStruct((run.batch, run.sequence + 1), jnp.int32)
    return step, (state, tokens)
