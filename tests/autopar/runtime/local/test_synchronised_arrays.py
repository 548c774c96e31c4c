"""Which arrays outer steps synchronise: masters, complex arrays, arrays on hosts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float32])
def test_masters_are_synchronised_with_their_parameters(narrow: Any) -> None:
    made, run = steps_of(cast_step), jax.jit(cast_step)
    state = made.init(lambda: create(narrow), batch=batch(0))
    alone = [create(narrow) for _ in range(2)]
    for number in range(4):
        state, _ = made(state, batch(number))
        halves = np.split(batch(number), 2)
        alone = [run(own, half)[0] for own, half in zip(alone, halves, strict=True)]
        if number % 2:
            mean = (alone[0]["master"] + alone[1]["master"]) / 2
            alone = [{"params": mean.astype(narrow), "master": mean}] * 2
    for own, hand in zip(state.replicas, alone, strict=True):
        np.testing.assert_allclose(own["master"], hand["master"], rtol=1e-5)


def scaled_step(state: Any, batch: Any) -> Any:
    """A step whose parameters are not a cast of the copy that it updates."""
    made, loss = cast_step(state, batch)
    return {**made, "params": 2.0 * made["master"]}, loss


def complex_step(state: Any, batch: Any) -> Any:
    """A step with complex parameters beside real ones."""

    def loss_of_both(params: Any) -> Any:
        turned = jnp.abs(batch @ params["turn"] * state["table"])
        return loss_of(params["real"], turned)

    params = state["params"]
    loss, gradient = jax.value_and_grad(loss_of_both)(params)
    moved = jax.tree.map(lambda x, g: x - 0.1 * g.conj(), params, gradient)
    return {**state, "params": moved}, loss


def create_complex(turn: Any) -> Any:
    params = {"real": jnp.eye(WIDTH), "turn": jnp.eye(WIDTH, dtype=turn)}
    return {"params": params, "table": jnp.full(WIDTH, 1.0 + 1.0j)}


@pytest.mark.parametrize(
    ("step", "made", "words"),
    [
        (scaled_step, lambda: create(jnp.float32), "from 'state/master'"),
        (complex_step, lambda: create_complex(jnp.complex64), "params/turn' is comp"),
    ],
)
def test_state_that_cannot_be_synchronised_is_refused(
    step: Any, made: Any, words: str
) -> None:
    with pytest.raises(autopar.PlanError, match=words):
        steps_of(step).init(made, batch=batch(0))


def test_complex_state_that_stays_as_it_is_needs_no_outer_step() -> None:
    made = steps_of(complex_step)
    state = made.init(lambda: create_complex(jnp.float32), batch=batch(0))
    for number in range(2):
        state, _ = made(state, batch(number))
    first, second = (own["params"]["real"] for own in state.replicas)
    np.testing.assert_array_equal(first, second)


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
