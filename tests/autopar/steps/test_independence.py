"""Tests which collectives of a step need no result of another, and their places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.steps.analysis import analyse
from autopar_passes.graph.roles import Role

LAYERS = 3


def test_the_computation_around_a_loop_in_a_loop() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(c @ w), None

        def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.cos(jax.lax.scan(inner, c, None, length=2)[0]), None

        return jnp.exp(jax.lax.scan(outer, x, None, length=3)[0])

    found = analyse(step, (jnp.ones((4, 4)), jnp.ones((8, 4))))
    graph, known = found.graph, found.independent
    ends = {
        op.kind: (known.computations[op.index], known.outside[op.index])
        for op in graph.operators
    }

    whole = len(graph.operators)
    inside, around = ends["sin"]
    assert inside < around == ends["cos"][0] < whole
    assert ends["cos"] == (around, whole)
    assert ends["exp"] == (whole, whole)


def checkpointed(params: Any, batch: Any) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w.astype(jnp.bfloat16))

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jax.checkpoint(layer)(x, w)
        return (x.astype(jnp.float32) ** 2).sum()

    grads = jax.grad(loss)(params)
    norm = jnp.sqrt(sum((g**2).sum() for g in grads))
    large = (jnp.stack([g.max() for g in grads]) > norm).sum()
    return [p - g / norm * large for p, g in zip(params, grads, strict=True)]


def test_what_checkpointed_layers_read_is_behind_a_barrier_each() -> None:
    args = ([jnp.ones((8, 8))] * LAYERS, {"x": jnp.ones((16, 8), jnp.bfloat16)})
    found = analyse(checkpointed, args)
    graph, known = found.graph, found.independent
    maker = {v: op for op in graph.operators for v in op.outputs}

    # Each parameter, as it is and cast, on the way back alone; the batch, too.
    behind = [v for v in known.behind if graph.values[v].shape == (8, 8)]
    assert len({known.behind[v] for v in behind}) == LAYERS
    assert {maker[v].role for v in known.behind} == {Role.BACKWARD}
    cast = [v for v in behind if graph.values[v].dtype == jnp.bfloat16]
    assert len(cast) == LAYERS
    for value in cast:
        (before,) = maker[value].inputs
        assert before is not None
        assert known.behind[value] == known.behind[before]


def test_sums_of_the_update_that_others_are_made_of_wait() -> None:
    args = ([jnp.ones((8, 8))] * LAYERS, {"x": jnp.ones((16, 8), jnp.bfloat16)})
    found = analyse(checkpointed, args)
    sums = [
        op
        for op in found.graph.operators
        if op.role is Role.UPDATE
        and op.kind == "reduce_sum"
        and op.rule.reduced_factors
    ]

    first = [op for op in sums if op.class_index in found.independent.norms]

    # The last sum counts what is larger than the norm.
    assert first == sums[:LAYERS]
    assert len(sums) == LAYERS + 1


def test_gathers_of_the_update_wait_for_its_products_alone() -> None:
    def step(params: Any, moments: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: ((batch @ w) ** 2).sum())(params)
        moments = 0.9 * moments + grads
        plain = moments / (jnp.abs(moments) + 1e-8)
        turned = jnp.exp(jnp.sin(moments.T @ moments))  # as in Muon
        return params - plain - turned, moments

    found = analyse(step, [jnp.ones((8, 8))] * 2 + [jnp.ones((16, 8))])
    ops = [op for op in found.graph.operators if op.role is Role.UPDATE]
    known = found.independent.gathered

    gathered = {op.kind for op in ops if op.class_index in known}
    assert {"div", "abs"} <= gathered
    waiting = {op.kind for op in ops if op.class_index not in known}
    assert {"dot_general", "sin", "exp"} <= waiting
    # What the product reads waits for none.
    assert "transpose" in gathered
