"""State of local steps that is no parameter and no state of the optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import PlanError
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.rules import Overlap

WIDTH, EVERY, STEPS = 4, 2, 6


def create(key: jax.Array) -> Any:
    return {
        "w": 0.1 * jax.random.normal(key, (WIDTH, WIDTH)),
        "frozen": jax.random.normal(key, (WIDTH, WIDTH)),
        "mask": jnp.where(jnp.tri(WIDTH) > 0, 0.0, -jnp.inf),
        "least": jnp.float32(jnp.inf),
    }


def step(state: Any, batch: Any) -> Any:
    def loss_of(w: jax.Array) -> jax.Array:
        out = batch["x"] @ state["frozen"] @ jax.nn.softmax(w + state["mask"])
        return jnp.mean((out - batch["x"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    least = jnp.minimum(state["least"], loss)
    return {**state, "w": state["w"] - 0.1 * gradient, "least": least}, loss


def rows(number: int) -> np.ndarray:
    drawn = np.random.default_rng(number).normal(size=(8, WIDTH))
    return drawn.astype(np.float32)


def by_hand(overlap: Overlap | None) -> list[Any]:
    """The states of two replicas, whose arrays are replaced by their means."""
    states, move = [create(jax.random.key(0)) for _ in range(2)], [{}, {}]
    for number in range(1, STEPS + 1):
        for r in range(2):
            part = {"x": rows(number)[4 * r : 4 * r + 4]}
            states[r], _ = jax.jit(step)(states[r], part)
            for name, x in move[r].items():
                states[r][name] = states[r][name] + x
        move = [{}, {}]
        if number % EVERY:
            continue
        for name in ("w", "least"):
            mean = (states[0][name] + states[1][name]) / 2
            for r in range(2):
                if overlap is None:
                    states[r][name] = mean
                else:
                    move[r][name] = mean - states[r][name]
    return states


@pytest.mark.parametrize("overlap", [None, Overlap(1)])
@pytest.mark.parametrize("codec", ["dense", "int8"])
def test_infinities_of_other_state_stay_what_they_are(
    codec: str, overlap: Overlap | None
) -> None:
    """A mask of infinities, and a least loss that begins as infinity."""
    train_step = autopar.local_steps(
        step, every=EVERY, outer=MEAN, codec=codec, overlap=overlap, cluster="2x1:cpu"
    )
    state = train_step.init(create, jax.random.key(0), batch={"x": rows(0)})
    for number in range(1, STEPS + 1):
        state, _ = train_step(state, {"x": rows(number)})
    assert np.isfinite(train_step.agreed(state)["least"])
    rtol = 1e-5 if codec == "dense" else 1e-2
    for own, expected in zip(state.replicas, by_hand(overlap), strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol),
            own,
            expected,
        )


def test_unchanged_arrays_are_not_sent() -> None:
    train_step = autopar.local_steps(step, every=EVERY, cluster="2x1:cpu")
    train_step.init(create, jax.random.key(0), batch={"x": rows(0)})
    sent = [leaf.path for group in train_step.groups for leaf in group.exchange.leaves]
    assert sorted(sent) == ["state/least", "state/w"]


def test_without_donation_states_stay_valid() -> None:
    """Also if an outer step moves their anchors and residuals."""
    train_step = autopar.local_steps(
        step, every=1, codec="int4", cluster="2x1:cpu", donate=False
    )
    first = train_step.init(create, jax.random.key(0), batch={"x": rows(0)})
    second, _ = train_step(first, {"x": rows(1)})
    made = [train_step(second, {"x": rows(2)})[0] for _ in range(2)]
    made.append(train_step.synchronise(second))
    made.append(train_step.synchronise(second))
    for own, expected in (made[:2], made[2:]):
        jax.tree.map(np.testing.assert_array_equal, own, expected)


@pytest.mark.parametrize("codec", ["dense", "int4"])
def test_consumed_states_are_named(codec: str) -> None:
    train_step = autopar.local_steps(step, every=1, codec=codec, cluster="2x1:cpu")
    state = train_step.init(create, jax.random.key(0), batch={"x": rows(0)})
    train_step.synchronise(state)
    for call in (train_step.synchronise, train_step.agreed):
        with pytest.raises(PlanError, match=r"LocalState.* was consumed"):
            call(state)


def test_a_loss_scale_is_no_parameter() -> None:
    """The outer optimizer's momentum would move it on, below zero."""

    def scaled(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            loss = jnp.mean((params["gain"] * batch["x"] @ params["w"]) ** 2)
            return loss * state["scale"]

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        finite = jnp.all(jnp.isfinite(gradients["w"]))
        params = jax.tree.map(
            lambda x, g: jnp.where(finite, x - 1e-2 * g / state["scale"], x),
            state["params"],
            gradients,
        )
        scale = jnp.where(finite, state["scale"], state["scale"] / 2)
        return {"params": params, "scale": scale}, loss / state["scale"]

    train_step = autopar.local_steps(scaled, every=1, cluster="2x1:cpu")
    params = {"w": jnp.ones((WIDTH, WIDTH)), "gain": jnp.float32(1.0)}
    state = train_step.init(
        lambda: {"params": params, "scale": jnp.float32(1024.0)}, batch={"x": rows(0)}
    )
    sent = {
        x.path: x.outer for group in train_step.groups for x in group.exchange.leaves
    }
    assert sent == {
        "state/params/gain": True,
        "state/params/w": True,
        "state/scale": False,
    }
    for number in range(6):
        x = np.full_like(rows(0), np.inf) if number == 1 else rows(number)
        state, _ = train_step(state, {"x": x})
    assert float(state.state["scale"]) == 512.0
