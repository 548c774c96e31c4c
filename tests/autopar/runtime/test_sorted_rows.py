"""Experts without a capacity: each device sorts its own tokens."""

from __future__ import annotations

from typing import Any

import expert_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_runs import after, assert_equal, slow_devices
from jax.sharding import PartitionSpec as P

import autopar


def splits_products(plan: Any) -> bool:
    """Whether each device multiplies its own rows with the matrices of experts."""
    return all(axis.repeated < 0.1 for axis in plan.worth.axes)


@pytest.mark.parametrize(
    ("cluster", "form"),
    [("8:cpu", "inverse"), ("2x4:cpu", "addition"), ("8:cpu", "setting")],
)
def test_devices_sort_their_own_rows(cluster: str, form: str) -> None:
    given = expert_steps.training(form, layers=1)
    step = autopar.parallelize(
        given[0], cluster=slow_devices(cluster), stages=1, microbatches=1, seconds=2
    )
    assert_equal(step, given)
    assert splits_products(step.plan), str(step.plan)
    assert step.plan.row_blocks == 8
    found = autopar.audit(*given, plan=step.plan)
    assert found.agrees, str(found)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"microbatches": 2}, {"again": True, "scanned": True}),
        ({"microbatches": 2, "remat": "all"}, {"form": "addition"}),
        ({"microbatches": 2, "stages": 2}, {"again": True, "form": "addition"}),
    ],
)
def test_rows_are_sorted_in_microbatches_stages_and_again(
    options: dict[str, Any], made: dict[str, Any]
) -> None:
    given = expert_steps.training(**made)
    step = autopar.parallelize(
        given[0],
        cluster=slow_devices("8:cpu"),
        **({"stages": 1, "seconds": 2} | options),
    )
    assert_equal(step, given)


def test_gradients_of_experts_are_sent_as_int8() -> None:
    given = expert_steps.training(layers=1)
    step = autopar.parallelize(
        given[0],
        cluster=slow_devices("8:cpu"),
        stages=1,
        microbatches=2,
        compression="int8",
        axis_names=("data",),
        pins={"*/params/*": P(), "x": P("data")},
    )
    losses, _ = after(step, *given[1:])
    exact, _ = after(jax.jit(given[0]), *given[1:])
    np.testing.assert_allclose(losses, exact, rtol=1e-3)
    assert step.plan.row_blocks == 8
    sent = {g.codec for g in step.plan.stages[0].gradients if "gate" in g.name}
    assert sent == {"int8"}


def test_a_plan_says_why_rows_stay_together() -> None:
    """Rows that a step counts in another way are planned as one block."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            keys = jnp.argmax(x @ p["router"], -1)
            order = jnp.argsort(keys)
            sizes = jnp.minimum(jnp.bincount(keys, length=8), 12)
            return jnp.mean(jax.lax.ragged_dot(x[order], p["up"], sizes) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        "router": jax.random.normal(keys[0], (16, 8)),
        "up": jax.random.normal(keys[1], (8, 16, 32)),
    }
    given = step, state, jax.random.normal(keys[2], (64, 16))
    made = autopar.parallelize(step, cluster=slow_devices("8:cpu"), stages=1)
    assert_equal(made, given)
    assert "the group sizes are not recognised" in str(made.plan)
