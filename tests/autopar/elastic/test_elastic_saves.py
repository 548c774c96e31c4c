"""Tests that elastic runs are saved, and continue where an earlier run ended."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import checkpoint_plans as plans
import elastic_runs
import numpy as np
import pytest
import step_forms as forms
from elastic_runs import losses

import autopar
from autopar import Checkpoints, PlanError
from autopar.checkpoint import store

PLAIN = forms.FORMS["plain"]


@pytest.mark.parametrize("name", ["plain", "nnx"])
def test_a_run_goes_on_under_another_plan(name: str, tmp_path: pathlib.Path) -> None:
    form = forms.FORMS[name]
    whole = losses(elastic_runs.started(form, 6))
    first = losses(elastic_runs.started(form, 4, checkpoint=tmp_path, every=2))
    made = Checkpoints(tmp_path)
    assert made.steps() == [2, 4]
    run = elastic_runs.started(form, 6, checkpoint=made)
    assert (run.step, run.position) == (4, 4 * forms.BATCH)
    run.change(forms.cheap("2:cpu"))
    np.testing.assert_allclose(first + losses(run), whole, rtol=1e-5)
    assert made.steps() == [2, 4, 6]
    assert run.ledger.lines[0]["kind"] == "restored"


def test_residuals_go_on(tmp_path: pathlib.Path) -> None:
    """The losses are those of a run without a break, to the bit."""

    step = autopar.parallelize(plans.step, plan=plans.plan("compressed"))

    def run(steps: int, **options: Any) -> list[float]:
        made = autopar.elastic(
            step,
            plans.create,
            lambda position, _: plans.batch(position),
            batch=plans.ROWS,
            steps=steps,
            ahead=False,
            **options,
        )
        return losses(made)

    whole = run(4)
    assert run(2, checkpoint=tmp_path) + run(4, checkpoint=tmp_path) == whole


def test_samples_go_on_with_another_batch(tmp_path: pathlib.Path) -> None:
    """No sample is seen twice, and none is left out."""
    losses(elastic_runs.started(PLAIN, 2, batch=24, checkpoint=tmp_path))
    run = elastic_runs.started(PLAIN, 4, batch=48, checkpoint=tmp_path)
    assert [done.position for done in run] == [48, 96]
    again = elastic_runs.started(PLAIN, 4, batch=48, checkpoint=tmp_path)
    assert again.position == 144


def test_a_run_that_is_over_is_not_saved_again(tmp_path: pathlib.Path) -> None:
    losses(elastic_runs.started(PLAIN, 2, checkpoint=tmp_path))
    (folder,) = tmp_path.glob("0*")
    assert losses(elastic_runs.started(PLAIN, 2, checkpoint=tmp_path)) == []
    assert list(tmp_path.glob("0*")) == [folder]


def test_no_device_is_left(tmp_path: pathlib.Path) -> None:
    """The state is saved before the devices go."""
    run = elastic_runs.started(PLAIN, 9, checkpoint=tmp_path)
    next(run)
    run.change({"kind": "gone", "hosts": [0], "deadline_s": 30})
    assert list(run) == []
    assert Checkpoints(tmp_path).latest() == 1


def test_a_save_that_fails_does_not_stop_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(elastic_runs.started(PLAIN, 5))
    run = elastic_runs.started(PLAIN, 5, checkpoint=tmp_path, every=2)
    write, count = store.write, []

    def full(*args: object) -> None:
        count.append(1)
        if len(count) == 1:
            raise OSError(28, "No space left on device")
        write(*args)  # pyright: ignore

    monkeypatch.setattr(store, "write", full)
    with pytest.warns(UserWarning, match="goes on unsaved: .*No space left"):
        found = losses(run)
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    assert Checkpoints(tmp_path).steps() == [4, 5]
    (line,) = [x for x in run.ledger.lines if x["kind"] == "not saved"]
    assert "No space left" in line["reason"]


def test_another_model(tmp_path: pathlib.Path) -> None:
    losses(elastic_runs.started(PLAIN, 1, checkpoint=tmp_path))
    with pytest.raises(autopar.CheckpointError, match="another model"):
        elastic_runs.started(forms.FORMS["nnx"], 2, checkpoint=tmp_path)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: pathlib.Path) -> None:
    losses(elastic_runs.started(PLAIN, 2, checkpoint=tmp_path, every=1))
    last = sorted(tmp_path.iterdir())[-1]
    shutil.rmtree(next(x for x in (last / "arrays").iterdir() if x.is_dir()))
    with pytest.warns(UserWarning, match="damaged"):
        run = elastic_runs.started(PLAIN, 2, checkpoint=tmp_path)
    assert run.step == 1
    assert last.name in run.ledger.lines[0]["damaged"][0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 2}, "every=2 needs checkpoint="),
        ({"every": 0, "checkpoint": "x"}, "every=0 must be"),
        ({"every": True, "checkpoint": "x"}, "every=True must be"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        elastic_runs.started(PLAIN, 2, **options)
