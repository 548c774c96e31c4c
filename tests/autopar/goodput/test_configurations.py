"""Tests the best batch of a configuration against planning anew."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster
from autopar.cost.live import habits_of
from autopar.errors import PlanError, ScheduleError
from autopar.goodput.configurations import (
    Batches,
    PlanAtBatches,
    ProgramAtBatches,
    WantedCurve,
    chain,
    configuration,
    prepare_batches,
)
from autopar.planner.cache import PlanCache
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import analyse

OPTIONS = PlanOptions(seconds=2)
ROWS = 64


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ p["up"])
        return jnp.mean((x @ p["down"] - batch["x"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def normalised(params: Any, batch: Any) -> Any:
    """A model whose loss couples the rows of the batch."""

    def loss(p: Any) -> jax.Array:
        x = batch["x"] @ p["up"]
        return jnp.mean(((x - x.mean(0)) / (x.std(0) + 1e-3) - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def program(function: Any = step, width: int = 256) -> ProgramAtBatches:
    struct = jax.ShapeDtypeStruct
    params = {
        "up": struct((width, 4 * width), jnp.float32),
        "down": struct((4 * width, width), jnp.float32),
    }
    if function is normalised:
        params.pop("down")
    rows = {"x": struct((ROWS, width), jnp.float32)}
    return ProgramAtBatches(analyse(function, (params, rows)))


def wanted(**fields: Any) -> WantedCurve:
    batches = Batches(base=ROWS, most=8 * ROWS, noise_scale=500.0)
    given = {"program": program(), "batches": batches, "options": OPTIONS}
    return WantedCurve(**{**given, **fields})


@functools.cache
def two_devices() -> PlanAtBatches:
    cluster = Cluster.parse("2:h100")
    plan = plan_analysis(program().at(ROWS), cluster, OPTIONS)
    return prepare_batches(program(), ROWS, cluster, plan)


@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
def test_memory_at_another_batch_is_that_of_tracing_anew(factor: float) -> None:
    made, rows = two_devices(), int(ROWS * factor)
    cluster = Cluster.parse("2:h100")
    options = dataclasses.replace(OPTIONS, layouts=made.plan)
    anew = plan_analysis(program().at(rows), cluster, options)
    assert made.peak_bytes(factor, 1) == pytest.approx(
        anew.predicted.peak_memory_bytes, rel=1e-6
    )
    assert made.step_s(rows, 1) == pytest.approx(anew.predicted.step_s, rel=0.02)


def test_microbatches_need_less_and_take_longer() -> None:
    made = two_devices()
    assert made.peak_bytes(8.0, 4) < made.peak_bytes(8.0, 1)
    assert made.step_s(8 * ROWS, 4) > made.step_s(8 * ROWS, 1)
    assert list(made.splits(ROWS))[:3] == [1, 2, 4]


def test_more_devices_take_a_larger_batch() -> None:
    clusters = [Cluster.parse(f"{n}:h100") for n in (1, 2, 4)]
    found = [item.point for item in chain(wanted(), clusters)]
    assert [p.devices for p in found] == [1, 2, 4]
    assert all(p.goodput > 0 and not p.reason for p in found)
    for p in found:
        assert p.goodput == pytest.approx(p.batch / p.step_s * p.efficiency)
        assert p.efficiency == pytest.approx((500 + ROWS) / (500 + p.batch))
        assert p.batch % p.devices == 0


def test_without_a_noise_scale_the_batch_stays() -> None:
    batches = Batches(base=ROWS, most=ROWS)
    point = configuration(wanted(batches=batches), Cluster.parse("2:h100"), None).point
    assert (point.batch, point.efficiency) == (ROWS, 1.0)


def test_a_batch_that_does_not_fit_is_cut_into_microbatches() -> None:
    """The memory holds a microbatch of less than the base batch."""
    full = configuration(wanted(), Cluster.parse("1:h100"), None)
    assert full.plan is not None
    batches = Batches(base=64 * ROWS, most=64 * ROWS)
    many = wanted(batches=batches, program=program(step, 64))
    free = configuration(many, Cluster.parse("1:h100"), None).point
    assert free.accumulation == 1
    device = Cluster.parse("1:h100").device
    kept = habits_of(device).workspace_bytes  # a plan of any batch needs it
    limit = int(kept + 0.7 * (free.peak_memory_bytes - kept))
    device = dataclasses.replace(device, memory_bytes=limit)
    small = dataclasses.replace(Cluster.parse("1:h100"), device=device)
    tight = configuration(many, small, None).point
    assert tight.accumulation > 1
    assert tight.peak_memory_bytes <= limit
    assert tight.batch == free.batch


def test_what_cannot_run_says_why() -> None:
    none = Cluster.parse("1:h100,memory=1kB")
    assert "memory" in configuration(wanted(), none, None).point.reason
    odd = Batches(base=ROWS, most=ROWS)
    point = configuration(wanted(batches=odd), Cluster.parse("5:h100"), None).point
    assert point.goodput == 0
    assert "cannot be split" in point.reason
    mixed = configuration(wanted(), Cluster.parse("1:h100+1:a100"), None).point
    assert "several kinds" in mixed.reason


def test_an_odd_number_of_devices_takes_a_batch_that_it_divides() -> None:
    point = configuration(wanted(), Cluster.parse("3:h100"), None).point
    assert point.goodput > 0
    assert point.batch % 3 == 0


def test_rows_that_are_coupled_are_not_cut_into_microbatches() -> None:
    """A batch of coupled rows would be another one in parts."""
    couples = wanted(program=program(normalised))
    free = configuration(couples, Cluster.parse("1:h100"), None).point
    assert (free.reason, free.accumulation) == ("", 1)


def test_plans_are_kept_by_program_and_cluster(tmp_path: pathlib.Path) -> None:
    clusters = [Cluster.parse("1:h100"), Cluster.parse("2:h100")]
    kept = wanted(cache=PlanCache(tmp_path))
    first = [item.point for item in chain(kept, clusters)]
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    assert files
    assert [item.point for item in chain(kept, clusters)] == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")} == files


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base": 0, "most": 8}, "base batch is 0"),
        ({"base": 16, "most": 8}, "largest batch, 8 rows, is below"),
        ({"base": 8, "most": 8, "noise_scale": float("nan")}, "noise scale is nan"),
        ({"base": 8, "most": 8, "noise_scale": -1.0}, "noise scale is -1"),
    ],
)
def test_batches_that_make_no_sense(fields: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Batches(**fields)


def test_a_step_that_states_its_number_of_rows_is_told_so() -> None:
    """Another batch fails in the step's own code, on arrays that nobody passed."""

    def stated(params: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(
            lambda p: jnp.mean((batch["x"] @ p["up"]) * jnp.ones((ROWS, 1)))
        )(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), value

    params = {"up": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    rows = {"x": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)}
    own = ProgramAtBatches(analyse(stated, (params, rows)))

    assert own.at(ROWS) is not None
    with pytest.raises(
        PlanError, match=r"on 128 rows .* cannot be traced.*x\.shape\[0\]"
    ):
        own.at(2 * ROWS)
