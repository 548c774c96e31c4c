"""Tests plans that compute the loss in blocks of tokens."""

from __future__ import annotations

from typing import Any

import jax
import loss_steps
import msgspec
import numpy as np
import pytest
from sharing_links import small_devices

import autopar
from autopar.planner import idle_devices
from autopar.reports.table import shape_of_plan
from autopar.steps import for_devices


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes any loss in the largest number of blocks."""
    monkeypatch.setattr(for_devices, "_LOGITS", 0.0)
    monkeypatch.setattr(for_devices, "_BLOCK", 0.0)
    monkeypatch.setattr(for_devices, "_BLOCK_TOKENS", 1)
    every = idle_devices.alternatives
    monkeypatch.setattr(
        idle_devices, "alternatives", lambda *a, **k: every(*a, **k)[-1:]
    )


def check_trains(planned: Any, step: Any, state: Any, batch: Any) -> None:
    """Compares three steps with those of one device."""
    plain = jax.jit(step)
    one, other = state, state
    for _ in range(3):
        one, found = planned(one, *batch)
        other, expected = plain(other, *batch)
        pairs = zip(
            *map(jax.tree.leaves, ((one, found), (other, expected))), strict=True
        )
        for a, b in pairs:
            most = float(abs(np.asarray(b)).max())
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * most)


def check_saved(planned: Any, step: Any, state: Any, batch: Any) -> None:
    """Runs the step by its saved plan."""
    plan = autopar.Plan.from_json(msgspec.json.encode(planned.plan))
    again = autopar.parallelize(step, plan=plan, donate=False)
    expected = planned(state, *batch)
    jax.tree.map(np.testing.assert_array_equal, again(state, *batch), expected)


@pytest.mark.parametrize(
    "how",
    [
        {"loss": loss_steps.with_metrics, "tied": True},
        {"loss": loss_steps.with_z_loss, "bias": True},
        {"loss": loss_steps.one_hot_sum, "scanned": True},
        {"loss": loss_steps.softcapped, "microbatches": 2, "rows": 16},
        {"loss": loss_steps.flat, "again": True},
    ],
    ids=lambda how: "-".join(getattr(x, "__name__", k) for k, x in how.items()),
)
@pytest.mark.usefixtures("in_blocks")
def test_blocks_of_split_rows_train_as_one_device(how: dict[str, Any]) -> None:
    how = dict(how)
    options: dict[str, Any] = {"microbatches": how.pop("microbatches", 1)}
    step, state, batch = loss_steps.training(how.pop("loss"), **how)
    planned = autopar.parallelize(
        step, donate=False, cluster=small_devices(), axis_names=("data",),
        max_axes=1, stages=1, remat=0, seconds=1, **options,
    )  # fmt: skip

    check_trains(planned, step, state, batch)

    plan = planned.plan
    assert plan.loss_blocks > 1
    assert plan.microbatches == options["microbatches"]
    assert f"loss in {plan.loss_blocks} blocks of tokens" in shape_of_plan(plan)
    audit = autopar.audit(step, state, *batch, plan=plan)
    assert audit.agrees, str(audit)
    # The gradient of the output matrix is summed over devices after the last block.
    params = sum(x.nbytes for x in jax.tree.leaves(state[0]))
    assert audit.stages[0].predicted["all_reduce"] <= 3 * params + 4096, str(audit)
    check_saved(planned, step, state, batch)


@pytest.mark.usefixtures("in_blocks")
def test_blocks_of_a_split_sequence_train_as_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(for_devices, "_SCORES", 0.0)
    step, state, batch = loss_steps.training(loss_steps.with_metrics, rows=2)
    planned = autopar.parallelize(
        step, donate=False, cluster=small_devices(), axis_names=("sequence",),
        max_axes=1, stages=1, microbatches=1, remat=0, seconds=1,
    )  # fmt: skip

    check_trains(planned, step, state, batch)

    plan = planned.plan
    assert plan.attention_kernel == "blocks"
    assert plan.loss_blocks == loss_steps.TOKENS // 8
    audit = autopar.audit(step, state, *batch, plan=plan)
    assert audit.agrees, str(audit)
    assert "collective_permute" in str(audit)
    check_saved(planned, step, state, batch)


def test_small_logits_are_planned_as_before() -> None:
    step, state, batch = loss_steps.training()
    plan = autopar.plan(
        step, state, *batch, cluster=small_devices(), stages=1, seconds=1
    )

    assert plan.loss_blocks == 1
    assert "blocks" not in shape_of_plan(plan)
