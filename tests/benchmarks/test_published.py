"""Tests how `benchmarks/published.py` reads a row's device and program."""

from __future__ import annotations

import importlib
import math
import pathlib
from typing import Any

import pytest

from autopar.cluster.presets import PRESETS

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load() -> Any:
    return importlib.import_module("published")


def row(**changes: Any) -> dict[str, Any]:
    return {"cluster": "8:h100", "device_overrides": {}, "source": "a page"} | changes


def test_a_row_without_changes_is_the_preset():
    assert load().device_of(row()) == PRESETS["h100"].device


def test_a_row_changes_fields():
    changed = row(device_overrides={"memory_bytes": 36e9})
    assert load().device_of(changed).memory_bytes == 36_000_000_000


def test_cards_are_limited_to_the_power_that_the_source_names():
    limited = load().device_of(row(source="some page (H100 at 500 W, 2.4 TB/s)"))
    assert math.isclose(limited.power_part, 5 / 7)


def test_a_part_of_the_power_that_the_row_states_comes_first():
    changed = row(source="H100 at 500 W", device_overrides={"power_part": 0.5})
    assert load().device_of(changed).power_part == 0.5


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, False),
        ({"source": "nv-adlr.github.io megatron-lm-v1"}, True),
        ({"reentrant": True}, True),
        ({"source": "Megatron-LM", "reentrant": False}, False),
    ],
)
def test_layers_are_computed_again_whole_by_reentrant_checkpoints(
    changes: dict[str, Any], whole: bool
):
    assert load().reentrant(row(**changes)) == whole


def judged(source: str, ratio: float) -> dict[str, Any]:
    """A row with one second of products, predicted with a given ratio."""
    return {
        "source": source, "device": "h100", "devices": 8, "sustained": 0.5,
        "measured_s": 1.0 / ratio, "predicted_s": 1.0, "matrix_s": 1.0,
        "interval_s": [0.9, 1.1], "ratio": ratio, "model_flops": 1.0,
    }  # fmt: skip


def test_a_source_that_is_left_out_is_judged_by_the_others():
    """Products at 0.5 of their rate take 1 s; the sources want 0.4 and 0.8."""
    done = [judged("slow", 0.8), judged("fast", 1.6)]
    found = load().left_out(done)
    assert math.isclose(found["left_out"]["h100 without slow"], 0.8, abs_tol=0.005)
    assert math.isclose(found["left_out"]["h100 without fast"], 0.4, abs_tol=0.005)
    assert math.isclose(found["least"], 0.5, rel_tol=0.02)
    assert math.isclose(found["most"], 2.0, rel_tol=0.02)
