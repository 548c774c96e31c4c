"""Small train steps that together use all constructs of JAX and Flax that we plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training import train_state
from planner_steps import (
    Workload,
    mlp_batch,
    mlp_block,
    mlp_loss,
    mlp_params,
    normal,
    training,
)

_CASES: dict[str, Callable[[], Workload]] = {}


def case(function: Callable[[], Workload]) -> Callable[[], Workload]:
    _CASES[function.__name__] = function
    return function


def names() -> list[str]:
    return sorted(_CASES)


def workload(name: str) -> Workload:
    return _CASES[name]()


@case
def mlp_sgd() -> Workload:
    return training(mlp_loss, mlp_params(), mlp_batch())


@case
def mlp_adamw_clip() -> Workload:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
    return training(mlp_loss, mlp_params(), mlp_batch(), optimizer)


@case
def mlp_adafactor() -> Workload:
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    return training(mlp_loss, mlp_params(layers=1), mlp_batch(), optimizer)


@case
def mlp_lion_multisteps() -> Workload:
    optimizer = optax.MultiSteps(optax.lion(1e-2), every_k_schedule=2)
    return training(
        mlp_loss, mlp_params(layers=1), mlp_batch(), optimizer.gradient_transformation()
    )


@case
def mlp_bfloat16() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = batch["x"].astype(jnp.bfloat16)
        for p in low:
            x = mlp_block(p, x)
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    return training(loss, mlp_params(layers=1), mlp_batch())


@case
def attention() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        q, k, v = (
            (x @ params[n]).reshape(*x.shape[:2], 4, 4).transpose(0, 2, 1, 3)
            for n in ("q", "k", "v")
        )
        scores = q @ k.swapaxes(-1, -2) / 2.0
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        out = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        out = x + out @ params["o"]
        norm = (out - out.mean(-1, keepdims=True)) * jax.lax.rsqrt(
            out.var(-1, keepdims=True) + 1e-5
        )
        return jnp.mean((norm * params["scale"]) ** 2 * batch["w"])

    params = {n: normal(i, 16, 16) for i, n in enumerate("qkvo")}
    params["scale"] = normal(9, 16)
    batch = {"x": normal(10, 4, 8, 16), "w": normal(11, 4, 8, 16)}
    return training(loss, params, batch)


@case
def embedding() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = jnp.take(params["table"], batch["tokens"], axis=0)
        x = x + params["position"][None, : x.shape[1]]
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    params = {"table": normal(0, 32, 16), "position": normal(1, 16, 16)}
    tokens = jax.random.randint(jax.random.key(2), (8, 8), 0, 32)
    labels = jax.random.randint(jax.random.key(3), (8, 8), 0, 32)
    return training(loss, params, {"tokens": tokens, "labels": labels})


class _ConvNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        # A bias before the normalisation has a zero gradient, which would be rounding
        # noise.
        x = linen.Conv(8, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.max_pool(jax.nn.relu(x), (2, 2), (2, 2))
        x = linen.Conv(8, (3, 3), strides=(2, 2), feature_group_count=2)(x)
        return linen.Dense(8)(x.mean((1, 2)))


class BatchNormState(train_state.TrainState):
    batch_stats: Any


@case
def conv_batchnorm() -> Workload:
    """A Linen `TrainState` with batch statistics."""
    model = _ConvNet()
    x = normal(1, 8, 8, 8, 4)
    variables = model.init(jax.random.key(0), x, train=True)
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9),
    )

    def step(state: BatchNormState, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"],
                train=True,
                mutable=["batch_stats"],
            )
            value = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
            return value.mean(), (new, out)

        (value, (new, out)), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params
        )
        accuracy = (out.argmax(-1) == batch["y"]).mean()
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": value, "accuracy": accuracy}

    return step, (state, {"x": x, "y": jnp.arange(8) % 8})


def _stacked(layers: int = 4) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *mlp_params(layers=layers))


@case
def scan_layers() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, norms = jax.lax.scan(
            lambda x, p: (mlp_block(p, x), (x**2).mean(-1)), batch["x"], params
        )
        return jnp.mean((x - batch["y"]) ** 2) + 1e-3 * norms.sum()

    return training(loss, _stacked(), mlp_batch(), optax.adam(1e-2, eps=1e-3))


@case
def scan_remat_layers() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        block = jax.checkpoint(lambda x, p: (mlp_block(p, x), None))
        x, _ = jax.lax.scan(block, batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    return training(loss, _stacked(), mlp_batch())


@case
def scan_time() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(x @ params["in"] + h @ params["rec"])
            return h, h

        start = jnp.zeros((8, 16))
        _, out = jax.lax.scan(cell, start, batch["x"], reverse=True)
        return jnp.mean((out @ params["out"] - batch["y"]) ** 2)

    params = {"in": normal(0, 8, 16), "rec": normal(1, 16, 16), "out": normal(2, 16, 8)}
    return training(loss, params, {"x": normal(3, 6, 8, 8), "y": normal(4, 6, 8, 8)})


@case
def fori_loop() -> Workload:
    """A loop with a Python bound becomes a scan, one with an array bound a while."""

    def step(params: Any, batch: Any) -> Any:
        def power(i: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ params["w"]) + 0.1 * i

        x = jax.lax.fori_loop(0, 5, power, batch["x"])
        y = jax.lax.fori_loop(0, batch["n"], power, batch["x"] + 1.0)
        z = jax.lax.while_loop(
            lambda c: (c[0] < 3) & (jnp.sum(c[1]) < 1e6),
            lambda c: (c[0] + 1, c[1] * 2.0 @ params["w"]),
            (0, batch["x"]),
        )
        return {"w": params["w"] + 0.01 * (x.T @ y)}, z[1].sum() + z[0]

    batch = {"x": normal(1, 8, 16), "n": jnp.int32(3)}
    return step, ({"w": normal(0, 16, 16)}, batch)


@case
def cond() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        x = jax.lax.cond(
            jnp.sum(x) > 0,
            lambda x: jnp.tanh(x @ params["a"]),
            lambda x: x @ params["b"] + 1.0,
            x,
        )
        x = jax.lax.switch(
            batch["k"], [lambda x: x, jnp.sin, lambda x: jnp.zeros_like(x)], x
        )
        return jnp.mean((x - batch["y"]) ** 2)

    params = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    return training(loss, params, {**mlp_batch(), "k": jnp.int32(1)})


@case
def remat() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = jax.checkpoint(mlp_block)(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return training(loss, mlp_params(), mlp_batch())


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


_clipped.defvjp(
    lambda x: (jnp.maximum(x, 0.0), x),
    lambda x, g: (jnp.where(jnp.abs(x) < 1.0, g, 0.1 * g),),
)


@jax.custom_jvp
def _soft(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@_soft.defjvp
def _soft_jvp(primals: Any, tangents: Any) -> Any:
    return _soft(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


@case
def custom_rules() -> Workload:
    """A step with custom_vjp, custom_jvp, and jit within jit."""

    @jax.jit
    def inner(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: _soft(x) * 2.0)(_clipped(x @ w))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = inner(params["b"], inner(params["a"], batch["x"]))
        return jnp.mean((x - batch["y"]) ** 2)

    params = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    return training(loss, params, mlp_batch())


@case
def dropout() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        keys = jax.random.split(batch["key"], len(params))
        for key, p in zip(keys, params, strict=True):
            keep = jax.random.bernoulli(key, 0.8, x.shape)
            x = mlp_block(p, jnp.where(keep, x / 0.8, 0.0))
        return jnp.mean((x - batch["y"]) ** 2)

    return training(loss, mlp_params(), {**mlp_batch(), "key": jax.random.key(7)})


class _NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


@case
def nnx_mutated() -> Workload:
    model = _NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)

    def step(model: _NnxNet, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        def loss(model: _NnxNet) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, mlp_batch())


@case
def data_movement() -> Workload:
    """With sort, top_k, cumsum, concatenate, slice, pad, argmax, reverse and roll."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["w"]
        top, index = jax.lax.top_k(x, 4)
        picked = jnp.take_along_axis(batch["y"], index, axis=1)
        parts = jnp.concatenate([jnp.sort(x, axis=0), jnp.cumsum(x, axis=1)], axis=1)
        parts = jnp.pad(parts[:, 4:20], ((0, 0), (8, 8)))
        rolled = jnp.roll(parts, 3, axis=1) * jnp.flip(parts, axis=0)
        best = jnp.argmax(x, axis=1)
        total = jnp.mean(rolled**2) + jnp.mean(top * picked)
        total += jnp.mean(jnp.maximum(x.max(0), 0.1) * x.min(0)) + x[best % 8, 0].sum()
        tail = jax.lax.dynamic_slice(x, (batch["n"], 0), (2, 16))
        updated = jax.lax.dynamic_update_slice(x, tail * 2.0, (0, 0))
        return total + jnp.mean(updated), best

    def step(params: Any, batch: Any) -> Any:
        (value, best), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, (value, best)

    return step, ({"w": normal(0, 16, 16)}, {**mlp_batch(), "n": jnp.int32(3)})


@case
def mixture_of_experts() -> Workload:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        gates = jax.nn.softmax(x @ params["router"])
        weight, index = jax.lax.top_k(gates, 2)
        dispatch = jax.nn.one_hot(index, 8) * weight[..., None]
        sent = jnp.einsum("nke,nd->end", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("end,edh->enh", sent, params["up"]))
        out = jnp.einsum("enh,ehd->nd", hidden, params["down"])
        return jnp.mean((out - batch["y"]) ** 2)

    params = {
        "router": normal(0, 16, 8),
        "up": normal(1, 8, 16, 32),
        "down": normal(2, 8, 32, 16),
    }
    return training(loss, params, mlp_batch(16))


@case
def complex_spectrum() -> Workload:
    """A step with fft, which the compiler only partly partitions, and a solve."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["w"]
        spectrum = jnp.abs(jnp.fft.rfft(x, axis=1))
        gram = params["w"].T @ params["w"] + 4.0 * jnp.eye(16)
        solved = jnp.linalg.solve(gram, x.T)
        return jnp.mean(spectrum) + jnp.mean(solved**2)

    return training(loss, {"w": normal(0, 16, 16)}, mlp_batch())


@case
def microbatches() -> Workload:
    """Gradients accumulated by a scan over the microbatches of a reshaped batch."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        split = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(mlp_loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = jax.lax.scan(one, zeros, split)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    optimizer = optax.adam(1e-2, eps=1e-3)
    params = mlp_params(layers=1)
    return step, (params, optimizer.init(params), mlp_batch(16))


@case
def callbacks() -> Workload:
    """A step with callbacks without results, and one that cannot be sharded."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["w"]
        jax.debug.callback(lambda value: None, x.sum())
        scale = jax.pure_callback(
            lambda v: v * 2.0, jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.lax.stop_gradient(x),
        )  # fmt: skip

        def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            jax.debug.callback(lambda value: None, row)
            return total + row, None

        total, _ = jax.lax.scan(body, jnp.zeros(16), x)
        return jnp.mean((x * scale - batch["y"]) ** 2) + total.sum()

    return training(loss, {"w": normal(0, 16, 16)}, mlp_batch())


@case
def more_primitives() -> Workload:
    """Scatter, pooling, transposed convolution, associative scan, search and QR."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["w"]
        image = x.reshape(8, 4, 4, 1) * params["w"][0].reshape(1, 1, 1, 16)
        pooled = linen.avg_pool(image, (2, 2), (2, 2)).mean((1, 2))
        grown = jax.lax.conv_transpose(
            image, params["k"], (2, 2), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        prefix = jax.lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=1)
        rows = jax.lax.map(lambda r: jnp.sin(r) * r.sum(), x)
        place = jnp.searchsorted(batch["grid"], x)
        written = jnp.zeros((8, 32)).at[:, batch["index"]].set(x, unique_indices=True)
        q, r = jnp.linalg.qr(params["w"] + 4.0 * jnp.eye(16))
        order = jnp.argsort(x, axis=1)
        picked = jnp.take_along_axis(x, order, axis=1)
        return (
            jnp.mean(pooled * prefix)
            + jnp.mean(grown**2)
            + jnp.mean(jnp.logaddexp(rows, place))
            + jnp.mean(jax.nn.logsumexp(written, axis=1) * picked[:, 0])
            + 1e-3 * jnp.mean(jnp.abs(q @ r) * jnp.tril(q))
        )

    params = {"w": normal(0, 16, 16), "k": normal(1, 3, 3, 16, 8)}
    index = jnp.arange(16) * 2
    batch = {**mlp_batch(), "grid": jnp.linspace(-1.0, 1.0, 16), "index": index}
    return training(loss, params, batch)
