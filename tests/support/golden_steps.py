"""Train steps of many kinds, so large that every term of the cost model matters.

The arguments are ``ShapeDtypeStruct``s, so nothing is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import muon
from planner_steps import Workload, mlp_block, mlp_loss, trained

from autopar.steps.analysis import Analysis, analyse
from autopar.steps.microbatches import in_microbatches

_STEPS: dict[str, Callable[[], Workload]] = {}


def golden_step(function: Callable[[], Workload]) -> Callable[[], Workload]:
    _STEPS[function.__name__] = function
    return function


def names() -> tuple[str, ...]:
    return (*_STEPS, "mlp_adam_in_4", "blocks_in_2")


@functools.lru_cache(maxsize=2)  # tests of the same step follow one another
def analysis_of(name: str) -> Analysis:
    """The analysis of a step; with ``_in_4`` after the name, over four microbatches."""
    name, _, count = name.partition("_in_")
    found = analyse(*_STEPS[name]())
    return in_microbatches(found, int(count)) if count else found


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def stepping(
    loss: Callable[..., Any], params: Any, batch: Any, optimizer: Any = None
) -> Workload:
    optimizer = optimizer or optax.sgd(0.1)
    state = jax.eval_shape(optimizer.init, params)
    return trained(loss, optimizer), (params, state, batch)


def _mlp_params(width: int, hidden: int, layers: int) -> Any:
    one = {
        "up": struct(width, hidden),
        "bias": struct(hidden),
        "down": struct(hidden, width),
    }
    return [dict(one) for _ in range(layers)]


def _mlp_batch(rows: int, width: int) -> Any:
    return {"x": struct(rows, width), "y": struct(rows, width)}


@golden_step
def mlp_adam() -> Workload:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return stepping(
        mlp_loss, _mlp_params(512, 2048, 2), _mlp_batch(512, 512), optimizer
    )


@golden_step
def adafactor() -> Workload:
    return stepping(
        mlp_loss,
        _mlp_params(1024, 1024, 1),
        _mlp_batch(64, 1024),
        optax.adafactor(1e-3),
    )


@golden_step
def muon_step() -> Workload:
    return stepping(
        mlp_loss, _mlp_params(256, 512, 1), _mlp_batch(256, 256), muon(1e-3)
    )


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def _attend(p: Any, x: jax.Array, heads: int) -> jax.Array:
    q, k, v = (
        (x @ p[n]).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for n in "qkv"
    )
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32))
    return (weights.astype(x.dtype) @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"]


@golden_step
def blocks() -> Workload:
    """A GPT in bfloat16 whose blocks are scanned and rematerialised."""
    width, layers, vocabulary = 256, 4, 1024

    def loss(params: Any, batch: Any) -> jax.Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = low["table"][batch["tokens"]]

        @jax.checkpoint
        def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = x + _attend(p, _norm(x, p["scale"]), 4)
            return mlp_block(p, x), None

        x, _ = jax.lax.scan(block, x, low["blocks"])
        logits = (x @ low["table"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    square = struct(layers, width, width)
    stacked = {
        **dict.fromkeys("qkvo", square),
        "up": struct(layers, width, 4 * width),
        "bias": struct(layers, 4 * width),
        "down": struct(layers, 4 * width, width),
        "scale": struct(layers, width),
    }
    params = {"table": struct(vocabulary, width), "blocks": stacked}
    tokens = struct(32, 128, dtype=jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    return stepping(loss, params, batch, optax.adamw(1e-3))


@golden_step
def experts() -> Workload:
    """A mixture of experts that groups rows by expert for ``ragged_dot``."""
    count = 8

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jnp.argmax(gates, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.sum(jax.nn.one_hot(chosen, count, dtype=jnp.int32), 0)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], params["up"], sizes))
        made = jax.lax.ragged_dot(hidden, params["down"], sizes)
        out = jnp.zeros_like(x).at[order].set(made) * gates.max(-1)[:, None]
        return jnp.mean((out - batch["y"]) ** 2)

    params = {
        "router": struct(256, count),
        "up": struct(count, 256, 512),
        "down": struct(count, 512, 256),
    }
    return stepping(loss, params, _mlp_batch(1024, 256), optax.adam(1e-3))


@golden_step
def convolutions() -> Workload:
    """Convolutions in bfloat16, with batch normalisation and momentum."""

    def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, batch: Any) -> jax.Array:
        x = convolve(batch["x"].astype(jnp.bfloat16), params["stem"], 2)
        for w in params["blocks"]:
            y = convolve(jax.nn.relu(x), w)
            mean, square = jnp.mean(y, (0, 1, 2)), jnp.mean(y**2, (0, 1, 2))
            x = x + (y - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)
        logits = x.mean((1, 2)).astype(jnp.float32) @ params["last"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    half = jnp.bfloat16
    params = {
        "stem": struct(3, 3, 4, 64, dtype=half),
        "blocks": [struct(3, 3, 64, 64, dtype=half)] * 2,
        "last": struct(64, 100),
    }
    batch = {"x": struct(128, 32, 32, 4), "labels": struct(128, dtype=jnp.int32)}
    return stepping(loss, params, batch, optax.sgd(0.1, momentum=0.9))


@golden_step
def recurrent() -> Workload:
    """An LSTM over time, with teacher forcing."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            gates = x @ params["in"] + h @ params["rec"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((batch["x"].shape[1], 256))
        _, out = jax.lax.scan(cell, (start, start), batch["x"])
        return jnp.mean((out @ params["out"] - batch["y"]) ** 2)

    params = {
        "in": struct(128, 1024),
        "rec": struct(256, 1024),
        "bias": struct(1024),
        "out": struct(256, 128),
    }
    batch = {"x": struct(32, 64, 128), "y": struct(32, 64, 128)}
    return stepping(loss, params, batch, optax.rmsprop(1e-3))


@golden_step
def tables() -> Workload:
    """A recommendation model with large tables, of which a batch reads a few rows."""

    def loss(params: Any, batch: Any) -> jax.Array:
        rows = [t[batch["ids"][:, k]] for k, t in enumerate(params["tables"])]
        x = jnp.concatenate([batch["dense"], *rows], -1)
        hidden = jax.nn.relu(x @ params["up"])
        logits = (hidden @ params["down"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()

    params = {
        "tables": [struct(2**k, 64) for k in (10, 14, 18)],
        "up": struct(256, 512),
        "down": struct(512, 1),
    }
    batch = {
        "ids": struct(2048, 3, dtype=jnp.int32),
        "dense": struct(2048, 64),
        "y": struct(2048),
    }
    return stepping(loss, params, batch, optax.adagrad(1e-2))


@golden_step
def fused_attention() -> Workload:
    """Attention by cuDNN's kernel; plans may use ring attention."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"].astype(jnp.bfloat16)
        q, k, v = ((x @ params[n]).reshape(8, 1024, 4, 64) for n in "qkv")
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        out = out.reshape(x.shape) @ params["o"]
        return jnp.mean(out.astype(jnp.float32) ** 2)

    params = dict.fromkeys("qkvo", struct(256, 256, dtype=jnp.bfloat16))
    return stepping(loss, params, {"x": struct(8, 1024, 256)})


@golden_step
def branches() -> Workload:
    """A step with a branch, a while loop, a sort, a Fourier transform and a solve."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["a"]
        x = jax.lax.cond(
            batch["n"] > 1, lambda x: jnp.tanh(x @ params["b"]), lambda x: 2.0 * x, x
        )
        top, _ = jax.lax.top_k(jnp.sort(x, axis=0), 16)
        spectrum = jnp.abs(jnp.fft.rfft(x, axis=1))
        gram = params["b"].T @ params["b"] + jnp.eye(128)
        solved = jnp.linalg.solve(gram, x[:128].T)
        return jnp.mean(top) + jnp.mean(spectrum) + jnp.mean(solved**2)

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        steps, _ = jax.lax.while_loop(
            lambda c: c[0] < batch["n"],
            lambda c: (c[0] + 1, jnp.tanh(c[1] @ params["a"])),
            (0, batch["x"]),
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, value + steps

    params = {"a": struct(128, 128), "b": struct(128, 128)}
    batch = {"x": struct(256, 128), "n": struct(dtype=jnp.int32)}
    return step, (params, batch)
