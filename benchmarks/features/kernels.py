"""Features: Pallas kernels, foreign functions, custom partitioning and attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from feature import ROWS, WIDTH, Feature, X, Y, between, descent, layers, numbers
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, function in BETWEEN.items():
        step = descent(between(function))
        yield Feature(f"kernel: {name}", step, layers, (X, Y))
    tokens = numbers(5, ROWS, 4, 2 * WIDTH)
    for name, options in ATTENTIONS.items():
        step = descent(functools.partial(_attention, options))
        yield Feature(f"kernel: attention {name}", step, _projections, (tokens,))


def _double(x: Any, out: Any) -> None:
    out[...] = jnp.sin(x[...]) * 2


def _pallas(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double, out_shape=shape, interpret=True)(x)


def _blocks(x: Any) -> Any:
    spec = pl.BlockSpec((2, WIDTH), lambda k: (k, 0))
    return pl.pallas_call(
        _double,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 2,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )(x)


def _with_gradient(kernel: Any) -> Any:
    @jax.custom_vjp
    def run(x: Any) -> Any:
        return kernel(x)

    run.defvjp(lambda x: (kernel(x), x), lambda x, g: (g * 2 * jnp.cos(x),))
    return run


def _partitioned() -> Any:
    @custom_partitioning
    def sine(x: Any) -> Any:
        return jnp.sin(x) * 2

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        given = tuple(x.sharding for x in arguments)
        return mesh, lambda x: jnp.sin(x) * 2, result.sharding, given

    sine.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, given, result: given[0].sharding,
        sharding_rule="i j -> i j",
    )
    return sine


def _factors(x: Any) -> Any:
    square = x[:, :, None] * x[:, None, :] + jnp.eye(WIDTH) * 4
    made = jax.lax.linalg.lu(jax.lax.stop_gradient(square))[0]
    return x + 0.1 * jnp.sum(jax.lax.stop_gradient(made), 1)


BETWEEN = {
    "pallas": _with_gradient(_pallas),
    "pallas over blocks": _with_gradient(_blocks),
    "custom partitioning": _with_gradient(_partitioned()),
    "foreign function": _factors,
    "shard_map": lambda x: jax.shard_map(
        lambda v: jnp.sin(v) * 2,
        mesh=jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.sharding.PartitionSpec("rows"),
        out_specs=jax.sharding.PartitionSpec("rows"),
    )(x),
    "cholesky of rows": lambda x: (
        x
        + jnp.linalg.cholesky(x[:, :, None] * x[:, None, :] + jnp.eye(WIDTH) * 9)[:, 0]
    ),
    "ragged dot": lambda x: jax.lax.ragged_dot(
        x, jnp.stack([jnp.eye(WIDTH)] * 2), jnp.array([x.shape[0] // 2] * 2)
    ),
    "convolution": lambda x: jnp.squeeze(
        jax.lax.conv(x[:, None], jnp.ones((1, 1, 3)) / 3, (1,), "SAME"), 1
    ),
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x, n=2 * WIDTH - 2, axis=1)),
    "sort": lambda x: jnp.sort(x, axis=1),
    "top k": lambda x: x * (x >= jax.lax.top_k(x, 3)[0][:, -1:]),
}


def _projections() -> Any:
    return [jnp.asarray(numbers(k, 2 * WIDTH, 2 * WIDTH) / 4) for k in range(4)]


def _attention(options: dict[str, Any], weights: Any, x: Any) -> Any:
    q, k, v = ((x @ w).reshape(*x.shape[:2], 2, x.shape[2] // 2) for w in weights[:3])
    out = jax.nn.dot_product_attention(q, k, v, **options)
    return jnp.mean((out.reshape(x.shape) @ weights[3] - x) ** 2)


ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "of windows": {"local_window_size": 2},
}
