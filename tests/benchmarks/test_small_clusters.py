"""Tests the cases of the benchmark of small clusters."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("small_clusters")


def test_a_seed_always_draws_the_same_case(driver: Any) -> None:
    one, again = (driver.case_of(1, 0.15) for _ in range(2))
    assert one.nodes == again.nodes
    assert [x.job for x in one.jobs()] == [x.job for x in again.jobs()]
    assert [x.job for x in one.jobs()] != [x.job for x in driver.case_of(2, 1).jobs()]


def test_all_policies_end_all_jobs_and_dearer_changes_take_longer(driver: Any) -> None:
    cases = [driver.case_of(3, changes) for changes in (0.0, 5.0)]
    for make in driver.POLICIES.values():
        assert all(driver.average_s(case, make()) > 0 for case in cases)
    cheap, dear = (driver.average_s(case, driver.Goodput()) for case in cases)
    assert cheap < dear
