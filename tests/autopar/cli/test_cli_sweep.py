"""Tests ``autopar sweep``: ranges, tables, conclusions and interrupts."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest
from command_line import TARGET, Run, assert_fails

from autopar.cli import common, sweeping
from autopar.cli.sweeping import _next  # pyright: ignore[reportPrivateUsage]
from autopar.errors import TargetError
from autopar.plans import AxisUse, Plan
from autopar.reports.sweep import Point, conclusion_lines, largest, worth_it

WORDS = ("width=64", "layers=1", "--seconds", 2)


@pytest.mark.parametrize("text", ["8..4", "0..8", "8..16+0", "8,8", "8,", "8..8,8"])
def test_ranges_that_make_no_sense(text: str) -> None:
    with pytest.raises(TargetError, match="Examples"):
        common.range_values(text)


def test_texts_that_are_no_ranges_stay() -> None:
    assert common.range_values("../data") == ["../data"]
    assert common.cluster_texts(["../c.toml", "2x4:cpu,memory=1GB", "local"]) == [
        "../c.toml",
        "2x4:cpu,memory=1GB",
        "local",
    ]
    assert common.cluster_texts(["1..2x2,4:cpu"]) == [
        "1x2:cpu",
        "1x4:cpu",
        "2x2:cpu",
        "2x4:cpu",
    ]


def test_a_table_has_a_row_for_each_point(run: Run) -> None:
    result = run("sweep", TARGET, "--cluster", "1..2:cpu", "batch=64,256", *WORDS)
    assert result.code == 0
    table, follows = result.out.rstrip().split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0][:3] == ["batch", "cluster", "step"]
    assert [row[:2] for row in rows[1:]] == [
        ["64", "1:cpu"],
        ["64", "2:cpu"],
        ["256", "1:cpu"],
        ["256", "2:cpu"],
    ]
    assert len(follows.splitlines()) == 2
    assert "worth it" in follows


def test_points_say_what_their_plans_do(run: Run, tmp_path: pathlib.Path) -> None:
    words = ("--cluster", "2:cpu", "batch=64", *WORDS)
    plan = tmp_path / "plan.json"
    assert run("plan", TARGET, *words, "--out", plan).code == 0
    made = Plan.load(plan)
    assert made.worth
    found = run("sweep", TARGET, *words, "--json").json
    assert found["complete"]
    (point,) = found["points"]
    assert point["step_s"] == pytest.approx(made.predicted.step_s)
    assert point["efficiency"] == pytest.approx(made.worth.speed_up / 2)
    assert point["options"] == {}


def test_plans_are_kept(run: Run, tmp_path: pathlib.Path) -> None:
    words = (TARGET, "--cluster", "2:cpu", "batch=64", *WORDS, "--cache", tmp_path)
    first = run("sweep", *words).out
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert run("sweep", *words).out == first


def test_the_largest_batch_that_fits_is_found(run: Run) -> None:
    words = ("--cluster", "1:cpu", "--memory", "250kB", "--largest", "batch")
    found = run("sweep", TARGET, *words, "batch=32", *WORDS, "--json").json
    fits = {int(p["options"]["batch"]): p["fits"] for p in found["points"]}
    (best,) = found["largest"]
    size = int(best["options"]["batch"])
    assert size % 32 == 0
    assert fits[size] is True
    assert fits[size + 32] is False
    assert all(size < other for other, fit in fits.items() if not fit)


def test_where_nothing_fits_the_reason_is_an_error(run: Run) -> None:
    words = ("--cluster", "1:cpu", "--memory", "1kB", "batch=32,64", *WORDS)
    result = run("sweep", TARGET, *words)
    assert_fails(result, "memory", code=3)


def test_a_point_that_cannot_be_planned_does_not_end_the_sweep(run: Run) -> None:
    words = ("--cluster", "1:cpu", "layers=1,-1", "width=64", "--seconds", 2)
    found = run("sweep", TARGET, *words, "--json").json
    good, bad = found["points"]
    assert good["step_s"] > 0
    assert bad["step_s"] is None
    assert bad["fits"] is None
    assert bad["reason"]


def test_wrong_words(run: Run) -> None:
    assert_fails(run("sweep", TARGET, "batch=64"), "--cluster")
    cluster = ("--cluster", "1:cpu")
    assert_fails(run("sweep", TARGET, *cluster, "--largest", "batch"), "batch=8")
    assert_fails(run("sweep", TARGET, *cluster, "batch=9..8"), "9..8")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_shows_what_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    plan, made = sweeping.plan_analysis, list[Any]()

    def interrupted(*args: Any) -> Plan:
        if made:
            raise KeyboardInterrupt
        made.append(plan(*args))
        return made[0]

    monkeypatch.setattr(sweeping, "plan_analysis", interrupted)
    words = ("--cluster", "1..2:cpu", "batch=64", *WORDS, *(["--json"] * as_json))
    result = run("sweep", TARGET, *words)
    assert (result.code, result.err) == (130, "autopar: stopped.\n")
    if as_json:
        assert [p["cluster"] for p in result.json["points"]] == ["1:cpu"]
        assert not result.json["complete"]
    else:
        assert "1:cpu" in result.out
        assert "2:cpu" not in result.out
        assert result.out.endswith("stopped: not all points were planned\n")


@pytest.fixture
def plan(saved: pathlib.Path) -> Plan:
    return Plan.load(saved)


def point(plan: Plan, devices: int, efficiency: float, batch: int = 8) -> Point:
    """A point whose plan has a given efficiency."""
    worth = plan.worth
    assert worth
    worth = worth.faster(efficiency * devices / worth.speed_up)
    made = msgspec.structs.replace(plan, worth=worth)
    cluster = f"{devices}:cpu"
    return Point({"batch": str(batch)}, cluster, "cpu", devices, made)


def test_a_low_efficiency_has_a_reason(run: Run) -> None:
    words = ["--cluster", "1:cpu", "--cluster", "2x1:cpu,network=1Mb/s"]
    words += ["batch=64", "--microbatches", "1", *WORDS]
    found = run("sweep", TARGET, *words, "--json").json["points"]
    assert found[0]["lost_to"] == []
    (loss,) = found[1]["lost_to"]
    assert loss.startswith("messages 99")
    assert f"  {loss}  yes" in run("sweep", TARGET, *words).out


def test_idle_devices_and_repeated_work_are_losses(plan: Plan) -> None:
    worth = plan.worth
    assert worth
    axes = (
        AxisUse(name="data", size=2, repeated=0.25, holds=True),
        AxisUse(name="x", size=4, repeated=1.0, holds=False),
    )
    worth = msgspec.structs.replace(worth, axes=axes)
    worth = worth.faster(0.5 / worth.efficiency)
    quick = msgspec.structs.replace(
        plan.predicted, hidden_s=plan.predicted.communication_s
    )
    made = msgspec.structs.replace(plan, worth=worth, predicted=quick)
    found = Point({}, "c", "cpu", worth.devices + 1, made)
    assert found.efficiency == pytest.approx(worth.speed_up / 9)
    assert found.losses == (
        "1 device idle",
        "x (4) unused",
        "data (2) repeats 25 % of the work",
    )


def test_as_many_devices_are_worth_it_as_are_busy(plan: Plan) -> None:
    parts = {1: 1.0, 2: 0.9, 4: 0.72, 8: 0.5}
    points = [point(plan, n, part) for n, part in parts.items()]
    (found,) = worth_it(points, 0.7)
    assert found.best is points[2]
    assert found.beyond is points[3]
    (line,) = conclusion_lines(points, 0.7, None)
    assert line == (
        "batch=8, cpu: 4 devices are worth it, efficiency 72 %; 8 devices reach 50 %"
    )
    (none,) = conclusion_lines(points[2:], 0.9, None)
    assert "nothing reaches an efficiency of 90 %" in none
    assert worth_it(points[:1], 0.7) == []


def test_the_largest_is_told_for_each_cluster(plan: Plan) -> None:
    points = [point(plan, n, 1.0, batch) for n in (1, 2) for batch in (8, 64, 16)]
    points.append(Point({"batch": "128"}, "1:cpu", "cpu", 1, None, "", False))
    found = largest(points, "batch")
    assert [(p.cluster, p.options["batch"]) for p in found] == [
        ("1:cpu", "64"),
        ("2:cpu", "64"),
    ]


def test_the_search_for_the_largest_value_ends() -> None:
    for limit in (0, 1, 5, 8, 9, 100, 1000):
        known = {8: limit >= 8}
        while (wanted := _next(known, 8)) is not None:
            assert wanted not in known
            known[wanted] = wanted <= limit
        best = max((v for v, fits in known.items() if fits), default=0)
        assert best <= limit < best + 8
        assert len(known) < 20
