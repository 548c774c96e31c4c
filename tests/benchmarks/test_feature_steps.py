"""Tests a sample of the feature steps, and that wrong results are detected."""

from __future__ import annotations

import importlib
import itertools
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
SAMPLE = {
    "control flow: nested": "one",
    "effect: ordered callbacks": "microbatches",
    "state: complex": "one",
    "model: dict of dicts": "stages",
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "features"))
    return importlib.import_module("feature_steps")


@pytest.mark.parametrize("name", SAMPLE)
def test_feature_equals_plain_jit_under_a_mesh(
    command: Any, name: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "runs.json"
    options = ["--only", name, "--meshes", "mesh", "--json", str(path)]
    assert command.main([*options, "--modes", SAMPLE[name]]) == 0
    data = json.loads(path.read_text())
    assert data["counts"] == {"equal": 1}
    assert data["runs"][0]["difference"] < 1e-4


def test_every_kind_is_in_the_corpus_once(command: Any) -> None:
    names = [f.name for f in command.features()]
    assert len(names) == len(set(names)) >= 230
    assert {n.partition(":")[0] for n in names} == {
        "batch",
        "control flow",
        "effect",
        "gradient",
        "kernel",
        "layer",
        "loss",
        "metrics",
        "model",
        "optimizer",
        "random",
        "roles",
        "rows",
        "state",
        "step",
        "updates",
    }


@pytest.mark.parametrize(
    ("outcome", "failure"), [("WRONG", None), ("CRASH", ZeroDivisionError("by hand"))]
)
def test_a_step_that_goes_wrong_fails_the_command(
    command: Any,
    outcome: str,
    failure: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    traces = itertools.count()

    def step(w: Any, x: Any) -> Any:
        number = next(traces)
        if failure is not None and number:
            raise failure
        return w + number, {"loss": jnp.sum(x)}

    feature = importlib.import_module("feature")
    found = feature.Feature("made: up", step, lambda: jnp.ones(4), (feature.X,))
    monkeypatch.setattr(command, "features", lambda only: [found])
    options = ["--modes", "one", "--meshes", "plain", "--json"]
    assert command.main([*options, str(tmp_path / "runs.json")]) == 1
    assert outcome in capsys.readouterr().out
