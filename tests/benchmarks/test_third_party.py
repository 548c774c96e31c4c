"""Tests the benchmark on other people's steps: stubs, comparison and skipped steps."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def folders_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "third"))


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_a_stub_serves_imports_annotations_and_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    assert load("stubs").install(("no_such_data", "json")) == ["no_such_data"]
    namespace: dict[str, Any] = {}
    exec(
        "import no_such_data as tf\n"
        "from no_such_data.tools.deep import Base\n"
        "def load(x: tf.Tensor | None) -> tf.data.Dataset: ...\n"
        "class Mine(Base):\n    size = 3\n",
        namespace,
    )

    assert namespace["Mine"]().size == 3


def test_no_step_without_its_checkout() -> None:
    third_party = load("third_party")

    steps = third_party.steps("", "python", "")

    skipped = [s for s in steps if s.reason]
    assert {s.family for s in skipped} == {"flax_examples", "huggingface"}
    assert all("give --" in third_party.tried(s, "p", 1.0)["skipped"] for s in skipped)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 4.0], [1.0, 3.0], 0.25),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([0.0], [1.0], np.inf),
    ],
)
def test_differences_are_relative_to_the_largest_number(
    one: list[float], other: list[float], expected: float
) -> None:
    assert load("compare").relative(np.array(one), np.array(other)) == expected


def test_integers_are_equal_or_not() -> None:
    relative = load("compare").relative

    assert relative(np.array([3]), np.array([3])) == 0.0
    assert relative(np.array([1_000_000]), np.array([1_000_001])) == np.inf


def test_an_array_that_rounding_moves_may_differ_as_much() -> None:
    """And no more; other arrays keep to the tolerance."""
    one = {"steady": np.ones(2), "noisy": np.ones(2)}
    rounded = {"steady": np.ones(2), "noisy": np.ones(2) * 1.01}

    def wrong(steady: float, noisy: float) -> tuple[str, ...]:
        other = {"steady": np.ones(2) * steady, "noisy": np.ones(2) * noisy}
        return load("compare").differ(one, other, [rounded], one).wrong

    assert wrong(1.0, 1.02) == ()
    assert wrong(1.0001, 1.02) == ("steady",)
    assert wrong(1.0, 1.5) == ("noisy",)


def test_a_missing_array_is_a_difference() -> None:
    found = load("compare").differ({"a": np.ones(1)}, {}, [], {"a": np.ones(1)})

    assert found.wrong == ("a",)
