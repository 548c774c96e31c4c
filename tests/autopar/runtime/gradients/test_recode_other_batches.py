"""Codecs that are changed while training, and batches of other numbers of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar

WIDTH, ROWS, SHORT = 32, 64, 32


def step(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda x, g: x - 0.1 * g, params, grads), loss


def create(key: jax.Array) -> Any:
    shape = (WIDTH, WIDTH)
    return {"a": jax.random.normal(key, shape), "b": jax.random.normal(key, shape)}


@pytest.mark.parametrize("changed_at", [ROWS, SHORT])
def test_changed_codecs_hold_for_batches_of_all_sizes(changed_at: int) -> None:
    """Also for sizes that had a plan before the change."""
    run = autopar.parallelize(
        step,
        cluster="2x1:cpu,network=100Mb/s",
        compression="int8",
        stages=1,
        microbatches=1,
        pins={"params/*": PartitionSpec()},
    )
    batches = {n: {"x": np.ones((n, WIDTH), np.float32)} for n in (ROWS, SHORT)}
    params = run.init(create, jax.random.key(0), batch=batches[ROWS])
    for rows in (ROWS, SHORT, changed_at):
        params, _ = run(params, batches[rows])
    for changes in ({"params/a": "int4"}, {"params/b": "sign"}, {"params/a": "int8"}):
        run.recode(changes)
        codecs = {g.name: g.codec for g in run.plan.gradients}
        assert codecs.items() >= changes.items()
        for rows in (SHORT, ROWS, SHORT, changed_at):
            params, _ = run(params, batches[rows])
            assert {g.name: g.codec for g in run.plan.gradients} == codecs
