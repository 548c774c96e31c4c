"""Tests that damaged files of every format are refused with the package's errors."""

from __future__ import annotations

import importlib
import pathlib

import pytest
from property_tests import examples

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
CASES = {
    "curves": 300,
    "ledgers": 500,
    "plans": 300,
    "events": 600,
    "manifests": 300,
    "pt": 2000,
    "toml": 300,
    "traces": 150,
    "tables": 60,
    "stores": 300,
}


@pytest.mark.parametrize("name", CASES)
def test_only_errors_of_the_package_come_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fuzz = importlib.import_module("fuzz")
    cases = examples(CASES[name])
    found = fuzz.run(name, 7, cases=cases, seconds=120, traced=False)
    assert found.cases == cases
    assert found.errors
    assert found.failures == {}
