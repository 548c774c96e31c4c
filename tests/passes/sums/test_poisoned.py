"""Tests what a non-finite gradient spoils, and what it only decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.program.trace import trace
from autopar_passes.sums.poisoned import Poisoned, find_poisoned

WIDTH = 4


def gradient(w: jax.Array, batch: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)


def found(body: Callable[[jax.Array, dict[str, Any]], dict[str, Any]]) -> Poisoned:
    """The findings for a step with ``w``, a scale and a counter as state, in this
    order.
    """

    def step(state: dict[str, Any], batch: jax.Array) -> Any:
        return body(gradient(state["a_w"], batch), state)

    state = {
        "a_w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "b_scale": jax.ShapeDtypeStruct((), jnp.float32),
        "c_count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    batch = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    traced = trace(step, (state, batch))
    return find_poisoned(traced.program, step_graph(traced), (), range(3))


def plain(g: jax.Array, s: Any) -> Any:
    return {**s, "a_w": s["a_w"] - g, "c_count": s["c_count"] + 1}


def clipped(g: jax.Array, s: Any) -> Any:
    norm = jnp.linalg.norm(g)
    return plain(jnp.where(norm < 1, g, g / norm), s)


def scaled(g: jax.Array, s: Any) -> Any:
    good = jnp.all(jnp.isfinite(g))
    return {
        "a_w": jnp.where(good, s["a_w"] - g, s["a_w"]),
        "b_scale": jnp.where(good, s["b_scale"], s["b_scale"] / 2),
        "c_count": s["c_count"] + (~good).astype(jnp.int32),
    }


def by_norm(g: jax.Array, s: Any) -> Any:
    """A step that carries a norm, and counts in a branch."""
    norm = jnp.linalg.norm(g)
    count = jax.lax.cond(norm < 1, lambda c: c, lambda c: c + 1, s["c_count"])
    return {"a_w": s["a_w"] - g, "b_scale": norm, "c_count": count}


def in_branches(g: jax.Array, s: Any) -> Any:
    w, scale = jax.lax.cond(
        jnp.isfinite(g).all(),
        lambda: (s["a_w"] - g, s["b_scale"]),
        lambda: (s["a_w"], s["b_scale"] / 2),
    )
    return {**s, "a_w": w, "b_scale": scale}


def in_a_loop(g: jax.Array, s: Any) -> Any:
    """A step whose gradient reaches the parameters only in the second iteration."""

    def body(carry: Any, _: Any) -> Any:
        w, late, count = carry
        return (w - late, g, count + 1), None

    first = (s["a_w"], jnp.zeros_like(g), s["c_count"])
    (w, _, count), _ = jax.lax.scan(body, first, length=2)
    return {"a_w": w, "b_scale": s["b_scale"] * 2, "c_count": count}


def until_small(g: jax.Array, s: Any) -> Any:
    """A loop whose length depends on the gradient, but whose result does not."""

    def small(carry: Any) -> Any:
        return jnp.linalg.norm(carry[0]) < 1

    grown, count = jax.lax.while_loop(
        small, lambda c: (c[0] * 2, c[1] + 1), (g, s["c_count"])
    )
    return {**s, "a_w": s["a_w"] - grown, "c_count": count}


@pytest.mark.parametrize(
    ("body", "results", "guarded"),
    [
        (plain, {0}, False),
        (clipped, {0}, False),
        (scaled, {0}, True),
        (by_norm, {0, 1}, True),
        (in_branches, {0}, True),
        (in_a_loop, {0}, False),
        (until_small, {0}, True),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_spoilt(body: Any, results: set[int], guarded: bool) -> None:
    assert found(body) == Poisoned(frozenset(results), guarded)
