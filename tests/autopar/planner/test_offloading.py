"""Tests plans that keep optimizer state in host memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from residual_step import OPTIMIZER, update

import autopar
from autopar.errors import InfeasibleError
from autopar.planner.proposals import recorded_proposals


def test_memory_that_is_too_small_moves_optimizer_state() -> None:
    row = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    weights = [row] * 40
    state = weights, jax.eval_shape(OPTIMIZER.init, weights)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    planned = functools.partial(
        autopar.plan, update, state, x, stages=1, compile_check=False
    )
    with recorded_proposals() as proposals:
        free, small = planned(cluster="8:a100"), "8:a100,memory=80MB"
    assert [x.note for x in proposals if "memory of the hosts" in x.proposer] == [
        "not tried: it saves memory, which does not hold the plan back"
    ]
    found = planned(cluster=small)
    assert found.offload
    assert not free.offload
    assert set(found.offload) < set(found.inputs)
    assert found.predicted.peak_memory_bytes <= 80e6
    assert found.predicted.step_s > free.predicted.step_s
    with pytest.raises(InfeasibleError):
        planned(cluster=small, offload="none")


def test_copies_take_the_rate_between_device_and_host() -> None:
    row = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    state = [row], jax.eval_shape(OPTIMIZER.init, [row])
    x = jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    cluster = autopar.Cluster.parse("1:a100")
    step_s = [
        autopar.plan(
            update, state, x, cluster=cluster, offload=offload, compile_check=False
        ).predicted.step_s
        for offload in ("none", "optimizer")
    ]
    # Two moments come to the device and go back.
    copies_s = 4 * 2048 * 2048 * 4 / cluster.device.host_bytes_per_s
    assert step_s[1] - step_s[0] == pytest.approx(copies_s, rel=0.1)


def test_moments_pass_through_devices_one_after_the_other() -> None:
    """After microbatches all gradients are complete at once, and so are moments."""
    row = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    weights = [row] * 20
    state = weights, jax.eval_shape(OPTIMIZER.init, weights)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    planned = functools.partial(
        autopar.plan, update, state, x, cluster="1:a100", compile_check=False
    )
    offloaded, kept = (
        planned(microbatches=4, offload=how).predicted.peak_memory_bytes
        for how in ("optimizer", "none")
    )
    params = 20 * 1024 * 1024 * 4
    assert kept - offloaded == pytest.approx(2 * params, rel=0.05)
    # Parameters, sums of gradients, and gradients of a microbatch.
    assert offloaded < 3.2 * params
