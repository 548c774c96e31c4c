"""Tests the comparison of training with codecs with exact training."""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.runtime import comparing, parallel_step
from autopar.runtime.comparing import (
    Compared,
    Comparer,
    Comparison,
    cost_of,
    is_costly,
    judged,
    loss_among,
)

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


def batch(number: int, rows: int = ROWS) -> Any:
    x = np.random.default_rng(number).standard_normal((rows, WIDTH)).astype(np.float32)
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
    """And losses are compared as one device computes them."""
    options = Comparison(every=2, steps=3, most=1e9)
    run = autopar.parallelize(step, comparison=options, **KINDS[kind])
    _, losses = train(run, 6)
    coded = autopar.parallelize(step, donate=False, **KINDS[kind])
    states, params = [], coded.init(create, KEY, batch=batch(0))
    for k in range(6):
        states.append(jax.device_get(params))
        params, found = coded(params, batch(k))
        assert float(found["loss"]) == losses[k]
    exact, params, alone = [], states[2], jax.jit(step)
    for k in range(2, 6):
        params, found = alone(params, batch(k))
        exact.append(float(found["loss"]))
    (result,) = run.comparisons
    assert (result.step, result.withdrawn) == (6, "")
    coarse = [float(loss_of(states[k], batch(k))) for k in range(3, 6)]
    assert result.loss == pytest.approx(np.mean(coarse), rel=1e-5)
    assert result.exact_loss == pytest.approx(np.mean(exact[1:]), rel=1e-5)
    difference = np.mean(coarse) - np.mean(exact[1:])
    assert difference != 0.0
    assert result.loss - result.exact_loss == pytest.approx(difference, rel=0.1)


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
    monkeypatch.setattr(parallel_step, "is_costly", lambda *_: True)
    run = autopar.parallelize(
        step, comparison=Comparison(every=1, steps=2), **KINDS[kind]
    )
    params = run.init(create, KEY, batch=batch(0))
    seen = [codecs_in(run.plan)]
    for k in range(8):
        told = k in (3, 6)
        with pytest.warns(UserWarning, match="cost") if told else nullcontext():
            params, _ = run(params, batch(k))
        if codecs_in(run.plan) != seen[-1]:
            seen.append(codecs_in(run.plan))
    assert seen == [{"int4"}, {"int8"}, set()]
    assert [result.withdrawn for result in run.comparisons] == [kind, kind]
    held = jax.device_get(params)
    _, found = run(params, batch(8))
    assert float(found["loss"]) == pytest.approx(float(loss_of(held, batch(8))), 1e-5)


def test_a_new_plan_keeps_the_milder_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_step, "is_costly", lambda *_: True)
    run = autopar.parallelize(step, comparison=Comparison(every=1, steps=2), **SUMMED)
    with pytest.warns(UserWarning, match="codecs cost"):
        params, _ = train(run, 4)
    assert codecs_in(run.plan) == {"int8"}
    run.replan("4x2:cpu,network=100Mb/s", params)
    assert codecs_in(run.plan) == {"int8"}


def compared(
    losses: list[tuple[float, float]], fall: float = 1 / 30, **changes: Any
) -> Compared:
    result = judged(losses, 2)
    cost = cost_of(result.loss - result.exact_loss, fall, len(losses))
    return dataclasses.replace(result, cost=cost, **changes)


@pytest.mark.parametrize(
    ("result", "least"),
    [
        (compared([(1.02, 1.0), (1.03, 1.01)]), 0.4),  # 0.6 steps behind
        (compared([(1.02, 1.0), (1.03, 1.01)], fall=-0.1), math.inf),
        (compared([(0.9, 1.0), (0.9, 1.0)]), 0.0),
        (compared([(0.9, 1.0), (0.9, 1.0)], fall=-0.1), 0.0),
        (compared([(1.5, 1.0), (0.55, 1.0)]), 0.0),  # too little is known
        (compared([(math.nan, 1.0), (1.0, 1.0)]), math.inf),
        (compared([(math.nan, math.nan), (1.0, 1.0)]), 0.0),
        (judged([(2.0, 1.0), (2.0, 1.0)], 2), 0.0),  # its fall is not known
    ],
)
def test_the_sure_cost_is_beyond_standard_errors(
    result: Compared, least: float
) -> None:
    assert result.sure_cost == pytest.approx(least)


def test_codecs_may_cost_what_faster_steps_make_up_for() -> None:
    """A cost of 40 % needs steps that are faster by 40 %, or a bound as high."""
    result = compared([(1.02, 1.0), (1.03, 1.01)])
    assert is_costly(result, None, lambda: 0.3)
    assert not is_costly(result, None, lambda: 0.5)
    assert is_costly(result, 0.3, lambda: 0.9)
    assert not is_costly(result, 0.5, lambda: 0.0)


def test_progress_is_measured_from_comparison_to_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step lowers the loss by 0.9 with codecs, and by 1 without."""
    comparer = Comparer(Comparison(every=4, steps=2))
    state = jnp.float32(0.0)
    planned: Any = mock.Mock(in_shardings=[state.sharding], sums=None, noise=None)
    planned.analysis.carried_arguments = {0: 0}
    planned.function = lambda state: [state + 1.0]
    monkeypatch.setattr(comparing, "kinds_of", lambda plan: ["gradients"])
    monkeypatch.setattr(comparing, "exact_plan", lambda plan: plan)
    for _ in range(14):
        comparer.begin_step(
            planned, [state], lambda _: planned, lambda x: -float(x[0]), full=True
        )
        state = state + 0.9
        found = comparer.end_step(planned, [state], lambda flat: -float(flat[0]))
        if found is not None:
            comparer.end(found, "")
    assert [result.step for result in comparer.results] == [7, 14]
    for result in comparer.results:
        assert result.loss - result.exact_loss == pytest.approx(0.15, rel=1e-4)
        assert 0.1 < result.cost < 0.12


@pytest.mark.parametrize("kind", ["gradients", "cuts"])
def test_comparisons_go_on_with_the_last_batch_of_an_epoch(kind: str) -> None:
    """An epoch has three batches, and a comparison four steps."""
    options = Comparison(every=1, steps=4, most=1e9)
    run = autopar.parallelize(step, comparison=options, **KINDS[kind])
    params, exact, losses = run.init(create, KEY, batch=batch(0)), None, []
    batches = [batch(k, ROWS // 2 if k % 3 == 2 else ROWS) for k in range(7)]
    for k, rows in enumerate(batches):
        if k == 1:
            exact = jax.device_get(params)
        if exact is not None:
            coarse = float(loss_of(jax.device_get(params), rows))
            exact, found = jax.jit(step)(exact, rows)
            losses.append((coarse, float(found["loss"])))
        params, _ = run(params, rows)
    (result,) = run.comparisons
    expected = judged(losses[1 : result.step - 1], result.step)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.exact_loss == pytest.approx(expected.exact_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["loss", "aux_loss", "norm"], "loss"),
        (["metrics/loss", "metrics/aux_loss"], "metrics/loss"),
        (["[0]['aux_loss']", "[0]['Loss']"], "[0]['Loss']"),
        (["norm", "mean_loss"], "mean_loss"),
        (["value"], "value"),
        (["a_loss", "b_loss"], None),
        (["0/loss", "1/loss"], None),
        (["a", "b"], None),
    ],
)
def test_the_loss_is_found_by_its_name(names: list[str], chosen: str | None) -> None:
    values = {name: jnp.float32(k) for k, name in enumerate(names)}
    found = loss_among(values)
    assert found is (None if chosen is None else values[chosen])


def test_results_without_a_loss_are_refused() -> None:
    def two(params: Any, batch: Any) -> Any:
        new, found = step(params, batch)
        return new, {"a": found["loss"], "b": 2.0 * found["loss"]}

    run = autopar.parallelize(two, comparison=Comparison(every=0, steps=2), **SUMMED)
    params = run.init(create, KEY, batch=batch(0))
    with pytest.raises(autopar.PlanError, match="which result is the loss"):
        run(params, batch(0))
    assert not params["w0"].is_deleted()


def test_constants_are_no_losses() -> None:
    """They are known before the first step, which consumes the state."""

    def beside(params: Any, batch: Any) -> Any:
        new, found = step(params, batch)
        return new, {"a": found["loss"], "b": 0.5, "c": jnp.float32(2.0)}

    def alone(params: Any, batch: Any) -> Any:
        return step(params, batch)[0], {"loss": 0.5}

    options = Comparison(every=0, steps=2)
    run = autopar.parallelize(beside, comparison=options, **SUMMED)
    params = run.init(create, KEY, batch=batch(0))
    for k in range(3):
        params, _ = run(params, batch(k))
    assert run.comparisons[0].exact_loss > 0.5
    run = autopar.parallelize(alone, comparison=options, **SUMMED)
    params = run.init(create, KEY, batch=batch(0))
    with pytest.raises(autopar.PlanError, match="which result is the loss"):
        run(params, batch(0))
    assert not params["w0"].is_deleted()


def test_no_loss_is_read_without_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that stand for the first comparison are those since codecs are used."""
    read: list[float] = []
    comparer = Comparer(Comparison(every=4, steps=2))

    def loss_of(flat: Any) -> float:
        read.append(flat[0])
        return flat[0]

    kinds: dict[Any, list[str]] = {}
    monkeypatch.setattr(comparing, "kinds_of", kinds.get)
    for codecs, losses in (
        (["cuts"], [9.0]),
        ([], [8.0, 7.0, 6.0]),
        (["cuts"], [5.0, 4.0]),
    ):
        planned: Any = mock.Mock()
        kinds[planned.plan] = codecs
        for loss in losses:
            comparer.end_step(planned, [loss], loss_of)
    assert read == [9.0, 5.0, 4.0]
    assert comparer._known == (4.5, -0.5)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (functools.partial(Comparison, steps=1), "steps= of at least 2"),
        (functools.partial(Comparison, most=-1.0), "most= of at least 0, or None"),
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
