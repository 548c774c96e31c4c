"""A step's time as a function of devices, batch and accumulation.

Held against pricing the same layouts anew at that batch, traced anew.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.cluster import Cluster
from autopar.cost.breakdown import step_s
from autopar.cost.evaluate import cost_parts, evaluate
from autopar.cost.pricer import Pricer
from autopar.cost.scaling import ScaledCost, rescaled
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.planner.recipes import Recipe, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse

CASES = (("dense", "8:h100"), ("dense", "2x4:h100"), ("attention", "8:cpu"))
ROWS = 4096


def dense_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = batch["x"]
        for w in p["layers"]:
            x = x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = p["embed"][batch["tokens"]]
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        x = jnp.einsum("bhts,bshk->bthk", scores, v)
        logits = jnp.einsum("bthk,hkv->btv", x, p["out"])
        wanted = jax.nn.one_hot(batch["tokens"], logits.shape[-1])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, -1))

    value, grads = jax.value_and_grad(loss)(params)
    optimizer = optax.sgd(0.1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), value


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    layer = {"up": struct(1024, 4096), "bias": struct(4096), "down": struct(4096, 1024)}
    batch = {"x": struct(rows, 1024), "y": struct(rows, 1024)}
    return dense_step, ({"layers": [layer, layer]}, batch)


def attention(rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    params = {
        "embed": struct(512, 128), "out": struct(4, 32, 512),
        "q": struct(128, 4, 32), "k": struct(128, 4, 32), "v": struct(128, 4, 32),
    }  # fmt: skip
    return attention_step, (params, {"tokens": struct(rows, 32, dtype=jnp.int32)})


STEPS = {"dense": dense, "attention": attention}


@functools.cache
def analysed(name: str, rows: int) -> Analysis:
    step, args = STEPS[name](rows)
    return analyse(step, args)


@functools.cache
def planned(name: str, text: str) -> tuple[Assignment, Pricer]:
    cluster = Cluster.parse(text)
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    analysis = analysed(name, ROWS)
    axes = tuple(range(len(pricer.mesh.axes)))
    recipe = (
        Recipe("data", axes) if len(axes) == 1 else Recipe("both", (0,), (1,), True)
    )
    limit = restriction_of(analysis, recipe, pricer)
    return solve_mesh(analysis, pricer, limit, seconds=2).assignment, pricer


def anew(name: str, text: str, rows: int) -> float:
    """Seconds of the same layouts, the step traced and priced at another batch."""
    assignment, pricer = planned(name, text)
    other = analysed(name, rows)
    assert len(other.contraction.nodes) == len(assignment.strategies)
    moved = dataclasses.replace(assignment, analysis=other, _known={})
    return step_s(evaluate(moved, pricer))


@pytest.mark.parametrize(("name", "text"), CASES)
def test_the_planned_batch_costs_what_the_plan_does(name: str, text: str) -> None:
    assignment, pricer = planned(name, text)
    cost = ScaledCost(assignment, pricer)
    want = step_s(evaluate(assignment, pricer))
    assert cost.batch == ROWS
    assert cost.step_s(8, ROWS) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("rows", [64, 512, 8192, 65536])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_other_batches_cost_what_pricing_anew_says(
    name: str, text: str, rows: int
) -> None:
    cost = ScaledCost(*planned(name, text))
    assert cost.step_s(8, rows) == pytest.approx(anew(name, text, rows), rel=0.03)


@pytest.mark.parametrize("devices", [2, 4, 16, 32])
@pytest.mark.parametrize("name", sorted(STEPS))
def test_other_devices_cost_what_their_mesh_does(name: str, devices: int) -> None:
    """The same layouts on a mesh whose data axis has another size."""
    assignment, pricer = planned(name, "8:h100")
    cost = ScaledCost(assignment, pricer)
    moved, there = rescaled(assignment, pricer, 0, devices)
    assert math.prod(moved.sizes) == devices
    want = step_s(evaluate(moved, there))
    assert cost.step_s(devices, ROWS) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_accumulation_pays_for_each_microbatch(name: str) -> None:
    """Sums and the update are paid once, the rest by every microbatch."""
    assignment, pricer = planned(name, "8:cpu")
    cost = ScaledCost(assignment, pricer)
    parts = cost_parts(assignment, pricer)
    once = step_s(parts.per_synchronisation)
    each = cost.step_s(8, ROWS) - once
    for count in (2, 4, 8):
        found = cost.step_s(8, ROWS * count, accumulation=count)
        assert found > count * each + once
        assert found == pytest.approx(count * each + once, rel=0.35)
        assert found >= cost.step_s(8, ROWS * count)


def test_more_samples_never_take_less_time() -> None:
    cost = ScaledCost(*planned("attention", "8:cpu"))
    times = [cost.step_s(8, rows) for rows in range(64, 16384, 64)]
    assert times == sorted(times)


class TestErrors:
    def test_devices_that_the_other_axes_do_not_divide(self) -> None:
        cost = ScaledCost(*planned("dense", "8:h100"))
        with pytest.raises(PlanError, match="0 devices do not keep the plan's layouts"):
            cost.step_s(0, ROWS)

    @pytest.mark.parametrize(("batch", "accumulation"), [(0, 1), (-4, 1), (8, 0)])
    def test_numbers_that_are_not_positive(self, batch: int, accumulation: int) -> None:
        cost = ScaledCost(*planned("dense", "8:h100"))
        with pytest.raises(PlanError, match="must be 1 or more"):
            cost.step_s(8, batch, accumulation)

    def test_a_step_without_a_batch(self) -> None:
        def step(w: Any) -> Any:
            return jax.tree.map(lambda x: 0.9 * x, w)

        analysis = analyse(step, ({"w": struct(64, 64)},))
        cluster = Cluster.parse("8:h100")
        pricer = Pricer(cluster, candidate_meshes(cluster)[0])
        found = solve_mesh(analysis, pricer, seconds=5)
        with pytest.raises(PlanError, match="no batch of several rows"):
            ScaledCost(found.assignment, pricer)

    def test_splits_that_do_not_come_out_even(self) -> None:
        """Parameters split over the data axis cannot be split 3 ways."""
        assignment, pricer = planned("dense", "8:h100")
        labels = assignment.analysis.node_labels
        split = any(
            axes and labels.get(k, {}).get(f) != "batch"
            for k, strategy in enumerate(assignment.strategies)
            for f, axes in enumerate(strategy)
        )
        cost = ScaledCost(assignment, pricer)
        if split:
            with pytest.raises(PlanError, match="cannot be split"):
                cost.step_s(3, ROWS)
        else:
            assert cost.step_s(3, ROWS) > 0
