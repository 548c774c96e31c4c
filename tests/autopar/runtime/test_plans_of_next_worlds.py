"""Plans and errors of codecs that one process finds for the next world of others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import Cluster
from autopar.runtime import changing_batches


def train_step(w: Any, batch: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(w)
    return w - 0.1 * grad, loss


W, BATCH = np.eye(16, dtype=np.float32), np.ones((8, 16), np.float32)


def test_the_next_world_uses_the_remembered_plan_for_its_cluster() -> None:
    """Nothing but the remembered plan has two microbatches."""
    slow = Cluster.parse("2x1:cpu,network=50Mb/s")
    step = autopar.parallelize(train_step, cluster="2x1:cpu", donate=False)
    step.prepare(W, BATCH)
    two = autopar.plan(train_step, W, BATCH, cluster=slow, microbatches=2)
    changing_batches.remember_plan(step, slow, two)
    for cluster, microbatches in (("2x1:cpu", 1), (slow, 2)):
        given = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        changing_batches.enter_world(step, step.world, given, donate=False)
        step.prepare(W, BATCH)
        assert step.plan.microbatches == microbatches
    np.testing.assert_allclose(step(W, BATCH)[1], train_step(W, BATCH)[1], rtol=1e-6)


def test_errors_that_another_process_has_measured_are_planned_with() -> None:
    step = autopar.parallelize(train_step, cluster="2x1:cpu", compression="auto")
    assert changing_batches.known_errors(step) == {}
    changing_batches.assume_errors(step, {"w": {"int8": 0.5}})
    assert changing_batches.known_errors(step) == {"w": {"int8": 0.5}}
    changing_batches.assume_errors(step, {})
    assert changing_batches.known_errors(step) == {}
