"""Goodput curves as tables: what policies see of them, files, corrections."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.goodput.curves import CurvePoint, CurveTable, corrected
from autopar.scheduler.jobs import JobView
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import POLICIES, policy_of

# One sees what no real job tells; the other knows its published programs alone.
_CLOSED = ("optimus", "rubick")


def point(nodes: int, devices: int, goodput: float, **fields: Any) -> CurvePoint:
    given = {"kind": "cpu", "batch": 32, "step_s": 32 / goodput if goodput else 0.0}
    return CurvePoint(
        cluster=f"{nodes}x{devices // nodes}:{given['kind']}",
        nodes=nodes,
        devices=devices,
        goodput=goodput,
        **{**given, **fields},
    )


def table(*goodputs: float, **fields: Any) -> CurveTable:
    """One device a node; a goodput for each number of nodes."""
    made = [point(k, k, g) for k, g in enumerate(goodputs, 1)]
    return CurveTable(points=tuple(made), base_batch=32, **fields)


def test_policies_see_the_best_that_is_no_larger() -> None:
    curve = table(10.0, 16.0, 12.0, 30.0).on("cpu")
    counts = np.array([1, 2, 3, 4, 6])
    assert curve.goodput(counts, counts).tolist() == [10, 16, 16, 30, 30]
    assert curve.goodput(np.array([1]), np.array([4])).tolist() == [10]
    assert curve.most == 4


def test_a_table_that_is_not_monotone_is_told_of() -> None:
    (dip,) = table(10.0, 16.0, 12.0).dips
    assert dip.startswith("3x1:cpu does less than 2x1:cpu")
    assert not table(10.0, 16.0, 16.0).dips


def test_what_cannot_run_is_no_part_of_a_curve() -> None:
    none = point(2, 2, 0.0, reason="does not fit")
    made = CurveTable(points=(point(1, 1, 5.0), none))
    assert made.on("cpu").plan(2, 2) == made.on("cpu").plan(1, 1)
    assert made.on("h100").goodput(np.array([1]), np.array([1])).tolist() == [0]


def test_a_file_is_read_back(tmp_path: pathlib.Path) -> None:
    made = table(10.0, 16.0, noise_scale=400.0, max_batch=64)
    made.save(tmp_path / "curve.json")
    assert CurveTable.load(tmp_path / "curve.json") == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 9}, "curve.json: it is a curve of schema 9.*autopar goodput"),
        ({"more": 1}, "curve.json: it is no goodput curve.*more"),
        ({"points": [{"cluster": "x"}]}, "curve.json: it is no goodput curve.*kind"),
    ],
)
def test_a_file_that_is_none(change: Any, words: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(msgspec.to_builtins(table(1.0)) | change))
    with pytest.raises(ScheduleError, match=words):
        CurveTable.load(path)
    for damaged in (b'{"sch\xe9ma": 1}', b'{"schema":' + b'{"a":' * 5000):
        path.write_bytes(damaged)
        with pytest.raises(ScheduleError, match="it is no goodput curve"):
            CurveTable.load(path)
    with pytest.raises(ScheduleError, match="No such file"):
        CurveTable.load(tmp_path / "other.json")


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf")])
def test_a_goodput_that_cannot_be_names_its_cluster(wrong: float) -> None:
    with pytest.raises(ScheduleError, match="curve, 2x1:cpu: its goodput is"):
        point(2, 2, wrong, step_s=1.0)


def test_a_configuration_stands_in_it_once() -> None:
    with pytest.raises(ScheduleError, match="1 nodes with 1 devices of cpu"):
        CurveTable(points=(point(1, 1, 5.0), point(1, 1, 6.0)))


def line(devices: int, step_s: float, batch: int = 32) -> dict[str, Any]:
    """A line of a ledger."""
    return {
        "kind": "progress",
        "devices": devices,
        "batch": batch,
        "step_s": step_s,
        "steps": 5,
    }


def test_measured_seconds_take_the_place_of_predicted_ones() -> None:
    """One device was twice as slow, two three times; three scale by their mean."""
    made = table(32.0, 64.0, 96.0)
    lines = [line(1, 2.0), line(1, 2.0), line(1, 9.0), line(2, 1.5)]
    found = corrected(made, [*lines, {"kind": "replan"}, line(3, 7.0, batch=8)])
    assert [p.step_s for p in found.points] == pytest.approx([2, 1.5, 6**0.5 / 3])
    assert [p.goodput for p in found.points] == pytest.approx(
        [32 / p.step_s for p in found.points]
    )
    assert [p.measured for p in found.points] == [15, 5, 0]
    assert corrected(made, []) == made


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in _CLOSED])
def test_every_policy_takes_a_table_as_a_curve(name: str) -> None:
    """It gives out devices, and no more than there are."""
    made = table(10.0, 19.0, 27.0, 30.0)
    views = {
        job: JobView(
            name=job, application="tiny", submitted_s=0.0, age_s=30.0,
            served_device_s=0.0, progress=0.0, restarts=0, asked=2, most=4, tried=4,
            curve=made, measured=True, restart_s=1.0, by_kind=made.by_kind,
        )
        for job in ("one", "two")
    }  # fmt: skip
    nodes = Nodes((1,) * 4, ("cpu",) * 4)
    found = policy_of(name).decide(60.0, views, nodes, {}).allocations
    assert found
    assert min(nodes.free(found)) >= 0


def test_the_ledger_of_a_re_plan_corrects_a_curve() -> None:
    """What was measured after it is of the new cluster, at the batch of the run."""
    made = table(32.0, 64.0)
    replan = {"kind": "replan", "number": 1, "step": 10, "position": 320}
    after = {"kind": "measured", "number": 1, "step_after_s": 3.0}
    lines = [{**replan, "new": {"cluster": "2x1:cpu"}}, after]
    found = corrected(made, lines)
    assert [p.step_s for p in found.points] == pytest.approx([3 / 0.5, 3.0])
    assert corrected(made, [{**replan, "position": 80}, after]) == made
    assert corrected(made, [{**after, "number": 2}]) == made


def test_a_line_of_no_kind_corrects_no_table_of_several() -> None:
    """What runs on one kind says nothing of another."""
    other = point(1, 1, 64.0, kind="h100")
    made = CurveTable(points=(point(1, 1, 32.0), other))
    assert corrected(made, [line(1, 2.0)]) == made
    found = corrected(made, [{**line(1, 2.0), "device": "cpu"}])
    assert [p.step_s for p in found.points] == [2.0, other.step_s]
