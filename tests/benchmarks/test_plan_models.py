"""Tests the model of steps under Rubick's plans: its terms and its fit."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACED = ("1", "2", "4", "8", "11", "1111", "22", "44", "26", "35", "233", "2222", "17")


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load() -> Any:
    return importlib.import_module("plan_models")


@pytest.mark.parametrize(
    ("placed", "cards", "split"),
    [
        ("8", None, 0.0),
        ("44", 2, 0.0),
        ("35", 2, 5 / 8),
        ("26", 1, 0.0),
        ("2222", 1, 0.0),
        ("11", 1, 0.0),
        ("233", 1, 3 / 8),
    ],
)
def test_terms_of_placements(placed: str, cards: int | None, split: float) -> None:
    nodes, count = len(placed), sum(map(int, placed))
    ring = 0.0
    if cards is not None:
        ring = (1 - 1 / count) / cards * (nodes / 2) ** 0.1
    found = load().features((placed,))[0]
    assert found == pytest.approx([1 / count, 1.0, ring, split])


def test_steps_of_its_own_form_are_predicted() -> None:
    model, constants = load(), np.array([0.5, 0.1, 0.3, 0.2])
    seconds = dict(zip(PLACED, model.features(PLACED) @ constants, strict=True))
    errors = model.errors_of(seconds)
    assert set(errors) == set(PLACED)
    assert max(map(abs, errors.values())) < 1e-9


def test_constants_are_not_below_zero() -> None:
    model = load()
    # A ring that seems to save time is worth nothing, and no more is predicted of it.
    seconds = {"2": 1.0, "8": 0.4, "2222": 0.3, "35": 0.3, "44": 0.4}
    predicted = (1 + model.errors_of(seconds)["44"]) * seconds["44"]
    assert predicted == pytest.approx((1 + model.errors_of(seconds)["8"]) * 0.4)


def test_nothing_is_predicted_without_the_four() -> None:
    assert load().errors_of({"2": 1.0, "8": 1.0, "2222": 1.0}) == {}
