"""Tests the buffers of copies that are made for readers, on CPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planner_steps import mlp_batch, mlp_params, training

import autopar
from autopar.cost.buffers import buffers, contracts_first
from autopar.cost.live import habits_of
from autopar.layouts.assignment import Assignment
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import Role

HABITS = habits_of(autopar.Cluster.parse("8:cpu").device)
WIDTH, HIDDEN, ROWS = 8, 24, 40


def analysed(loss: Any) -> Analysis:
    params = mlp_params(width=WIDTH, hidden=HIDDEN, layers=2)
    batch = mlp_batch(ROWS, WIDTH)
    return analyse(*training(loss, params, batch, optax.sgd(1e-2)))


def dense(dtype: Any) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"].astype(dtype)
        for p in params:
            x = x + jnp.tanh(x @ p["up"].astype(dtype)) @ p["down"].astype(dtype)
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    return loss


def normed(params: Any, batch: Any) -> jax.Array:
    """Layers that divide by a standard deviation and have a scale, which both passes
    read.
    """
    x = batch["x"]
    for p in params:
        square = jnp.mean(x * x, axis=-1, keepdims=True)
        factor = jax.lax.rsqrt(square + 1e-6) * p["bias"][:WIDTH].reshape(1, WIDTH)
        x = x + jnp.tanh((x * factor) @ p["up"]) @ p["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def whole(analysis: Analysis) -> Assignment:
    """A plan in which each of eight devices does all of the work."""
    nodes = analysis.contraction.nodes
    strategies = tuple(((),) * len(node.factors) for node in nodes)
    return Assignment(analysis, (8,), strategies, {})


def test_operands_of_16_bits_are_there_in_32_bits() -> None:
    """Every operand has a buffer of twice its bytes, until its last product."""
    analysis = analysed(dense(jnp.bfloat16))
    life = analysis.life(HABITS)
    graph = analysis.graph
    found = buffers(whole(analysis), life)

    for value in life.widened.operands:
        wide = [
            b.end
            for b in found
            if b.value == value and b.nbytes == 2 * graph.values[value].nbytes
        ]
        products = [
            life.time[op.index]
            for op in graph.operators
            if op.kind == "dot_general" and value in op.inputs
        ]
        assert products
        assert max(wide) >= max(products)


def test_scales_and_deviations_lie_at_the_size_of_activations() -> None:
    """From when they are there until the backward pass of their layer.

    The first layer reads the batch, which needs no gradient, and so no factor.
    """
    analysis = analysed(normed)
    life = analysis.life(HABITS)
    found = [b for b in buffers(whole(analysis), life) if b.value in life.spread]

    assert len(life.spread) == 1
    assert all(len(arrays) == 2 for arrays in life.spread.values())
    assert [b.nbytes for b in found] == [4 * ROWS * WIDTH] * 2
    for value, arrays in life.spread.items():
        starts = {life.early[v] for v in arrays}
        assert {b.start for b in found if b.value == value} == starts
        last = max(
            life.reads[op.index]
            for op in analysis.graph.operators
            if value in op.inputs
        )
        assert {b.end for b in found if b.value == value} == {last}


def test_32_bits_stay_as_they_are() -> None:
    analysis = analysed(dense(jnp.float32))
    graph = analysis.graph
    found = buffers(whole(analysis), analysis.life(HABITS))
    assert all(b.nbytes == graph.values[b.value].nbytes for b in found)


def test_parameters_are_copied_whose_update_may_come_first() -> None:
    """On one device no message makes updates wait: the gradient of the layer does.

    The last layer's first weights are read by the product that goes on to the first
    layer, and their own gradient does not need that. The first layer's first weights
    are not read in the backward pass.
    """
    analysis = analysed(dense(jnp.float32))
    life = analysis.life(HABITS)
    makers = analysis.contraction.producer
    copied = Counter(
        b.value
        for b in buffers(whole(analysis), life)
        if makers[b.value].kind == "input" and b.kind == "gathered copies"
    )
    paths = {i.value: i.path for i in analysis.graph.inputs}
    weights = {v for v, path in paths.items() if "up" in path or "down" in path}
    read = {
        v
        for op in analysis.graph.operators
        if op.role is Role.BACKWARD and op.kind == "dot_general"
        for v in op.inputs
    }

    assert set(copied) == weights & read
    assert len(copied) == 3
    assert set(copied.values()) == {1}


@pytest.mark.parametrize("contracted", [0, 1])
def test_products_that_contract_rows_turn_their_left_operand(contracted: int) -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, (((contracted,), (0,)), ((), ())))

    sizes = ((ROWS, WIDTH), (WIDTH, ROWS))[contracted], (ROWS, HIDDEN)
    if contracted:
        sizes = (WIDTH, ROWS), (ROWS, HIDDEN)
    arrays = [jax.ShapeDtypeStruct(s, np.float32) for s in sizes]
    graph = analyse(step, tuple(arrays)).graph
    product = next(op for op in graph.operators if op.kind == "dot_general")

    assert contracts_first(product) == (contracted == 0)
