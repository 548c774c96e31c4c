"""Tests additions of sums over devices that compilers merge into one sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.program.trace import trace
from autopar_passes.sums.stacked import (
    Reassociation,
    reassociations,
)

X, W = jnp.ones((16, 8)), jnp.ones((8, 8))


def found(step: Any) -> tuple[OperatorGraph, tuple[Reassociation, ...]]:
    traced = trace(step, (X, W))
    graph = step_graph(traced)
    return graph, reassociations(graph)


def test_three_products_are_summed_once() -> None:
    graph, both = found(lambda x, w: jnp.tanh(x @ w + (2 * x) @ w + (3 * x) @ w))

    assert [graph.operators[r.operator].kind for r in both] == ["add", "add"]
    first, second = both
    assert graph.operators[first.operator].outputs[0] in second.summed
    kinds = [
        op.kind
        for op in graph.operators
        for v in (*first.summed, *second.summed)
        if v in op.outputs
    ]
    assert sorted(kinds) == ["add", "dot_general", "dot_general", "dot_general"]


def test_shapes_may_change_between() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(
            (x @ w).reshape(4, 4, 8).transpose(1, 0, 2) + jnp.ones((4, 1, 8)) @ w
        )

    graph, (only,) = found(step)

    kinds = {
        op.kind
        for op in graph.operators
        if not set(op.outputs).isdisjoint(only.between)
    }
    assert kinds == {"dot_general", "reshape", "transpose"}


@pytest.mark.parametrize(
    "step",
    [
        lambda x, w: jnp.tanh(x @ w + x),  # what is added is no sum
        lambda x, w: jnp.tanh(x @ w + 2 * (x @ w.T)),
        lambda x, w: jnp.tanh(x @ w - x @ w.T),
        lambda x, w: jnp.tanh(x @ w + (x @ w.T).astype(jnp.bfloat16).astype(x.dtype)),
        lambda x, w: ((y := x @ w), jnp.tanh(y + x @ w.T)),  # leaves, too
        lambda x, w: jnp.tanh((y := x @ w) + x @ w.T) * y,  # is read again
        lambda x, w: jnp.tanh((y := x @ w) + y),
        lambda x, w: jnp.tanh(x.max(0) + w.max(0)),
    ],
)
def test_what_is_no_sum_of_two_sums_alone(step: Any) -> None:
    assert found(step)[1] == ()


# A leaf: a product, one that is no plain sum any more, or an array. Pairs are added.
leaves = st.sampled_from(["product", "shaped", "bent", "array"])
trees = st.recursive(leaves, lambda t: st.tuples(t, t), max_leaves=8)


def built(tree: Any, x: jax.Array, w: jax.Array, count: list[int]) -> jax.Array:
    if isinstance(tree, tuple):
        one, other = (built(t, x, w, count) for t in tree)
        return one + other
    count[0] += 1
    product = (count[0] * x) @ w
    if tree == "shaped":
        return product.reshape(2, 64).reshape(16, 8)
    return {"product": product, "bent": jnp.sin(product), "array": count[0] * x}[tree]


def sums_left(tree: Any) -> tuple[int, bool]:
    """The number of other sums below a tree of additions, and whether it is one sum."""
    if not isinstance(tree, tuple):
        return (int(tree == "bent"), tree in ("product", "shaped"))
    (one, first), (other, second) = (sums_left(t) for t in tree)
    if first and second:
        return one + other, True
    return one + other + first + second, False


def products(tree: Any) -> int:
    if isinstance(tree, tuple):
        return sum(map(products, tree))
    return int(tree != "array")


@settings(deadline=None, max_examples=examples(40))
@given(trees)
def test_trees_of_additions(tree: Any) -> None:
    """Of all products, each addition of two sums takes one sum away."""
    _, taken = found(lambda x, w: jnp.tanh(built(tree, x, w, [0])))

    left, own = sums_left(tree)
    assert products(tree) - len(taken) == left + own
