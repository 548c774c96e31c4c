"""Which arrays outer steps synchronise: arrays on hosts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.whole import WholeState

ROWS, WIDTH = 8, 4


def batch(number: int) -> Any:
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)


def create(narrow: Any) -> Any:
    master = jnp.eye(WIDTH)
    return {"params": master.astype(narrow), "master": master}


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params - 1.0) ** 2)


def cast_step(state: Any, batch: Any) -> Any:
    """A step that updates a wide copy of its parameters, and casts it."""
    wide = state["params"].astype(jnp.float32)
    loss, gradient = jax.value_and_grad(loss_of)(wide, batch)
    master = state["master"] - 0.5 * gradient
    return {"params": master.astype(state["params"].dtype), "master": master}, loss


def steps_of(step: Any, **options: Any) -> Any:
    return autopar.local_steps(
        step, every=2, outer=MEAN, cluster="2x1:cpu", seconds=1, **options
    )


def test_arrays_in_the_memory_of_hosts_are_synchronised() -> None:
    kinds, found = set[str](), {}
    for offload in ("none", "state"):
        made = steps_of(cast_step, offload=offload)
        state = made.init(lambda: create(jnp.float32), batch=batch(0))
        for number in range(3):
            state, _ = made(state, batch(number))
        arrays = WholeState(made, state).arrays(state)
        found[offload] = {k: np.asarray(x) for k, x in arrays.items()}
        structs = WholeState(made, state).structs()
        for path, x in arrays.items():
            assert x.sharding.memory_kind == structs[path].sharding.memory_kind
        kinds.add(state.state["params"].sharding.memory_kind)
    assert "pinned_host" in kinds
    jax.tree.map(np.testing.assert_array_equal, *found.values())
