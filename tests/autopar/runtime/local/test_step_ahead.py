"""Step-ahead error feedback against a loop over replicas that is written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import PlanError
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.rules import Overlap, StepAhead

REPLICAS, RATIO, RATE = 2, 0.25, 0.05
TX = optax.sgd(RATE, momentum=0.9)


def create(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    params = {
        "first": 0.3 * jax.random.normal(first, (8, 16)),
        "second": 0.3 * jax.random.normal(second, (16, 4)),
    }
    return {"params": params, "opt": TX.init(params)}


def step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        out = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
        return jnp.mean((out - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def batch(number: int) -> Any:
    x = np.random.default_rng(number).normal(size=(8, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :4])}


def largest(x: np.ndarray, devices: int) -> np.ndarray:
    """The array with all but its largest elements replaced by zeros.

    The devices of a replica send different parts, each the largest of its part.
    """
    if devices > 1:
        dim = int(np.argmax(x.shape))
        parts = np.split(x, devices, dim)
        return np.concatenate([largest(part, 1) for part in parts], dim)
    count = int(np.ceil(RATIO * x.size))
    kept = np.zeros(x.size, np.float32)
    places = np.argsort(-np.abs(x.reshape(-1)), kind="stable")[:count]
    kept[places] = x.reshape(-1)[places]
    return kept.reshape(x.shape)


def by_hand(
    every: int, ahead: StepAhead, steps: int, devices: int
) -> tuple[list[float], Any]:
    """The mean losses, and the anchor at the end."""
    states = [create(jax.random.key(0)) for _ in range(REPLICAS)]
    anchor = {k: np.asarray(x) for k, x in states[0]["params"].items()}
    residuals = [{k: np.zeros_like(x) for k, x in anchor.items()} for _ in states]
    run, losses, outer = jax.jit(step), [], 0
    for number in range(1, steps + 1):
        whole = batch(number)
        parts = [
            {k: np.split(x, REPLICAS)[r] for k, x in whole.items()}
            for r in range(REPLICAS)
        ]
        made = [run(s, part) for s, part in zip(states, parts, strict=True)]
        states = [state for state, _ in made]
        losses.append(float(np.mean([loss for _, loss in made])))
        if number % every:
            continue
        for k, before in anchor.items():
            sent = []
            for state, residual in zip(states, residuals, strict=True):
                wanted = before - np.asarray(state["params"][k]) + residual[k]
                sent.append(largest(wanted, devices))
                residual[k] = wanted - sent[-1]
            if ahead.average and (outer + 2) % ahead.average == 0:
                mean = np.mean([r[k] for r in residuals], axis=0)
                for residual in residuals:
                    residual[k] = mean
            anchor[k] = before - np.mean(sent, axis=0)
        outer += 1
        for state, residual in zip(states, residuals, strict=True):
            state["params"] = {
                k: jnp.asarray(x - ahead.part * residual[k]) for k, x in anchor.items()
            }
            for k in residual:
                residual[k] = (1 - ahead.part) * residual[k]
    return losses, anchor


@pytest.mark.parametrize(
    ("every", "ahead", "devices"),
    [
        (1, StepAhead(average=0), 1),
        (1, StepAhead(part=0.5, average=3), 2),
        (2, StepAhead(average=2), 1),
    ],
)
def test_replicas_go_on_where_their_residuals_are_applied(
    every: int, ahead: StepAhead, devices: int
) -> None:
    made = autopar.local_steps(
        step,
        every=every,
        outer=MEAN,
        codec=f"topk:ratio={RATIO},values=f32",
        feedback=ahead,
        cluster=f"{REPLICAS}x{devices}:cpu",
    )
    state = made.init(create, jax.random.key(0), batch=batch(1))
    losses = []
    for number in range(1, 9):
        state, loss = made(state, batch(number))
        losses.append(float(loss))

    want, anchor = by_hand(every, ahead, 8, devices)
    assert losses == pytest.approx(want, rel=1e-5)
    agreed = made.agreed(state)["params"]
    for k, x in anchor.items():
        np.testing.assert_allclose(np.asarray(agreed[k]), x, rtol=1e-4, atol=1e-6)
    gap = np.abs(np.asarray(state.state["params"]["first"]) - anchor["first"]).max()
    assert gap > 1e-4
    state, _ = made(state, batch(9))  # `agreed` has consumed nothing


def test_averages_of_residuals_are_counted() -> None:
    sent = [
        autopar.local_steps(
            step, every=1, outer=MEAN, codec="topk:ratio=0.25", feedback=feedback,
            cluster="2x1:cpu",
        )
        for feedback in (StepAhead(average=0), StepAhead(average=4))
    ]  # fmt: skip
    for made in sent:
        made.init(create, jax.random.key(0), batch=batch(1))
    elements = 8 * 16 + 16 * 4
    assert sent[1].sent_bytes - sent[0].sent_bytes == pytest.approx(4 * elements / 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "dense"}, "no residual"),
        ({"codec": "int8"}, "no residual"),
        ({"codec": "int4", "overlap": Overlap(1)}, "leave overlap= out"),
    ],
)
def test_what_cannot_be_applied_ahead_is_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        autopar.local_steps(step, every=2, feedback=StepAhead(), **options)


@pytest.mark.parametrize("values", [{"part": 0.0}, {"part": 1.1}, {"average": -1}])
def test_settings_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="StepAhead"):
        StepAhead(**values)
