"""Tests that rows are padded, or devices stay idle, if devices do not divide them."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_step
import step_forms as forms

import autopar
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.idle_devices import (
    UnsplitBatchError,
    dividing_part,
    padded_part,
    part_to_try,
)
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.padding import with_row_multiple


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    return analyse(forms.plain_step, (*state, forms.batch_structs()))


def seconds(analysis: Analysis, count: int) -> float:
    plan = plan_analysis(analysis, forms.cheap(f"{count}:cpu"))
    return plan.predicted.step_s


def test_one_device_more_never_makes_a_step_slower(analysis: Analysis) -> None:
    found = [seconds(analysis, count) for count in range(1, 10)]
    best = np.minimum.accumulate(found)
    np.testing.assert_array_less(found, 1.01 * best)


@pytest.mark.parametrize("count", [5, 7, 9])
def test_the_fastest_plan(analysis: Analysis, count: int) -> None:
    cluster = forms.cheap(f"{count}:cpu")
    whole = PlanOptions(may_idle=False)
    part = dividing_part(cluster, forms.BATCH)
    assert part is not None
    best = plan_analysis(analysis, part, whole).predicted.step_s
    padded = with_row_multiple(analysis, count)
    best = min(best, plan_analysis(padded, cluster, whole).predicted.step_s)
    with contextlib.suppress(UnsplitBatchError):
        best = min(best, plan_analysis(analysis, cluster, whole).predicted.step_s)
    assert seconds(analysis, count) == best


def test_the_plan_says_what_is_idle() -> None:
    options = PlanOptions(may_pad=False)
    found = analyse(small_step.step, small_step.structs(32))
    plan = plan_analysis(found, Cluster.parse("5:cpu"), options)
    assert plan.cluster.text.endswith("(devices 0-3 of 5)")
    assert plan.solver.status.endswith(
        "1 device idle, because 4 devices divide the batch"
    )
    assert autopar.Plan.from_json(json.dumps(plan.to_json())) == plan


def deep_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        out = batch
        for _ in range(6):
            out = jnp.tanh(out @ w)
        return jnp.mean(out**2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.5 * grad, loss


def test_the_plan_says_how_many_rows_are_padded() -> None:
    w = jax.ShapeDtypeStruct((61, 61), jnp.float32)  # nothing divides the width
    batch = jax.ShapeDtypeStruct((404, 61), jnp.float32)
    plan = plan_analysis(analyse(deep_step, (w, batch)), forms.cheap("5:cpu"))
    assert plan.row_multiple == 5
    assert plan.decided[0] == "rows: 404 padded to 405, which 5 devices divide"
    assert "rows padded to a multiple of 5" in str(plan)
    assert plan.worth is not None
    assert plan.worth.rows == 404
    assert autopar.Plan.from_json(json.dumps(plan.to_json())) == plan


def sorted_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.sort(batch @ w, 0)[:2]))(w)
    return w - 0.5 * grad, loss


def test_the_plan_says_why_rows_are_not_padded() -> None:
    found = analyse(sorted_step, small_step.structs(32))
    plan = plan_analysis(found, forms.cheap("5:cpu"))
    assert plan.row_multiple == 1
    assert "32 rows cannot be padded to 35" in plan.solver.status
    assert "'sort'" in plan.solver.status


def test_less_than_half_of_the_devices_is_an_error() -> None:
    found = analyse(sorted_step, small_step.structs(31))
    why = r"31 .*\n.*31 rows cannot be padded to 32.*'sort'.*\n  try: a batch of 32"
    with pytest.raises(PlanError, match=why):
        plan_analysis(found, forms.cheap("4:cpu"))


@pytest.mark.parametrize(
    ("devices", "rows", "microbatches", "count"),
    [
        (5, 32, None, 5),
        (5, 64, 2, 5),
        (5, 32, 2, 0),  # 4 devices have as few rows each
        (13, 48, None, 0),
        (6, 32, None, 6),
        (15, 32, None, 12),  # 12 has more divisors of the width
        (7, 3, 1, 0),  # there are fewer rows than devices
    ],
)
def test_rows_are_padded_if_devices_work_on_fewer(
    devices: int, rows: int, microbatches: int | None, count: int
) -> None:
    found = analyse(small_step.step, small_step.structs(rows))
    cluster = Cluster.parse(f"{devices}:cpu")
    options = PlanOptions(microbatches=microbatches)
    part = part_to_try(found, cluster, options)
    assert part is not None
    few = padded_part(found, cluster, part, options)
    assert (few.num_devices if few else 0) == count
    options = PlanOptions(microbatches=microbatches, may_pad=False)
    assert padded_part(found, cluster, part, options) is None


@pytest.mark.parametrize(
    "options",
    [
        {"may_idle": False},
        {"split_batch": False},
        {"pins": {"w": jax.sharding.PartitionSpec()}},
        {"axis_names": ("x",)},
        {"stages": 2},
    ],
    ids=lambda x: next(iter(x)),
)
def test_options_about_all_devices(analysis: Analysis, options: dict[str, object]):
    cluster = Cluster.parse("5:cpu")
    assert part_to_try(analysis, cluster, PlanOptions()) is not None
    asked = dataclasses.replace(PlanOptions(), **options)
    assert part_to_try(analysis, cluster, asked) is None


@pytest.mark.parametrize(
    ("cluster", "microbatches", "count"),
    [("6:cpu", None, 4), ("6:cpu", 2, 4), ("12:cpu", 2, 8), ("3x4:cpu", None, 8)],
)
def test_rows_of_a_microbatch_are_divided(
    cluster: str, microbatches: int | None, count: int
) -> None:
    found = analyse(small_step.step, small_step.structs(32))
    options = PlanOptions(microbatches=microbatches)
    part = part_to_try(found, Cluster.parse(cluster), options)
    assert part is not None
    assert part.num_devices == count


@pytest.mark.parametrize("count", [5, 7])
def test_the_step_runs_on_the_part(count: int) -> None:
    batch = small_step.batch(4)
    made = autopar.parallelize(small_step.step, cluster=f"{count}:cpu")
    state, loss = made(made.init(small_step.state), batch)
    expected_state, expected = jax.jit(small_step.step)(small_step.state(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=1e-6)
    assert len(state.sharding.device_set) == 4


def test_a_plan_says_what_tries_several_stages() -> None:
    step = autopar.parallelize(
        forms.plain_step, cluster=forms.cheap("2x4:cpu"), noise_scale=True
    )
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    decided = step.prepare(*state, forms.batch_structs()).plan.decided
    [line] = [text for text in decided if text.startswith("one stage: ")]
    assert line.endswith(
        "noise_scale= is measured; stages='auto' also tries several stages"
    )
