"""Tests the values of a 16-bit program that CPUs keep in 32 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from planner_steps import mlp_batch, mlp_params, training

from autopar.steps.analysis import Analysis, analyse
from autopar.steps.rounding import NOT_WIDENED, find_widened, rounded_results
from autopar_passes.graph.operators import producers, readers
from autopar_passes.graph.roles import Role


def analysed(dtype: Any) -> Analysis:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"].astype(dtype)
        for p in params:
            y = jax.nn.softmax(x @ p["up"].astype(dtype))
            x = x + y @ p["down"].astype(dtype)
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    params = mlp_params(width=8, hidden=16, layers=2)
    return analyse(*training(loss, params, mlp_batch(8, 8), optax.sgd(1e-2)))


def test_nothing_is_widened_in_32_bits() -> None:
    analysis = analysed(jnp.float32)

    assert find_widened(analysis.graph) == NOT_WIDENED
    assert rounded_results(analysis.graph, frozenset()) == frozenset()


def test_operands_of_products_are_widened() -> None:
    graph = analysed(jnp.bfloat16).graph
    found = find_widened(graph)
    products = [op for op in graph.operators if op.kind == "dot_general"]

    assert len(products) > 4
    for op in products:
        for value in op.inputs:
            assert value is not None
            assert value in found.operands | found.held
    assert all(graph.values[v].dtype == jnp.bfloat16 for v in found.operands)


def test_what_a_sum_reads_is_held_in_32_bits() -> None:
    """The softmax adds its exponentials in float32."""
    graph = analysed(jnp.bfloat16).graph
    held = find_widened(graph).held
    makers = producers(graph.operators)

    assert {makers[v].kind for v in held} >= {"exp"}
    assert held.isdisjoint(find_widened(graph).operands)


def test_rounded_results_are_kept_for_the_backward_pass() -> None:
    analysis = analysed(jnp.bfloat16)
    graph, floating = analysis.graph, frozenset(analysis.contraction.floating)
    found = rounded_results(graph, floating)
    read = readers(graph.operators)

    assert found
    assert found.isdisjoint(floating)
    for value in found:
        assert {r.role for r, _ in read[value]} >= {Role.FORWARD, Role.BACKWARD}
