"""Tests `autopar.train`, an elastic run with an adaptive batch size."""

from __future__ import annotations

import contextlib
from typing import Any

import following_cases as cases
import jax
import numpy as np
import optax
import pytest
import step_forms
from flax import nnx
from following_cases import BASE

import autopar
from autopar import PlanError
from autopar.goodput import progress, scale_updates

# Steps until a batch has grown: noise is read in five, and decided on each ten.
GROWN = 41


def started(step: Any = None, tx: Any = None, **options: Any) -> Any:
    kept: dict[str, Any] = {
        "base_batch": BASE,
        "max_batch": 64,
        "ahead": False,
        "steps": GROWN,
    }
    made = tx or cases.optimizer()
    return autopar.train(
        step or cases.parallel(made),
        lambda: cases.create(made),
        cases.source,
        **kept | options,
    )


@pytest.fixture(autouse=True)
def _calls_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each step take one tick of a clock, and everything else take no time."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(
        "autopar.elastic.loop.time.perf_counter", lambda: next(ticks) * 0.5
    )


@pytest.mark.parametrize("mesh", [False, True])
def test_the_batch_grows_and_samples_follow_one_another(mesh: bool) -> None:
    """Under an explicit mesh of the caller, too."""
    devices = jax.devices()[:4]
    own = jax.make_mesh((4,), ("data",), devices=devices)
    with jax.set_mesh(own) if mesh else contextlib.nullcontext():
        run = started(until=lambda done: False)
        positions = [done.position for done in run]
    sizes = np.diff([*positions, run.position])
    assert positions[0] == 0
    assert sizes[0] == BASE
    assert sizes[-1] == 64
    assert set(sizes) == {BASE, 64}
    assert run.progress == progress(run.state) > BASE * GROWN
    (change,) = [x for x in run.ledger.lines if x["kind"] == "batch"]
    assert (change["old"]["rows"], change["new"]["rows"]) == (BASE, 64)
    assert change["position"] == BASE * change["step"]
    assert change["predicted"]["goodput"] > change["predicted"]["goodput_before"]


def test_other_ways_are_prepared_beside_the_run() -> None:
    """No step waits; the change comes once its program is there."""
    run = started(steps=400, ahead=True)
    while run.loop.changes == 0:
        next(run)
        if run.step % 10 == 0:
            run.run.ahead.wait()
    assert run.batch_size == 64
    run.close()


def test_it_ends_by_progress_in_rows_of_the_base_batch() -> None:
    run = started(steps=None, samples=BASE * 3)
    assert len(list(run)) == 3
    assert run.progress == 3 * BASE


def test_it_ends_where_the_user_says() -> None:
    run = started(steps=None, until=lambda done: done.step == 2)
    assert [done.step for done in run] == [0, 1, 2]


def test_devices_go_and_the_batch_stays() -> None:
    """A re-plan keeps the batch and what was learned; the batch still follows."""
    run = started(steps=60)
    while run.batch_size == BASE:
        next(run)
    learned = run.loop.to_data()["track"]
    run.change("2:cpu")
    next(run)
    assert run.plan.cluster.read().num_devices == 2
    assert run.batch_size == 64
    assert len(run.loop.to_data()["track"]["sqr"]) > len(learned["sqr"]) - 2
    done = [done.step for done in run]
    assert done[-1] == 59


def test_it_goes_on_where_a_checkpoint_was_left(tmp_path: Any) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "saved"}
    whole = started(steps=GROWN + 4)
    losses = [float(done.result) for done in whole]
    first = started(steps=GROWN, **options)
    found = [float(done.result) for done in first]
    again = started(steps=GROWN + 4, **options)
    assert (again.step, again.position) == (GROWN, first.position)
    assert again.batch_size == first.batch_size == 64
    assert again.progress == first.progress
    assert again.loop.phi() is not None
    scale = again.loop.step.noise_state
    assert int(scale["steps"]) == GROWN
    found += [float(done.result) for done in again]
    np.testing.assert_allclose(found, losses, rtol=1e-4)


def test_a_source_that_ends_keeps_the_state(tmp_path: Any) -> None:
    def source(position: int, rows: int) -> Any:
        if position + rows > 10 * BASE:
            raise StopIteration
        return cases.source(position, rows)

    tx = cases.optimizer()
    run = autopar.train(
        cases.parallel(tx),
        lambda: cases.create(tx),
        source,
        base_batch=BASE,
        max_batch=BASE,
        steps=99,
        ahead=False,
        checkpoint=tmp_path / "saved",
    )
    with pytest.raises(PlanError, match=r"source\(160, 16\) raised StopIteration"):
        for _ in run:
            pass
    assert run.step == 10
    assert np.isfinite(run.state["w"]).all()
    assert autopar.Checkpoints(tmp_path / "saved").latest() == 10


def test_a_state_of_objects_is_told_in_place() -> None:
    tx = scale_updates(optax.sgd(1e-3), "linear", base_batch=step_forms.BATCH)

    def create() -> Any:
        model = step_forms.NnxNet(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    step = autopar.parallelize(
        step_forms.nnx_step, cluster=step_forms.cheap("4:cpu"), axis_names=("data",)
    )

    def source(position: int, rows: int) -> Any:
        return next(step_forms.batches(1, rows))

    run = autopar.train(
        step,
        create,
        source,
        base_batch=step_forms.BATCH,
        max_batch=48,
        lr_rule="linear",
        steps=3,
        ahead=False,
    )
    _, optimizer = run.state
    list(run)
    assert run.state[1] is optimizer
    assert progress(run.state) == pytest.approx(3 * step_forms.BATCH)


class TestRefusals:
    def test_a_rule_that_the_optimizer_has_not(self) -> None:
        with pytest.raises(PlanError, match=r"lr_rule='sqrt', but .* 'adascale'"):
            started(lr_rule="sqrt")

    def test_an_optimizer_that_does_not_follow(self) -> None:
        for given, named in (({}, "adascale"), ({"lr_rule": "none"}, "none")):
            call = rf"scale_updates\(optimizer, '{named}', base_batch=16\)"
            with pytest.raises(PlanError, match=call):
                started(tx=optax.sgd(0.1), **given)

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"steps": None}, "nothing ends the run"),
            ({"steps": -1}, "steps=-1 must be a whole number"),
            ({"samples": -1.0}, "samples=-1.0 must be a number"),
            ({"until": 3}, "until=3 must be a function"),
            ({"max_batch": 8}, "max_batch=8 is smaller than base_batch=16"),
            ({"every": 3}, "train: every=3 needs checkpoint="),
            ({"codecs": {"int8": -1.0}}, "a ratio of rows must be positive"),
        ],
    )
    def test_arguments(self, wrong: dict[str, Any], text: str) -> None:
        with pytest.raises(PlanError, match=text):
            started(**wrong)

    def test_a_batch_that_no_plan_can_split(self) -> None:
        tx = scale_updates(optax.sgd(0.1), "adascale", base_batch=3)
        with pytest.raises(PlanError, match="a dimension of 3 cannot be split 4 ways"):
            started(tx=tx, base_batch=3, max_batch=5)

    def test_a_checkpoint_of_another_base_batch(self, tmp_path: Any) -> None:
        list(started(steps=2, checkpoint=tmp_path))
        tx = cases.optimizer(base=32)
        with pytest.raises(PlanError, match=r"base_batch=32, but the run .* had 16"):
            started(tx=tx, base_batch=32, checkpoint=tmp_path)
