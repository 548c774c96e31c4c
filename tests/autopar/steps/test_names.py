"""Tests the names of operators in plans."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import autopar


def test_a_table_that_the_step_holds_is_named() -> None:
    """It is an input of the program, and no argument: it has no path."""
    table = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(4, 16)

    def step(w: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(
            lambda w: jnp.mean((rows @ w @ jnp.asarray(table).T) ** 2)
        )(w)
        return w - 0.1 * grad, loss

    structs = (jax.ShapeDtypeStruct(s, np.float32) for s in ((16, 16), (64, 16)))
    plan = autopar.plan(step, *structs, cluster="4:cpu", seconds=None)

    kinds = {node.name: node.kind for node in plan.nodes}
    assert kinds["constant"] == "input"
