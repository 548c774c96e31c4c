"""Tests the comparison of training with codecs with exact training."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.runtime.comparing import Comparer, Comparison, judged

WIDTH, ROWS, LAYERS = 32, 128, 4
KEY = jax.random.key(0)
GATHERED = {
    "cluster": "2x2:cpu,network=1Gb/s", "gather_codecs": "int4", "stages": 1,
    "microbatches": 1, "axis_names": ("data", "local"),
    "pins": {"params/*": PartitionSpec("data")},
}  # fmt: skip
SUMMED = {
    "cluster": "2x2:cpu,network=100Mb/s", "compression": "int4", "stages": 1,
    "microbatches": 1, "axis_names": ("data", "local"),
    "pins": {"params/*": PartitionSpec()},
}  # fmt: skip
CUT = {
    "cluster": "2x2:cpu,network=100Mb/s", "cut_codecs": "int4", "stages": 2,
    "microbatches": 2,
}  # fmt: skip
KINDS = {"gathers": GATHERED, "gradients": SUMMED, "cuts": CUT}


def create(key: jax.Array) -> Any:
    keys = jax.random.split(key, LAYERS)
    return {
        f"w{k}": 0.3 * jax.random.normal(x, (WIDTH,) * 2) for k, x in enumerate(keys)
    }


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for k in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"w{k}"])
    return jnp.mean((x - batch["y"]) ** 2)


def step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda x, g: x - 0.05 * g, params, grads), {"loss": loss}


def batch(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, ::-1])}


def train(run: Any, steps: int, params: Any = None) -> tuple[Any, list[float]]:
    losses = []
    params = run.init(create, KEY, batch=batch(0)) if params is None else params
    for k in range(steps):
        params, found = run(params, batch(k))
        losses.append(float(found["loss"]))
    return params, losses


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_without_comparisons(kind: str) -> None:
    """And the exact losses are those of one device, from the state at the begin."""
    options = Comparison(every=2, steps=3, most=10.0)
    run = autopar.parallelize(step, comparison=options, **KINDS[kind])
    _, losses = train(run, 5)
    plain = autopar.parallelize(step, **KINDS[kind])
    params, first = train(plain, 2)
    params = jax.device_get(params)  # after the steps before the comparison
    assert losses[:2] == first
    _, alike = train(autopar.parallelize(step, **KINDS[kind]), 5)
    assert losses == alike
    exact, alone = [], jax.jit(step)
    for k in range(2, 5):
        params, found = alone(params, batch(k))
        exact.append(float(found["loss"]))
    (result,) = run.comparisons
    assert result.step == 5
    assert not result.withdrawn
    assert result.loss == pytest.approx(np.mean(losses[2:]), rel=1e-6)
    assert result.exact_loss == pytest.approx(np.mean(exact), rel=1e-5)
    assert result.loss != pytest.approx(result.exact_loss, rel=1e-7)


def codecs_in(plan: autopar.Plan) -> set[str]:
    found = {g.codec for g in plan.gradients}
    found |= {g.codec for stage in plan.stages for g in stage.gathers}
    if plan.pipeline is not None:
        found |= {*plan.pipeline.activation_codecs, *plan.pipeline.cotangent_codecs}
    return found - {"", "dense"}


@pytest.mark.parametrize("kind", KINDS)
def test_costly_codecs_become_milder(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First int8, then exact values, which the loss on one device confirms."""
    monkeypatch.setattr(Comparer, "_is_costly", lambda *_: True)
    run = autopar.parallelize(
        step, comparison=Comparison(every=1, steps=2), **KINDS[kind]
    )
    params = run.init(create, KEY, batch=batch(0))
    seen = [codecs_in(run.plan)]
    for k in range(6):
        told = k in (2, 4)
        with pytest.warns(UserWarning, match="cost") if told else nullcontext():
            params, _ = run(params, batch(k))
        if codecs_in(run.plan) != seen[-1]:
            seen.append(codecs_in(run.plan))
    assert seen == [{"int4"}, {"int8"}, set()]
    assert [result.withdrawn for result in run.comparisons] == [kind, kind]
    held = jax.device_get(params)
    _, found = run(params, batch(6))
    assert float(found["loss"]) == pytest.approx(float(loss_of(held, batch(6))), 1e-5)


def test_a_new_plan_keeps_the_milder_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparer, "_is_costly", lambda *_: True)
    run = autopar.parallelize(step, comparison=Comparison(every=1, steps=2), **SUMMED)
    with pytest.warns(UserWarning, match="codecs cost progress"):
        params, _ = train(run, 3)
    assert codecs_in(run.plan) == {"int8"}
    run.replan("4x2:cpu,network=100Mb/s", params)
    assert codecs_in(run.plan) == {"int8"}


@pytest.mark.parametrize(
    ("losses", "costly"),
    [
        ([(1.001, 1.0), (1.002, 1.001)], False),
        ([(1.03, 1.0), (1.04, 1.01)], True),
        ([(1.5, 1.0), (0.55, 1.0)], False),  # too little is known
        ([(math.nan, 1.0), (math.nan, 1.0)], True),
        ([(math.nan, math.nan), (1.0, 1.0)], False),
    ],
)
def test_codecs_are_costly_beyond_two_standard_errors(
    losses: list[tuple[float, float]], costly: bool
) -> None:
    assert Comparer(Comparison())._is_costly(judged(losses, 2)) is costly


def test_results_without_a_loss_are_refused() -> None:
    def two(params: Any, batch: Any) -> Any:
        new, found = step(params, batch)
        return new, {"a": found["loss"], "b": 2.0 * found["loss"]}

    run = autopar.parallelize(two, comparison=Comparison(every=0, steps=2), **SUMMED)
    params = run.init(create, KEY, batch=batch(0))
    with pytest.raises(autopar.PlanError, match="which result is the loss"):
        run(params, batch(0))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (functools.partial(Comparison, steps=1), "steps= of at least 2"),
        (functools.partial(Comparison, most=-1.0), "most= of at least 0"),
        (
            lambda: autopar.parallelize(
                step, compression="int8", comparison=Comparison(), fallback="int8"
            ),
            "Leave one of them out",
        ),
        (lambda: autopar.parallelize(step, comparison=5), "Comparison"),
    ],
)
def test_wrong_options_are_refused(made: Any, told: str) -> None:
    with pytest.raises((autopar.PlanError, TypeError), match=told):
        made()
