"""Tests optimizers of whole matrices, of which each device updates some."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.plans import Plan

WIDTH, LAYERS = 64, 4


def slow_devices(text: str) -> autopar.Cluster:
    """A cluster with devices so slow that all work is worth splitting."""
    cluster = autopar.Cluster.parse(text)
    rates = tuple(
        (dtype, 1e-2 * rate) for dtype, rate in cluster.device.peak_flops_per_s
    )
    device = dataclasses.replace(cluster.device, peak_flops_per_s=rates)
    return dataclasses.replace(cluster, device=device)


def training(rows: int = 32) -> Any:
    """A step of layers under Muon, its state and a batch."""
    optimizer = optax.contrib.muon(1e-2)

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for p in params:
                y = y + jnp.tanh(y @ p["up"]) @ p["down"]
            return jnp.mean((y - x[:, ::-1]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": moments}, value

    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    params = [
        {
            "up": 0.1 * jax.random.normal(keys[2 * k], (WIDTH, 2 * WIDTH)),
            "down": 0.1 * jax.random.normal(keys[2 * k + 1], (2 * WIDTH, WIDTH)),
        }
        for k in range(LAYERS)
    ]
    x = jax.random.normal(keys[-1], (rows, WIDTH))
    return step, {"params": params, "opt": optimizer.init(params)}, x


def after(step: Any, state: Any, x: Any) -> tuple[list[float], Any]:
    """The losses of three steps, and the last state."""
    state, found = jax.tree.map(jnp.copy, state), list[float]()
    for _ in range(3):
        state, value = step(state, x)
        found.append(float(value))
    return found, state


def assert_equal(step: Any, given: Any) -> None:
    """Checks that the step gives the results of `jax.jit`."""
    plain, state, x = given
    losses, left = after(jax.jit(plain), state, x)
    found, got = after(step, state, x)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(left), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def deals_out(plan: Plan) -> bool:
    """Whether each device updates some of the matrices: a stack of them is split."""
    return any(
        axes
        for node in plan.nodes
        if node.kind == "contraction"
        for size, axes in zip(node.factors, node.axes, strict=True)
        if size in (4, 2 * LAYERS)
    )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("cluster", ["8:cpu", "2x4:cpu"])
def test_devices_have_matrices_of_their_own(cluster: str, microbatches: int) -> None:
    given = training()
    step = autopar.parallelize(
        given[0], cluster=slow_devices(cluster), stages=1, microbatches=microbatches
    )
    assert_equal(step, given)
    assert deals_out(step.plan)
    found = autopar.audit(*given, plan=step.plan)
    assert found.agrees, str(found)


def test_a_saved_plan_deals_them_out_again(tmp_path: Path) -> None:
    given = training()
    plan = autopar.plan(*given, cluster=slow_devices("8:cpu"), stages=1)
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert deals_out(saved)
    assert "update in batches: 8 matrices in 1 stack" in str(saved)
    assert_equal(autopar.parallelize(given[0], plan=saved), given)


def test_other_numbers_of_devices_have_other_batches() -> None:
    given = training()
    step = autopar.parallelize(given[0], cluster=slow_devices("8:cpu"), stages=1)
    plain, state, x = given
    losses, _ = after(jax.jit(plain), state, x)
    state, x = jax.tree.map(jnp.copy, (state, x))
    state, first = step(state, x)
    state = (
        step.replan(slow_devices("4:cpu"), state) if hasattr(step, "replan") else state
    )
    found = [first]
    for _ in range(2):
        state, value = step(state, x)
        found.append(value)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.parametrize("options", [{"stages": 2, "microbatches": 2}, {"remat": 2}])
def test_they_go_with_stages_and_layers_again(options: Any) -> None:
    given = training()
    options = {"stages": 1} | options
    step = autopar.parallelize(given[0], cluster=slow_devices("8:cpu"), **options)
    assert_equal(step, given)


def test_they_go_with_codecs() -> None:
    given = training(rows=1024)
    step = autopar.parallelize(
        given[0],
        cluster="8:cpu",
        stages=1,
        compression="int8",
        pins={"x": P("data"), "state/params/*": P()},
        axis_names=("data",),
    )
    plain, state, x = given
    losses, _ = after(jax.jit(plain), state, x)
    found, _ = after(step, state, x)
    np.testing.assert_allclose(found, losses, rtol=2e-2)


def test_one_device_computes_each_matrix_alone() -> None:
    plan = autopar.plan(*training(), cluster="1:cpu")
    assert not any(2 * LAYERS in node.factors for node in plan.nodes)
