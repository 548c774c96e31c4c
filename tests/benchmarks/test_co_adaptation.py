"""Tests what the benchmark of co-adaptation computes from what its jobs report."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from autopar.goodput.curves import CurveTable
from autopar.scheduler.simulator.jobs import Moves

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "network"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("co_adaptation")


def test_a_seed_always_draws_the_same_jobs(driver: Any) -> None:
    one, other = driver.arrivals(3), driver.arrivals(4)
    assert one == driver.arrivals(3) != other
    assert sorted(x.model for x in one) == sorted(x.model for x in other)
    assert [x.at_s for x in one] == sorted(x.at_s for x in one)


def test_moves_do_not_count_as_training(driver: Any) -> None:
    """A line has the step, loss, time, devices, progress and batch."""
    lines = [[k, 1.0, 0.1 * k, 1, 8.0 * k, 8] for k in range(10)]
    lines += [[k, 1.0, 60 + 0.1 * k, 1, 8.0 * k, 8] for k in range(10, 20)]  # resumed
    lines += [[k, 1.0, 70 + 0.05 * k, 2, 8.0 * k, 8] for k in range(20, 30)]  # grown
    found = driver.goodputs(lines)
    assert found == {
        1: (pytest.approx(8 * 18), pytest.approx(1.8)),
        2: (pytest.approx(8 * 9), pytest.approx(0.45)),
    }
    assert driver.goodputs(lines[:1]) == {}


def test_a_curve_is_scaled_where_no_job_ran(driver: Any) -> None:
    points = tuple(driver.point(n, 8, 1.0 / n) for n in driver.SIZES)
    submitted = CurveTable(points=points, base_batch=8)
    found = driver.reported_curve(submitted, [{2: (80.0, 10.0)}, {2: (80.0, 10.0)}])
    assert [p.goodput for p in found.points] == pytest.approx([8, 16, 32])
    nothing = driver.reported_curve(submitted, [{}])
    assert [p.goodput for p in nothing.points] == [p.goodput for p in points]


def test_a_lone_job_completes_after_its_start_and_its_work(driver: Any) -> None:
    (job, *_) = driver.arrivals(1, 1)
    base = driver.MODELS[job.model].base
    points = tuple(driver.point(n, base, 1.0) for n in driver.SIZES)
    curves = {job.model: CurveTable(points=points, base_batch=base)}
    moves = Moves(start_s=5.0, join_s=1.0, change_s=1.0)
    work = {job.name: 20.0 * base}
    found = driver.simulated([job], curves, work, {job.name: moves})
    assert found == pytest.approx(25.0, abs=2.1)


def test_a_job_has_its_own_start_and_pauses(driver: Any) -> None:
    moves = Moves(start_s=5.0, join_s=1.0, change_s=1.0)
    lines = [[0, 1.0, 112.0, 2, 8.0, 8], [1, 1.0, 113.0, 2, 16.0, 8]]
    alone = driver.reported_moves(lines, 100.0, moves)
    assert (alone.start_s, alone.change_s) == (12.0, 1.0)
    lines += [[2, 1.0, 120.0, 4, 24.0, 8], [3, 1.0, 123.0, 2, 32.0, 8]]
    moved = driver.reported_moves(lines, 100.0, moves)
    assert (moved.start_s, moved.join_s, moved.change_s) == (12.0, 1.0, 5.0)


def test_a_row_does_not_depend_on_the_rows_that_are_read_with_it(driver: Any) -> None:
    for model in driver.MODELS.values():
        base = model.base
        whole = driver.script.rows_at(model, 3, base // 2, 2 * base)
        part = driver.script.rows_at(model, 3, base, base // 2)
        start = base - base // 2
        for one, other in zip(
            jax.tree.leaves(whole), jax.tree.leaves(part), strict=True
        ):
            np.testing.assert_array_equal(one[start : start + base // 2], other)


def test_an_arm_with_less_goodput_takes_longer(driver: Any) -> None:
    plans = importlib.import_module("co_adaptation_plans")
    found = {
        f"{name} 100 {n}": {"all": model.base * n, "plan": 0.5 * model.base * n}
        for name, model in driver.MODELS.items()
        for n in driver.SIZES
    }
    ours, frozen = (plans.average_s(found, arm, 100.0, 3) for arm in ("all", "plan"))
    assert 1.2 * ours < frozen < 4 * ours
