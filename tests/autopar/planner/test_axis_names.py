"""Tests that axes are named after what they split, and that the scheme fits the
layouts.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import planner_harness as harness
import pytest
from jax.sharding import PartitionSpec as P
from planner_steps import training

import autopar
from autopar.layouts.strategies import strategy_space
from autopar.planner.scheme import split_of
from autopar.steps.batch import SEQUENCE
from autopar_passes.graph.roles import Role


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def experts(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.einsum("bed,edf->bef", x, params["up"])) ** 2)


def scaled(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x * params["scale"]) ** 2)


def planned(loss: Callable[..., Any], params: Any, batch: Any, **options: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    options = {"cluster": "4:cpu", "max_axes": 1, "seconds": 5, **options}
    return autopar.plan(step, params, batch, **options)


def wide(width: int, hidden: int) -> Any:
    return {"up": array(width, hidden), "down": array(hidden, width)}


WHOLE = {"split_batch": False}
# What is planned, the axis that is expected, the scheme, and an array that it splits.
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str, Any]] = {
    "rows": (
        (mlp, wide(64, 64), array(16384, 64)), {},
        "data=4", "data parallel over data (4)", ("batch", (("data",), ())),
    ),
    "widths": (
        (mlp, wide(1024, 4096), array(6, 1024)), WHOLE,
        "tensor=4", "Megatron tensor parallel over tensor (4)",
        ("params/up", ((), ("tensor",))),
    ),
    "experts": (
        (experts, {"up": array(4, 512, 1024)}, array(4098, 4, 512)), WHOLE,
        "expert=4", "expert parallel over expert (4)",
        ("params/up", (("expert",), (), ())),
    ),
    "two of a kind": (
        (mlp, wide(1024, 4096), array(3, 1024)),
        {**WHOLE, "cluster": "2x2:cpu", "max_axes": 2},
        "tensor=2 tensor_2=2", "Megatron tensor parallel over tensor (2) and "
        "tensor_2 (2)", ("params/up", ((), ("tensor", "tensor_2"))),
    ),
    "without products": (
        (scaled, {"scale": array(1024)}, array(65537, 1024)), WHOLE,
        "tensor=4", "tensor parallel over tensor (4)", ("batch", ((), ("tensor",))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_axis_is_named_by_what_it_splits(name: str) -> None:
    step, options, axes, scheme, (path, layout) = CASES[name]
    plan = planned(*step, **options)
    assert " ".join(f"{a.name}={a.size}" for a in plan.worth.axes) == axes
    assert plan.axis_names == tuple(a.name for a in plan.worth.axes)
    assert axes in plan.solver.meshes
    assert plan.worth.scheme == scheme
    assert plan.inputs[path] == layout


def test_names_that_were_given_stay() -> None:
    step = CASES["experts"][0]
    named = planned(*step, **WHOLE, axis_names=("data",))
    assert named.axis_names == ("data",)
    assert named.worth.scheme == "expert parallel over data (4)"
    again = planned(*step, **WHOLE, layouts=named)
    assert (again.mesh, again.inputs) == (named.mesh, named.inputs)


def test_names_of_a_plan_can_be_pinned_and_edited() -> None:
    step = CASES["experts"][0]
    free = planned(*step, **WHOLE)
    pinned = planned(*step, **WHOLE, pins={"params/up": P("expert")})
    assert pinned.inputs == free.inputs
    edited = free.edit({"params/up": P(None, "expert")})
    kept = planned(*step, **WHOLE, layouts=edited)
    assert kept.mesh == free.mesh
    assert kept.inputs["params/up"] == ((), ("expert",), ())
    with pytest.raises(autopar.PlanError, match="no mesh axis 'experts'"):
        planned(*step, **WHOLE, pins={"params/up": P("experts")})


def test_sequence_parallelism_is_of_what_lies_between_products() -> None:
    """Neither products nor the backward pass count."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return mlp(params, jnp.sin(params["embed"][tokens]))

    params = {**wide(64, 64), "embed": array(32, 64)}
    case = harness.prepare(
        *training(loss, params, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    )
    works = case.analysis.works()
    counted = {
        case.contraction.node_of[index]
        for index, work in works.items()
        if work.op.role is Role.FORWARD and not work.is_matrix
    }
    plan = harness.random_plan(case, (4,), random.Random(0), replicated=True)

    def between(chosen: Callable[[int], bool]) -> float:
        """The fraction of work for which the given nodes split their sequences."""
        strategies = list(plan.strategies)
        for node in filter(lambda n: chosen(n.index), case.contraction.nodes):
            labels = case.analysis.node_labels.get(node.index, {})
            space = strategy_space(case.graph, case.contraction, node, (4,))
            for strategy in space.strategies:
                split = [f for f, axes in enumerate(strategy) if axes]
                if any(labels.get(f) == SEQUENCE for f in split):
                    strategies[node.index] = strategy
        made = dataclasses.replace(plan, strategies=tuple(strategies))
        return split_of(made, list(works.values()), 0).between

    assert between(lambda index: index in counted) == 1.0
    assert between(lambda index: index not in counted) == 0.0
