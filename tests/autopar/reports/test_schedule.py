"""Tests that reports of a schedule agree with the schedule."""

import json

import msgspec
import pytest
from stage_plans import make_plan

from autopar.plans import PipelineData
from autopar.reports.html import render_html
from autopar.reports.schedule import (
    bubble,
    drawing,
    play_plan,
    stage_rows,
    timeline_html,
    trace_events,
)
from autopar.reports.table import render


def plan_of(schedule="1f1b", microbatches=4, parts=2, **changes):
    """Two stages whose backward pass takes as long as two forward passes."""
    split = schedule == "zero-bubble"
    data = PipelineData(
        layers=tuple(range(parts)),
        parts=tuple(range(parts)),
        forward_s=(1.0,) * parts,
        backward_s=(1.0 if split else 2.0,) * parts,
        weight_s=(1.0,) * parts if split else (),
        forward_link_s=(0.0,) * (parts - 1),
        backward_link_s=(0.0,) * (parts - 1),
        latency_s=(0.0,) * (parts - 1),
        step_s=(0.0, 0.0),
        memory_bytes=(1e9, 2e9),
        activation_bytes=(1e6,) * parts,
    )
    plan = make_plan(microbatches=microbatches, schedule=schedule)
    data = msgspec.structs.replace(data, **changes)
    return msgspec.structs.replace(plan, pipeline=data)


def test_the_drawing_of_1f1b():
    lines = drawing(plan_of(), width=15)
    assert lines[0] == "  0 |01..aa2bb3cc.dd|"
    assert lines[1] == "  1 |.0aa1bb2cc3dd..|"


def test_the_drawing_tells_gradients_of_weights_apart():
    first, second, *_ = drawing(plan_of("zero-bubble", 2), width=7)
    assert first == "  0 |01.aAbB|"
    assert second == "  1 |.0a1bAB|"


def test_what_runs_once_stands_at_the_end():
    plan = plan_of(microbatches=1, step_s=(2.0, 1.0))
    assert drawing(plan, width=8)[:2] == ["  0 |0...aa**|", "  1 |.0aa*...|"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_schedule(schedule):
    # (stages - 1) of (microbatches + stages - 1) slots.
    assert bubble(plan_of(schedule)) == pytest.approx(1 / 5)


def test_stages_have_a_row_each():
    rows = stage_rows(plan_of("interleaved", parts=4, recomputed=(2,)))
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][3] == "0, 2 (1 computed again)"
    assert rows[1][3] == "1, 3"
    assert [row[7] for row in rows] == ["1.00 GB", "2.00 GB"]


def test_the_table_and_the_page_show_the_stages():
    plan = plan_of()
    text = render(plan)
    assert "a stage waits 20.0% of the step" in text
    assert drawing(plan)[0] in text
    page = render_html(plan, ())
    assert timeline_html(plan) in page
    assert page.count("<rect") >= 2 * 4 * 2


def test_the_trace_has_all_tasks_in_microseconds():
    plan = plan_of(step_s=(0.5, 0.0))
    found = json.loads(json.dumps(trace_events(plan)))
    tasks = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert len(tasks) == 2 * 2 * 4 + 1
    last = max(e["ts"] + e["dur"] for e in tasks)
    assert last == pytest.approx(play_plan(plan)[2].makespan_s * 1e6)
    once = [e for e in tasks if e["name"] == "once a step"]
    assert [(e["tid"], e["dur"]) for e in once] == [(0, 0.5e6)]


def test_a_plan_of_one_stage_has_no_schedule():
    plan = make_plan()
    assert plan.pipeline is None
    assert "a stage waits" not in render(plan)
