"""States that are plain tuples: their values are the step's leading arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

BATCH = np.ones((8, 4), np.float32)


def create(key: jax.Array) -> Any:
    return jax.random.normal(key, (4, 4)), jnp.float32(0.1)


def apart(w: Any, rate: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    return w - rate * g, rate, loss


def joined(state: Any, batch: Any) -> Any:
    w, rate, loss = apart(*state, batch)
    return (w, rate), loss


@pytest.mark.parametrize("local", [False, True])
def test_a_tuple_that_the_step_takes_as_one_argument_is_refused(local: bool) -> None:
    def made(step: Any) -> Any:
        if local:
            return autopar.local_steps(step, every=2, cluster="2x1:cpu")
        return autopar.parallelize(step, cluster="2:cpu")

    with pytest.raises(autopar.PlanError, match=r"returns a tuple of 2.*a dictionary"):
        made(joined).init(create, jax.random.key(0), batch=BATCH)
    made(apart).init(create, jax.random.key(0), batch=BATCH)
