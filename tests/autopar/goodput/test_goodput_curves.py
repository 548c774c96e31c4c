"""Tests goodput curves: values for policies, files and corrections."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.goodput.choice import efficiency
from autopar.goodput.curves import CurvePoint, CurveTable, correct_curve
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
    """A table with one device per node, and a goodput for each number of nodes."""
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
    found = correct_curve(made, [*lines, {"kind": "replan"}, line(3, 7.0, batch=8)])
    assert [p.step_s for p in found.points] == pytest.approx([2, 1.5, 6**0.5 / 3])
    assert [p.goodput for p in found.points] == pytest.approx(
        [32 / p.step_s for p in found.points]
    )
    assert [p.measured for p in found.points] == [15, 5, 0]
    assert correct_curve(made, []) == made


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
    found = correct_curve(made, lines)
    assert [p.step_s for p in found.points] == pytest.approx([3 / 0.5, 3.0])
    assert correct_curve(made, [{**replan, "position": 80}, after]) == made
    assert correct_curve(made, [{**after, "number": 2}]) == made


def test_a_line_of_no_kind_corrects_no_table_of_several() -> None:
    """What runs on one kind says nothing of another."""
    other = point(1, 1, 64.0, kind="h100")
    made = CurveTable(points=(point(1, 1, 32.0), other))
    assert correct_curve(made, [line(1, 2.0)]) == made
    found = correct_curve(made, [{**line(1, 2.0), "device": "cpu"}])
    assert [p.step_s for p in found.points] == [2.0, other.step_s]


def told(devices: int, batch: int, step_s: float, phi: Any, **fields: Any) -> Any:
    """A line of progress of a job with an adaptive batch size."""
    return {**line(devices, step_s, batch), "noise_scale": phi, **fields}


def follows(*goodputs: float, phi: float | None = 50.0) -> CurveTable:
    """A curve with batches of 96 rows per device, planned with a noise scale."""
    made: list[CurvePoint] = []
    for k, rate in enumerate(goodputs, 1):
        worth = 1.0 if phi is None else efficiency(phi, 96 * k, 96)
        fields = {"batch": 96 * k, "step_s": 96 * k / rate, "efficiency": worth}
        made.append(point(k, k, rate * worth, **fields))
    return CurveTable(
        points=tuple(made), base_batch=96, max_batch=4096, noise_scale=phi
    )


@pytest.mark.parametrize("planned", [50.0, None])
def test_a_job_with_a_larger_batch_tells_what_its_curve_did_not_know(
    planned: float | None,
) -> None:
    """It runs 768 rows in 160 ms, and was planned with 96 in 200 ms."""
    made = follows(480.0, 900.0, phi=planned)
    lines = [told(1, 768, 0.16, 2000.0) for _ in range(5)]
    one, two = correct_curve(made, lines).points
    assert (one.batch, one.step_s, one.measured) == (768, 0.16, 25)
    assert one.efficiency == pytest.approx(efficiency(2000.0, 768, 96))
    assert one.goodput == pytest.approx(768 / 0.16 * one.efficiency)
    # Eight times the rows, ten times as many a second.
    assert (two.batch, two.measured) == (8 * 192, 0)
    assert two.batch / two.step_s == pytest.approx(9000.0)
    assert two.efficiency == pytest.approx(efficiency(2000.0, 8 * 192, 96))
    assert two.goodput == pytest.approx(9000.0 * two.efficiency)


def test_no_batch_in_proportion_leaves_the_range_of_the_table() -> None:
    made = msgspec.structs.replace(follows(480.0, 900.0, 1200.0), max_batch=1000)
    batches = [p.batch for p in correct_curve(made, [told(1, 768, 0.16, 2e3)]).points]
    assert batches == [768, 1000, 1000]
    least = correct_curve(made, [told(3, 96, 0.1, 2e3)]).points[0]
    assert least.batch == 96


def test_of_several_batches_the_one_with_the_most_goodput_counts() -> None:
    """With little noise a large batch is worth nothing; with much it is."""
    made = follows(480.0)
    lines = [told(1, 96, 0.2, 0.0), told(1, 768, 0.4, 0.0)]
    assert correct_curve(made, lines).points[0].batch == 96
    assert correct_curve(made, lines, 1e4).points[0].batch == 768
    assert correct_curve(made, lines, math.inf).points[0].batch == 768


def test_lines_of_an_earlier_release_are_read() -> None:
    """They tell no noise scale: with one planned, their batch counts by that."""
    made = follows(480.0)
    assert correct_curve(made, [line(1, 0.1, 96)]).points[0].step_s == 0.1
    assert correct_curve(made, [line(1, 0.1, 192)]).points[0].batch == 192
    assert correct_curve(made, [line(1, 0.1, 192)]).noise_scale == 50.0
    # Without one nobody knows what another batch is worth.
    blind = follows(480.0, phi=None)
    assert correct_curve(blind, [line(1, 0.1, 192)]) == blind


def test_the_codecs_of_a_job_are_those_that_it_runs_with() -> None:
    made = follows(480.0)
    error = {"own": 0.0, "shared": 1.0, "workers": 4}
    lines = [told(1, 96, 0.1, 500.0, codecs=["int8"], codec_error=error)]
    (one,) = correct_curve(made, lines).points
    assert (one.codecs, one.shared_error) == (("int8",), 1.0)
    assert one.efficiency == pytest.approx(0.5)
    again = correct_curve(correct_curve(made, lines), [told(1, 96, 0.1, 500.0)])
    assert again.points[0].codecs == ()


noises = st.one_of(st.none(), st.just(0.0), st.just("inf"), st.floats(1e-3, 1e9))
told_lines = st.builds(
    told,
    st.integers(1, 4),
    st.sampled_from([48, 96, 192, 768, 10_000]),
    st.floats(1e-4, 1e3),
    noises,
)


@given(
    st.lists(told_lines, max_size=12),
    st.one_of(st.none(), st.just(math.inf), st.floats(0.0, 1e9)),
)
def test_whatever_is_told_a_curve_stays_one(lines: list[Any], phi: float | None):
    """Numbers stay finite, and more devices or more noise never do less."""
    made = follows(480.0, 900.0, 1200.0, 1500.0)
    found = correct_curve(made, lines, phi)
    for each in found.points:
        assert math.isfinite(each.goodput)
        assert each.goodput > 0
        assert each.batch >= 1
        assert each.goodput == pytest.approx(each.batch / each.step_s * each.efficiency)
    counts = np.arange(1, 5)
    seen = found.on("cpu").goodput(counts, counts)
    assert (np.diff(seen) >= 0).all()
    if phi is not None and not lines:
        noisier = correct_curve(made, lines, 2 * phi + 1)
        pairs = zip(found.points, noisier.points, strict=True)
        assert all(b.goodput >= a.goodput * (1 - 1e-9) for a, b in pairs)


@given(st.floats(1e-3, 10.0), st.floats(1.01, 10.0))
def test_a_slower_step_is_worth_less_on_all_configurations(step_s: float, by: float):
    made = follows(480.0, 900.0)
    fast = correct_curve(made, [told(1, 768, step_s, 1e3)]).points
    slow = correct_curve(made, [told(1, 768, step_s * by, 1e3)]).points
    assert all(a.goodput > b.goodput for a, b in zip(fast, slow, strict=True))
