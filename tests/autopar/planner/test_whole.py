"""A plan is never slower than the one that splits nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.planner import search as searching
from autopar.planner.whole import not_slower_than_whole
from autopar.steps.analysis import analyse

STRUCTS = (
    {k: jax.ShapeDtypeStruct((48, 48), jnp.float32) for k in ("a", "b", "c")},
    jax.ShapeDtypeStruct((16, 48), jnp.float32),
)


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"])

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def test_what_splits_nothing_takes_the_place_of_a_slower_plan() -> None:
    analysis = analyse(step, STRUCTS)
    cluster = autopar.Cluster.parse("8:cpu")

    def splits(node: Any, strategy: Any) -> bool:
        return any(strategy) or node.kind != "contraction"

    slow = searching.search(analysis, cluster, restriction=lambda _: splits).best
    found = not_slower_than_whole(analysis, slow)

    assert found.step_s < slow.step_s
    assert not any(any(s) for s in found.assignment.strategies)
    assert found.bound_s <= found.step_s
    # What a restriction rules out is not taken.
    assert not_slower_than_whole(analysis, slow, splits).step_s >= slow.step_s


def test_a_faster_plan_stays() -> None:
    analysis = analyse(step, STRUCTS)
    cluster = autopar.Cluster.parse("8:cpu,efficiency=0.0001")
    best = searching.search(analysis, cluster).best
    assert any(any(s) for s in best.assignment.strategies)
    assert not_slower_than_whole(analysis, best) is best
