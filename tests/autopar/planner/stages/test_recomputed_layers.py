"""Tests the choice of rematerialised layers in several stages, by memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Cluster, InfeasibleError, Plan, PlanError
from autopar.planner.edited import carried_out
from autopar.steps.analysis import analyse

DEPTH, WIDTH, ROWS = 6, 32, 64


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = batch
    for up, down in params:
        x = x + jax.numpy.tanh(jax.nn.gelu(x @ up) @ down)
    return jax.numpy.mean(x**2)


def step(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    params = [
        tuple(0.1 * random.standard_normal(s).astype(np.float32) for s in shapes)
        for _ in range(DEPTH)
    ]
    return params, random.standard_normal((ROWS, WIDTH)).astype(np.float32)


OPTIONS: dict[str, Any] = {
    "stages": 3, "microbatches": 8, "schedule": "1f1b", "axis_names": ("data",),
    "pins": {"batch": P("data"), "received/*": P("data"), "params/*": P()},
    "seconds": 5,
}  # fmt: skip


@functools.cache
def planned(remat: Any, memory: int | None = None) -> Plan:
    cluster = Cluster.parse("3x2:cpu")
    if memory is not None:
        device = dataclasses.replace(cluster.device, memory_bytes=memory)
        cluster = dataclasses.replace(cluster, device=device)
    asked = {**OPTIONS, "remat": remat}
    return autopar.plan(step, *arguments(), cluster=cluster, **asked)


def recomputed(plan: Plan) -> tuple[int, ...]:
    assert plan.pipeline is not None
    return plan.pipeline.recomputed


@functools.cache
def most_bytes(layers: tuple[int, ...]) -> float:
    """The memory of a plan whose file lists the rematerialised layers."""
    data = json.loads(msgspec.json.encode(planned(0)))
    data["pipeline"]["recomputed"] = list(layers)
    edited = Plan.from_json(json.dumps(data))
    found = carried_out(analyse(step, arguments()), edited, seconds=5)
    return found.predicted.peak_memory_bytes


@pytest.mark.parametrize("number", range(1, DEPTH))
def test_no_other_layers_need_less_memory(number: int) -> None:
    plan = planned(number)
    assert len(recomputed(plan)) == number
    every = itertools.combinations(range(DEPTH), number)
    least = min(map(most_bytes, every))
    assert plan.predicted.peak_memory_bytes == pytest.approx(least)


def test_the_first_stage_holds_most_microbatches() -> None:
    assert recomputed(planned(0)) == ()
    assert recomputed(planned(2)) == (0, 1)
    assert recomputed(planned("all")) == tuple(range(DEPTH))


def test_as_few_layers_as_are_needed_to_fit() -> None:
    free, two = (planned(n).predicted.peak_memory_bytes for n in (0, 2))
    memory = round((free + two) / 2)
    with pytest.raises(InfeasibleError, match="remat='auto'"):
        planned(0, memory)
    found = planned("auto", memory)
    assert 0 < len(recomputed(found)) <= 2
    assert found.predicted.peak_memory_bytes <= memory
    assert recomputed(planned("auto")) == ()


def test_losses_and_state_are_those_of_one_device() -> None:
    state, batch = arguments()
    run = autopar.parallelize(step, plan=planned(3), donate=False)
    for _ in range(2):
        (new, loss), (other, expected) = run(state, batch), jax.jit(step)(state, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        state = other
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), new, other
    )


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (DEPTH + 1, "the step has 6 layers"),
        ("2:dots", "stages keep nothing of the layers"),
        ("0:kernels", "with its attention kernels. Leave remat out"),
        ("none", "drops the step's own jax.checkpoint"),
    ],
)
def test_what_cannot_be_is_refused(remat: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(remat)


def test_layers_of_a_loop_are_refused() -> None:
    def loop(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), batch, params)
            return jax.numpy.mean(x[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    args = np.ones((4, 32, 32), np.float32), np.ones((64, 32), np.float32)
    with pytest.raises(PlanError, match="layers of the step are a loop"):
        autopar.plan(loop, *args, cluster="4:cpu", stages=2, remat=2)


def test_with_the_best_number_of_stages() -> None:
    asked = {"stages": "auto", "remat": 2, "seconds": 5, "microbatches": 8}
    plan = autopar.plan(step, *arguments(), cluster="2:cpu", **asked)
    again = recomputed(plan) if len(plan.stages) > 1 else plan.remat.layers
    assert len(again) == 2
