"""Tests that training continues with a smaller last batch, without moving the state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import step_forms as forms
from jax.sharding import PartitionSpec as P

import autopar
from autopar import PlanError
from autopar.runtime import arguments
from autopar.runtime.evaluation import batch_axes

CLUSTER = forms.cheap("8:cpu")
PINS = {"batch/*": P("data"), "params/up": P(None, "data")}


def trained(step: Any, rows: list[int], **options: Any) -> Any:
    run = autopar.parallelize(step, **options) if options else jax.jit(step)
    state = forms.create_plain(jax.random.key(0))
    losses: list[float] = []
    for k, count in enumerate(rows):
        batch = list(forms.batches(k + 1, rows=max(count, 1)))[k]
        *state, loss = run(*state, batch)
        losses.append(float(loss))
    return losses, state, run


@pytest.mark.parametrize("last", [16, 8, 5, 1])
def test_runs_with_the_losses_of_one_device(last: int) -> None:
    rows = [24, last, 24, last]
    want, after, _ = trained(forms.plain_step, rows)
    have, state, run = trained(forms.plain_step, rows, cluster=CLUSTER, pins=PINS)
    np.testing.assert_allclose(have, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert len(run._store) == 2


@pytest.mark.parametrize("asked", [{}, {"microbatches": 2}])
def test_a_saved_plan_runs_smaller_batches(tmp_path: Any, asked: Any) -> None:
    rows = [24, 16, 5, 24]
    _, _, first = trained(
        forms.plain_step, rows[:1], cluster=CLUSTER, pins=PINS, **asked
    )
    first.plan.save(tmp_path / "plan.json")
    want, _, _ = trained(forms.plain_step, rows)
    have, _, run = trained(forms.plain_step, rows, plan=str(tmp_path / "plan.json"))
    np.testing.assert_allclose(have, want, rtol=1e-5)
    assert len(run._store) == len(set(rows))
    larger = next(forms.batches(1, rows=48))
    with pytest.raises(
        PlanError, match="only the batch differs; layouts=plan in place"
    ):
        run(*forms.create_plain(jax.random.key(0)), larger)


def test_state_stays_in_its_layouts() -> None:
    step = autopar.parallelize(forms.plain_step, cluster=CLUSTER, pins=PINS)
    state = forms.create_plain(jax.random.key(0))
    *state, _ = step(*state, next(forms.batches(1)))
    assert any(x for spec in step.plan.inputs.values() for x in spec)
    before = [x.sharding for x in jax.tree.leaves(state)]
    for rows in (5, 7, 24, 1, 16):
        *state, _ = step(*state, next(forms.batches(1, rows=rows)))
        assert [x.sharding for x in jax.tree.leaves(state)] == before


@pytest.mark.parametrize(
    "asked", [{}, {"cut_codecs": "int8"}, {"plan": True, "cut_codecs": "int8"}]
)
def test_stages_stay_in_a_smaller_batch(tmp_path: Any, asked: Any) -> None:
    """With their codecs; a batch that does not divide runs in fewer microbatches."""
    rows = [24, 24, 12, 5, 24]
    options: Any = {"cluster": forms.cheap("2x4:cpu"), "stages": 2, "microbatches": 2}
    options |= {"cut_codecs": asked.get("cut_codecs", "none")}
    if "plan" in asked:
        _, _, made = trained(forms.plain_step, rows[:1], **options)
        made.plan.save(tmp_path / "plan.json")
        options = {"plan": str(tmp_path / "plan.json")}
    run = autopar.parallelize(forms.plain_step, **options)
    state = forms.create_plain(jax.random.key(0))
    losses: list[float] = []
    found: list[Any] = []
    for k, count in enumerate(rows):
        batch = list(forms.batches(k + 1, rows=count))[k]
        *state, loss = run(*state, batch)
        losses.append(float(loss))
        lies = [x.sharding for x in jax.tree.leaves(state)]
        found.append((run.plan.pipeline.activation_codecs, lies))
    want, _, _ = trained(forms.plain_step, rows)
    exact = "cut_codecs" not in asked
    np.testing.assert_allclose(losses, want, rtol=1e-5 if exact else 0.02)
    assert found == found[:1] * len(rows)
    assert found[0][0] == (() if exact else ("int8",))
    assert len(run._store) == 3


def test_drop() -> None:
    step = autopar.parallelize(
        forms.plain_step, cluster=CLUSTER, pins=PINS, last_batch="drop"
    )
    state = forms.create_plain(jax.random.key(0))
    *state, _ = step(*state, next(forms.batches(1)))
    with pytest.warns(UserWarning, match=r"3 of them are dropped \(last_batch='drop'"):
        *state, _ = step(*state, next(forms.batches(1, rows=11)))
    assert step.plan.shapes["batch/x"][0] == 8
    with pytest.warns(UserWarning, match="3 of them are dropped"):
        *state, _ = step(*state, next(forms.batches(1, rows=19)))
    with pytest.raises(PlanError, match="1 rows is smaller than the 8 parts"):
        step(*state, next(forms.batches(1, rows=1)))
    *state, loss = step(*state, next(forms.batches(1)))  # The state is still there.
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    ("asked", "left"),
    [({"stages": 2, "microbatches": 2}, 10), ({"microbatches": 4, "pins": PINS}, 8)],
)
def test_dropped_rows_leave_equal_microbatches(asked: Any, left: int) -> None:
    """Of one stage and of several: 11 rows have no two or four equal parts."""
    step = autopar.parallelize(
        forms.plain_step, cluster=forms.cheap("2:cpu"), last_batch="drop", **asked
    )
    plain, losses = jax.jit(forms.plain_step), list[tuple[float, float]]()
    state, alone = (forms.create_plain(jax.random.key(0)) for _ in range(2))
    first, second = forms.batches(2)
    *state, loss = step(*state, first)
    *alone, wanted = plain(*alone, first)
    losses.append((float(loss), float(wanted)))
    with pytest.warns(UserWarning, match=f"{11 - left} of them are dropped"):
        *state, loss = step(*state, {k: x[:11] for k, x in second.items()})
    *alone, wanted = plain(*alone, {k: x[:left] for k, x in second.items()})
    losses.append((float(loss), float(wanted)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)


def test_pad() -> None:
    step = autopar.parallelize(
        forms.plain_step, cluster=CLUSTER, pins=PINS, last_batch="pad"
    )
    state = forms.create_plain(jax.random.key(0))
    *state, _ = step(*state, next(forms.batches(1)))
    with pytest.warns(UserWarning, match="the last row is repeated 19 times"):
        *state, _ = step(*state, next(forms.batches(1, rows=5)))
    assert step.plan.shapes["batch/x"][0] == forms.BATCH


def test_more_rows_are_planned_anew() -> None:
    rows = [24, 48]
    want, _, _ = trained(forms.plain_step, rows)
    have, _, run = trained(forms.plain_step, rows, cluster=CLUSTER, pins=PINS)
    np.testing.assert_allclose(have, want, rtol=1e-5)
    assert run.plan.shapes["batch/x"][0] == 48


def test_an_unknown_option() -> None:
    with pytest.raises(PlanError, match=r"last_batch='skip': expected 'run'"):
        autopar.parallelize(forms.plain_step, last_batch="skip")


def test_only_rows_may_be_fewer() -> None:
    """Where another dim differs too, the call is of another step."""
    assert arguments._but((4, 5, 6), 0) == (5, 6)
    assert arguments._but((4, 5, 6), 1) == (4, 6)
    assert arguments._but((4, 5, 6), 2) == (4, 5)
    rows = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(
        arguments.resize_rows(rows, 5, 0), rows[[0, 1, 2, 2, 2]]
    )
    np.testing.assert_array_equal(arguments.resize_rows(rows, 1, 1), rows[:, :1])


def test_evaluation_splits_rows_as_the_batch_that_is_split_most() -> None:
    pins = {"batch/x": P(("data", "tensor")), "batch/y": P("data")}
    run = autopar.parallelize(
        forms.plain_step, cluster=forms.cheap("2x4:cpu"), pins=pins, seconds=None
    )
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    running = run.prepare(*state, forms.batch_structs())
    assert batch_axes(running) == ("data", "tensor")
