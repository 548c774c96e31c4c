"""Tests contraction: which operators have a node of their own, and which follow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import planner_cases
import planner_harness as harness
import pytest

from autopar.layouts.strategies import layout_of, strategy_space
from autopar.steps.nodes import MIN_ELEMENTS
from autopar.steps.uses import node_dims

NAMES = planner_cases.names()


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kinds(case: harness.Case) -> list[str]:
    return [n.kind for n in case.contraction.nodes]


def test_elementwise_operators_follow() -> None:
    case = harness.prepare(lambda x: jnp.tanh(x * 2.0) + x, (struct(8, 16),))

    assert kinds(case) == ["input"]
    homes = case.contraction.homes.values()
    assert {h.node for h in homes} == {0}


def test_a_product_has_a_node_and_its_result_another() -> None:
    case = harness.prepare(lambda x, w: jnp.sin(x @ w), (struct(8, 16), struct(16, 32)))

    assert kinds(case) == ["input", "input", "contraction", "array"]
    product, result = case.contraction.nodes[2:]
    assert [size for size, _ in product.factors] == [8, 16, 32]
    assert [size for size, _ in result.factors] == [8, 32]


def test_a_transpose_follows_with_its_dimensions_exchanged() -> None:
    case = harness.prepare(lambda x: x.T + 1.0, (struct(8, 16),))

    start = case.contraction.homes[case.graph.inputs[0].value]
    end = case.contraction.homes[case.graph.outputs[0]]  # type: ignore[index]
    assert end.node == start.node
    assert end.dims == start.dims[::-1]


def test_a_small_reduction_follows_and_a_large_one_is_a_node() -> None:
    small = harness.prepare(lambda x: x.sum(1), (struct(8, 64),))
    large = harness.prepare(lambda x: x.sum(0), (struct(4, 64),))

    assert kinds(small) == ["input"]
    assert kinds(large) == ["input", "contraction", "array"]


def test_what_is_made_of_nothing_floats() -> None:
    case = harness.prepare(lambda x: x * jnp.arange(16.0), (struct(8, 16),))

    iota = next(op for op in case.graph.operators if op.kind == "iota")
    assert iota.outputs[0] in case.contraction.floating
    assert kinds(case) == ["input"]


def test_moments_follow_their_parameter_in_the_update() -> None:
    def step(w: Any, m: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)
        m = 0.9 * m + grad
        return w - 0.1 * m, m

    case = harness.prepare(step, (struct(16, 32), struct(16, 32), struct(8, 16)))
    output = case.contraction.homes[case.graph.outputs[0]]  # type: ignore[index]

    assert case.contraction.nodes[output.node].state


@pytest.mark.parametrize("name", NAMES)
def test_every_array_has_a_home_or_floats(name: str) -> None:
    case = harness.prepare(*planner_cases.workload(name))
    values = case.graph.values

    for op in case.graph.operators:
        for value in op.outputs:
            if values[value].size >= MIN_ELEMENTS:
                homed = value in case.contraction.homes
                assert homed != (value in case.contraction.floating), op


@pytest.mark.parametrize("name", ["attention", "scan_layers", "mixture_of_experts"])
def test_every_strategy_splits_every_dimension_evenly(name: str) -> None:
    case, sizes = harness.prepare(*planner_cases.workload(name)), (2, 4)

    for op in case.graph.operators:
        node = case.contraction.node_of.get(op.class_index)
        if node is None:
            continue
        space = strategy_space(
            case.graph, case.contraction, case.contraction.nodes[node], sizes
        )
        assert not any(space.strategies[0])
        for slot, value in enumerate(op.inputs):
            if value is None:
                continue
            dims = node_dims(case.contraction, op, op.rule.operands[slot])
            for strategy in space.strategies:
                layout = layout_of(strategy, dims)
                used = [a for axes in layout for a in axes]
                assert len(used) == len(set(used))
                for size, axes in zip(
                    case.graph.values[value].shape, layout, strict=True
                ):
                    assert size % max(1, harness.product(sizes[a] for a in axes)) == 0


def chain(layers: int) -> harness.Case:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return harness.prepare(step, ([struct(16, 16)] * layers, struct(8, 16)))


def test_nodes_and_uses_do_not_grow_with_the_layers() -> None:
    few, many = chain(6), chain(12)

    assert len(many.contraction.nodes) <= len(few.contraction.nodes)
    assert len(many.sources) <= len(few.sources)
