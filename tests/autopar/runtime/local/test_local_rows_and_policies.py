"""Last batches and policies of local steps with several replicas in a process."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import PlanError
from autopar.runtime.local.outer import MEAN

WIDTH = 32


def create(key: jax.Array) -> Any:
    return {"w": 0.1 * jax.random.normal(key, (WIDTH, WIDTH))}


def step(state: Any, batch: Any) -> Any:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["x"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss


def rows(count: int) -> np.ndarray:
    drawn = np.random.default_rng(count).normal(size=(count, WIDTH))
    return drawn.astype(np.float32)


@pytest.mark.parametrize(("how", "told"), [("drop", "1 of them"), ("pad", "1 times")])
def test_a_last_batch_may_not_divide_among_the_replicas(how: str, told: str) -> None:
    train_step = autopar.local_steps(
        step, every=1, outer=MEAN, cluster="2x1:cpu", last_batch=how
    )
    state = train_step.init(create, jax.random.key(0), batch={"x": rows(16)})
    state, _ = train_step(state, {"x": rows(16)})
    before, x = jax.device_get(state.state), rows(13)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a batch of 7 rows")  # of a replica
        with pytest.warns(UserWarning, match=told):
            _, loss = train_step(state, {"x": x})
    parts = [x[:6], x[6:12]]
    if how == "pad":
        parts = [x[[*range(7), 6]], x[[*range(7, 13), 12, 12]]]
    expected = np.mean([step(before, {"x": part})[1] for part in parts])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_other_batches_must_divide_among_the_replicas() -> None:
    train_step = autopar.local_steps(step, every=1, cluster="2x1:cpu")
    state = train_step.init(create, jax.random.key(0), batch={"x": rows(16)})
    with pytest.raises(PlanError, match=r"'batch/x' has 13 rows.*last_batch='drop'"):
        train_step(state, {"x": rows(13)})


class Counts:
    """A policy that counts what it observes."""

    every = 1

    def __init__(self) -> None:
        """Begins at zero."""
        self.seen = 0

    def observe(self, seen: Any) -> dict[str, str]:
        self.seen += 1
        return {}


def test_each_replica_has_a_policy_of_its_own() -> None:
    policy = Counts()
    train_step = autopar.local_steps(
        step,
        every=2,
        cluster="2x2:cpu,network=1Gb/s",
        compression="int8",
        policy=policy,
        stages=1,
        microbatches=1,
        pins={"state/*": PartitionSpec(), "batch/*": PartitionSpec("data")},
        axis_names=("data",),
    )
    state = train_step.init(create, jax.random.key(0), batch={"x": rows(16)})
    for _ in range(3):
        state, _ = train_step(state, {"x": rows(16)})
    assert policy.seen == 3
