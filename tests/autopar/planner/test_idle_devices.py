"""Tests that devices which do not divide the batch stay idle if this is faster."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
import small_step
import step_forms as forms

import autopar
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import (
    UnsplitBatchError,
    dividing_part,
    part_to_try,
    plan_analysis,
)
from autopar.steps.analysis import Analysis, analyse


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
def test_the_faster_of_both_plans(analysis: Analysis, count: int) -> None:
    cluster = forms.cheap(f"{count}:cpu")
    whole = PlanOptions(may_idle=False)
    part = dividing_part(cluster, forms.BATCH)
    assert part is not None
    best = plan_analysis(analysis, part, whole).predicted.step_s
    with contextlib.suppress(UnsplitBatchError):
        best = min(best, plan_analysis(analysis, cluster, whole).predicted.step_s)
    assert seconds(analysis, count) == best


def test_the_plan_says_what_is_idle() -> None:
    plan = small_step.plan("5:cpu", rows=32)
    assert plan.cluster.text.endswith("(devices 0-3 of 5)")
    assert plan.solver.status.endswith(
        "1 device idle, because 4 devices divide the batch"
    )
    assert autopar.Plan.from_json(json.dumps(plan.to_json())) == plan


def test_less_than_half_of_the_devices_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"(?s)31 .*a batch of 32"):
        small_step.plan("4:cpu", rows=31)


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
    batch = small_step.batch(32)
    made = autopar.parallelize(small_step.step, cluster=f"{count}:cpu")
    state, loss = made(made.init(small_step.state), batch)
    expected_state, expected = jax.jit(small_step.step)(small_step.state(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=1e-6)
    assert len(state.sharding.device_set) == 4
