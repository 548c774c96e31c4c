"""Tests steps that keep state in host memory: losses, state and memory kinds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from residual_step import OPTIMIZER, scanned_update, update

import autopar
from autopar.errors import PlanError

WIDTH, ROWS, STEPS = 64, 32, 4
# In data parallel plans, gradients are summed over devices.
DATA: dict[str, Any] = {
    "axis_names": ["data"],
    "pins": {
        "x": PartitionSpec("data"),
        **{f"state/0/{k}": PartitionSpec() for k in range(3)},
    },
}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def begin() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in keys[:3]]
    x = jax.random.normal(keys[3], (ROWS, WIDTH))
    return (weights, OPTIMIZER.init(weights)), x


@functools.cache
def reference() -> list[float]:
    return run(jax.jit(update))[1]


def run(step: Any, state: Any = None, steps: int = STEPS) -> tuple[Any, list[float]]:
    first, x = begin()
    state, losses = first if state is None else state, []
    for _ in range(steps):
        state, loss = step(state, x)
        losses.append(float(loss))
    return state, losses


def kinds(state: Any) -> list[str]:
    """The memory kinds of the moments, without the step count."""
    leaves = jax.tree.leaves(state[1])
    return sorted({x.sharding.memory_kind for x in leaves if x.ndim})


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"remat": 2}, {"compression": "int8", **DATA}],
    ids=["whole", "microbatches", "remat", "int8"],
)
def test_losses_and_memories(options: dict[str, Any]) -> None:
    step = autopar.parallelize(
        update, cluster="8:cpu", offload="optimizer", donate=False, **options
    )
    state, losses = run(step)
    rtol = 1e-5
    if "compression" in options:
        same = autopar.parallelize(update, cluster="8:cpu", donate=False, **options)
        np.testing.assert_allclose(losses, run(same)[1], rtol=rtol)
    else:
        np.testing.assert_allclose(losses, reference(), rtol=rtol)
    assert kinds(state) == ["pinned_host"]
    assert {x.sharding.memory_kind for x in state[0]} == {"device"}


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"remat": "all"}, {"compression": "int8"}],
    ids=["whole", "microbatches", "remat", "int8"],
)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_parameters_in_the_memory_of_hosts(
    scanned: bool, options: dict[str, Any]
) -> None:
    if scanned and "remat" in options:
        pytest.skip("the loop's layers are checkpointed by the step itself")
    (weights, _), _ = begin()
    if scanned:
        weights = jax.numpy.stack(weights)
    given = dict(options)
    if "compression" in options:
        whole = {"x": PartitionSpec("data"), "state/0": PartitionSpec()}
        given |= {**DATA, "pins": whole} if scanned else DATA
    make = scanned_update if scanned else update
    first = weights, OPTIMIZER.init(weights)
    step, same = (
        autopar.parallelize(make, cluster="8:cpu", donate=False, offload=how, **given)
        for how in ("state", "none")
    )
    state, losses = run(step, first)
    expected, reference_losses = run(same, first)
    np.testing.assert_allclose(losses, reference_losses, rtol=1e-5)
    if "compression" not in options:
        np.testing.assert_allclose(losses, reference(), rtol=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert {a.sharding.memory_kind for a in jax.tree.leaves(state) if a.ndim} == {
        "pinned_host"
    }


def test_a_saved_plan_and_another_cluster_keep_the_memories(tmp_path: Any) -> None:
    step = autopar.parallelize(update, cluster="8:cpu", offload="optimizer")
    state, losses = run(step, steps=2)
    path = tmp_path / "plan.json"
    step.plan.save(path)
    again = autopar.parallelize(update, plan=path)
    state, more = run(again, state, 1)
    assert kinds(state) == ["pinned_host"]
    state = step.replan("4:cpu", state)
    state, last = run(step, state, 1)
    np.testing.assert_allclose([*losses, *more, *last], reference(), rtol=1e-5)
    assert kinds(state) == ["pinned_host"]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_of_a_user_that_offloads(microbatches: int) -> None:
    def own(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state
        moments = jax.tree.map(lambda m: jax.device_put(m, DEVICE), moments)
        (weights, moments), loss = update((weights, moments), x)
        return (weights, jax.tree.map(lambda m: jax.device_put(m, HOST), moments)), loss

    step = autopar.parallelize(
        own, cluster="8:cpu", microbatches=microbatches, donate=False
    )
    plain = autopar.parallelize(
        update, cluster="8:cpu", microbatches=microbatches, donate=False
    )
    state, losses = run(step)
    np.testing.assert_allclose(losses, reference(), rtol=1e-5)
    assert kinds(state) == ["pinned_host"]
    run(plain)
    least = 2 * 3 * WIDTH * WIDTH * 4 / 8
    saved = (
        plain.plan.predicted.peak_memory_bytes - step.plan.predicted.peak_memory_bytes
    )
    assert saved > 0.5 * least


def test_what_is_refused() -> None:
    state, x = begin()
    with pytest.raises(PlanError, match="stages=2"):
        autopar.plan(update, state, x, cluster="8:cpu", offload="optimizer", stages=2)
    with pytest.raises(PlanError, match="TPU"):
        autopar.plan(update, state, x, cluster="2x2:v5e", offload="optimizer")
    with pytest.raises(PlanError, match="offload='some'"):
        autopar.plan(update, state, x, cluster="8:cpu", offload="some")
