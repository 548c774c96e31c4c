"""Tests a step that continues in another world."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.runtime import changing_batches


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


@pytest.mark.parametrize(
    ("options", "pure"),
    [
        ({"donate": False}, True),
        ({"donate": True}, False),
        ({"donate": False, "compression": "int8"}, False),
        ({"donate": False, "noise_scale": True, "microbatches": 2}, False),
    ],
)
def test_what_a_call_leaves_behind(options: dict[str, Any], pure: bool) -> None:
    train = autopar.parallelize(step, cluster="2:cpu", **options)
    train(jnp.ones((32, 32)), jnp.ones((8192, 32)))
    assert changing_batches.is_pure(train) is pure
