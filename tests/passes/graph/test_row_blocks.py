"""Rows that are sorted in blocks, against rows that are sorted together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expert_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.row_blocks import sort_in_blocks
from autopar_passes.graph.row_orders import RowOrders, find_row_orders
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.trace import open_arguments, trace_call


def rewritten(
    step: Callable[..., Any], args: tuple[Any, ...], blocks: int
) -> tuple[Program, Program, RowOrders]:
    """The program of a step, the program in blocks, and the orders in it."""
    traced = trace_call(step, open_arguments(step, args))
    rules = {op.equation: op.rule for op in step_graph(traced).operators}
    orders = find_row_orders(traced.program, rules, blocks)
    made = sort_in_blocks(traced.program, orders, blocks)
    return traced.program, made, orders


def kinds(program: Program) -> list[str]:
    return [eqn.primitive for eqn in walk(program.body)]


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize(
    ("again", "scanned"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("form", expert_steps.FORMS)
def test_blocks_leave_results_as_they_are(
    form: str, again: bool, scanned: bool, blocks: int
) -> None:
    step, *args = expert_steps.training(form, again=again, scanned=scanned)
    plain, made, orders = rewritten(step, tuple(args), blocks)

    assert not orders.refused
    assert "ragged_dot_general" not in kinds(made)
    assert "ragged_dot_in_blocks" in kinds(made)
    flat = jax.tree.leaves(args)
    for a, b in zip(evaluate(plain, *flat), evaluate(made, *flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def _sums_before(y: jax.Array, **_: Any) -> jax.Array:
    return jnp.cumsum(y, 0)


def _noise(y: jax.Array, **_: Any) -> jax.Array:
    return y * jax.random.normal(jax.random.key(0), y.shape)


def _numbered(y: jax.Array, **_: Any) -> jax.Array:
    return y * jnp.arange(len(y), dtype=y.dtype)[:, None]


def _first_rows(y: jax.Array, **_: Any) -> jax.Array:
    return jnp.concatenate([y[:8], y[8:] * 2])


@pytest.mark.parametrize(
    "between", [_sums_before, _noise, _numbered, _first_rows, None]
)
@pytest.mark.parametrize("sizes", ["counts", "limited"])
def test_rows_that_depend_on_their_order_stay_whole(
    between: Callable[..., jax.Array] | None, sizes: str
) -> None:
    """Only the last case with plain counts may be sorted in blocks."""

    def step(p: jax.Array, router: jax.Array, x: jax.Array) -> Any:
        def loss(p: jax.Array) -> jax.Array:
            keys = jnp.argmax(x @ router, -1)
            order = jnp.argsort(keys)
            counts = jnp.bincount(keys, length=4)
            if sizes == "limited":
                counts = jnp.minimum(counts, 6)
            y = jax.lax.ragged_dot(x[order], p, counts)
            y = y if between is None else between(y, order=order)
            return jnp.mean(y[jnp.argsort(order)] ** 2)

        return p - jax.grad(loss)(p)

    args = jnp.ones((4, 8, 8)), jnp.ones((8, 4)), jnp.ones((16, 8))
    plain, made, orders = rewritten(step, args, 4)
    if between is None and sizes == "counts":
        assert orders
    else:
        assert made is plain
        assert orders.refused


def test_keys_of_the_batch_may_be_negative() -> None:
    """Negative keys come before the first group, and shift all others."""

    def step(p: jax.Array, x: jax.Array, keys: jax.Array) -> Any:
        order = jnp.argsort(keys)
        sizes = jnp.bincount(keys, length=4)
        return p, jax.lax.ragged_dot(x[order], p, sizes)[jnp.argsort(order)]

    args = jnp.ones((4, 8, 8)), jnp.ones((16, 8)), jnp.zeros((16,), jnp.int32)
    plain, made, orders = rewritten(step, args, 4)
    assert made is plain
    assert set(orders.refused.values()) == {"the sorted keys may be negative"}
