"""Features: loops, branches, custom derivatives and rematerialisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from feature import Feature, X, Y, between, descent, layers, stacked


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, function in ROWS.items():
        loss = between(function)
        yield Feature(f"control flow: {name}", descent(loss), layers, (X, Y))
    for name, loss in LOOPS.items():
        yield Feature(f"control flow: {name}", descent(loss), stacked, (X, Y))


def _while(x: Any) -> Any:
    def body(carry: Any) -> Any:
        k, v = carry
        return k + 1, jnp.sin(v)

    held = jax.lax.stop_gradient(x)
    return x + jax.lax.while_loop(lambda c: c[0] < 3, body, (0, held))[1]


def _nested(x: Any) -> Any:
    def outer(c: Any, k: Any) -> Any:
        inner = jax.lax.fori_loop(0, 2, lambda i, v: v * 0.9 + i, c)
        return jax.lax.cond(k > 0, jnp.sin, lambda v: v, inner), jnp.sum(inner, 1)

    out, sums = jax.lax.scan(outer, x, jnp.arange(3))
    return out + sums[0][:, None]


@jax.custom_jvp
def _own_jvp(x: Any) -> Any:
    return jnp.sin(x)


@_own_jvp.defjvp
def _own_jvp_rule(primals: Any, tangents: Any) -> Any:
    return _own_jvp(*primals), 0.5 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def _own_vjp(x: Any) -> Any:
    return jnp.sin(x)


_own_vjp.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),)
)


def _columns(x: Any) -> Any:
    return jax.lax.associative_scan(jnp.add, x, axis=1) / 8


ROWS = {
    "cond": lambda x: jax.lax.cond(jnp.array(True), jnp.sin, jnp.cos, x),
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos, jnp.tanh], x),
    "while": _while,
    "fori": lambda x: jax.lax.fori_loop(0, 3, lambda k, v: jnp.sin(v) + k, x),
    "nested": _nested,
    "associative scan": _columns,
    "map over rows by vmap": jax.vmap(lambda v: v / (1 + jnp.sum(v**2))),
    "map over columns": lambda x: jax.lax.map(jnp.sin, x.T).T,
    "custom jvp": _own_jvp,
    "custom vjp": _own_vjp,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "checkpoint policy": jax.checkpoint(
        lambda x: jnp.sin(x @ jnp.eye(8)), policy=jax.checkpoint_policies.dots_saveable
    ),
    "named jit": jax.jit(lambda x: jnp.sin(x) + 1),
    "linear solve": lambda x: (
        jax.scipy.linalg.solve(jnp.eye(8) * 2 + 0.1, x.T, assume_a="pos").T
    ),
    "gradient within": lambda x: jax.grad(lambda v: jnp.sum(jnp.sin(v) ** 2))(x),
    "jvp within": lambda x: jax.jvp(jnp.sin, (x,), (jnp.ones_like(x),))[1],
    "optimization barrier": lambda x: jax.lax.optimization_barrier(x * 2),
}


def _scan(weights: Any, x: Any, y: Any) -> Any:
    out, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)
    return jnp.mean((out - y) ** 2)


def _scan_checkpoint(weights: Any, x: Any, y: Any) -> Any:
    layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), jnp.mean(c)))
    out, sums = jax.lax.scan(layer, x, weights)
    return jnp.mean((out - y) ** 2) + 0.1 * jnp.sum(sums)


def _scan_twice(weights: Any, x: Any, y: Any) -> Any:
    out, _ = jax.lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), x, weights, reverse=True, unroll=2
    )
    return jnp.mean((out - y) ** 2)


def _scan_of_three(weights: Any, x: Any, y: Any) -> Any:
    return _scan(weights[:3], x, y)


LOOPS = {
    "scan": _scan,
    "scan of checkpoints": _scan_checkpoint,
    "scan in reverse": _scan_twice,
    "scan of three": _scan_of_three,
}
