"""Tests simulations: published figures if the data exist, and small tables."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import schedule_tables

from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import POLICIES, policy_of
from autopar.scheduler.simulator.engine import Options, simulate
from autopar.scheduler.simulator.metrics import Metrics, metrics, timeline_page
from autopar.scheduler.simulator.traces.recorded import jobs_of
from autopar.scheduler.simulator.traces.spot import read_events

ROOT = pathlib.Path(__file__).parents[3]
SHARED = pathlib.Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent / "shared"))
DATA = SHARED / "scheduling"
PUBLISHED = pytest.mark.skipif(
    not DATA.is_dir(), reason="the published traces are not there; set AUTOPAR_SHARED"
)
ROWS = [
    "one,30,tiny,1,8",
    "two,40,tiny,2,16",
    "wide,50,tiny,4,32",
    "late,900,tiny,2,8",
]


def average(trace: pathlib.Path, cluster: str, policy: str) -> float:
    return figures(trace, cluster, policy).average_s


def figures(trace: pathlib.Path, cluster: str, policy: str) -> Metrics:
    nodes, made = Nodes.parse(cluster), policy_of(policy)
    return metrics(simulate(jobs_of(trace, None, nodes, made), nodes, made))


@PUBLISHED
@pytest.mark.parametrize(
    ("policy", "seconds"), [("tiresias", 3469.69375), ("optimus", 5301.875)]
)
def test_deterministic_policies_repeat_pollux_figures(policy: str, seconds: float):
    trace = DATA / "pollux" / "workloads" / "workload-6.csv"
    assert average(trace, "16x4", policy) == seconds


@PUBLISHED
def test_rubick_repeats_its_published_figure():
    trace = DATA / "rubick" / "workloads" / "naive.csv"
    assert average(trace, "8x8", "rubick") == pytest.approx(895.6149153293197, abs=1e-6)


@PUBLISHED
def test_rubick_honours_guarantees_as_its_simulator_does():
    found = figures(DATA / "rubick" / "workloads" / "workload-mt.csv", "8x8", "rubick")
    assert found.average_s == pytest.approx(4017.3, abs=0.05)
    assert found.guaranteed_s == pytest.approx(2328.1, abs=0.05)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ends_all_jobs_and_again_the_same(
    policy: str, tmp_path: pathlib.Path
):
    trace = schedule_tables.write_trace(tmp_path, ROWS)
    first = figures(trace, "2x2", policy)
    assert (first.jobs, first.failed) == (4, {})
    assert first == figures(trace, "2x2", policy)


def test_a_lone_job_takes_what_its_tables_say(tmp_path: pathlib.Path):
    """Handed in at 0, placed at 60, 30 s of restart, then 400 steps of 0.5 s."""
    trace = schedule_tables.write_trace(tmp_path, ["one,0,tiny,1,8"])
    assert average(trace, "1x2", "fifo") == 60 + 30 + 400 * 0.5


@pytest.mark.parametrize("policy", ["goodput", "tiresias"])
def test_jobs_go_on_when_a_node_leaves_and_comes_back(
    policy: str, tmp_path: pathlib.Path
):
    trace = schedule_tables.write_trace(tmp_path, ROWS)
    path = tmp_path / "spot.csv"
    path.write_text("at_s,node,event\n200,0,leave\n500,0,join\n")
    nodes, made = Nodes.parse("2x2"), policy_of(policy)
    options = Options(events=read_events(path, nodes))
    jobs = jobs_of(trace, None, nodes, made)
    history = simulate(jobs, nodes, made, options)
    assert metrics(history).jobs == 4
    away = [s for s in history.spans if 0 in s.allocation]
    assert away
    assert not any(s.start_s < 500 and s.end_s > 240 for s in away)


@pytest.mark.parametrize(("policy", "known"), [("goodput", True), ("pollux", False)])
def test_a_policy_that_pools_knows_a_program_that_ran(
    policy: str, known: bool, tmp_path: pathlib.Path
):
    trace = schedule_tables.write_trace(tmp_path, ["one,0,tiny,1,8", "two,0,tiny,1,8"])
    jobs = jobs_of(trace, None, Nodes.parse("2x2"), policy_of(policy))
    assert not jobs[1].view(60.0, oracle=False).measured
    jobs[0].reallocate((2,), "")
    jobs[0].advance(60.0, 120.0, 0.0)

    view = jobs[1].view(180.0, oracle=False)

    assert (view.measured, view.tried, view.progress) == (known, 2 * known, 0.0)
    one, other = (job.view(180.0, oracle=False).curve for job in jobs)
    shapes = np.array([1, 1, 2]), np.array([1, 2, 4])
    same = np.array_equal(one.goodput(*shapes), other.goodput(*shapes))
    assert same == known


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_jobs_may_end_between_two_decisions(policy: str, tmp_path: pathlib.Path):
    """Without seconds of a restart they are never seen at work."""
    trace = schedule_tables.write_trace(tmp_path, ROWS)
    nodes, made = Nodes.parse("2x2"), policy_of(policy)
    jobs = jobs_of(trace, None, nodes, made, restart_s=0.0)
    history = simulate(jobs, nodes, made, Options(interval_s=600.0))
    assert metrics(history).jobs == 4


def test_decisions_say_what_was_compared(tmp_path: pathlib.Path):
    trace = schedule_tables.write_trace(tmp_path, ROWS)
    nodes, made = Nodes.parse("2x2"), policy_of("goodput")
    history = simulate(jobs_of(trace, None, nodes, made), nodes, made)
    reasons = [reason for item in history.rounds for reason in item.reasons]
    assert any("configurations" in reason.compared for reason in reasons)
    assert all(reason.cost_s == 30 for reason in reasons if reason.devices)
    assert all(item.gap <= 1e-4 for item in history.rounds)
    page = timeline_page(history, metrics(history))
    assert page.count("<rect") >= len(history.spans)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("one,30,unheard,1,8", r"trace.csv:2: application 'unheard' has no tables"),
        ("one,-3,tiny,1,8", r"trace.csv:2: time is '-3'"),
        ("one,nan,tiny,1,8", r"trace.csv:2: time is 'nan'"),
        ("one,30,tiny,1,4096", r"trace.csv:2: tiny: batch 4096 was not measured"),
        ("one,30,tiny,1", r"trace.csv:2: it has 4 cells, the head has 5"),
    ],
)
def test_a_wrong_row_is_named(row: str, words: str, tmp_path: pathlib.Path):
    trace = schedule_tables.write_trace(tmp_path, [row])
    with pytest.raises(ScheduleError, match=words):
        average(trace, "2x2", "tiresias")


def test_a_name_that_stands_twice_is_refused(tmp_path: pathlib.Path):
    trace = schedule_tables.write_trace(tmp_path, ["a,0,tiny,1,8", "a,5,tiny,1,8"])
    with pytest.raises(ScheduleError, match="'a' stands in the trace twice"):
        average(trace, "2x2", "fifo")


def test_a_job_that_dies_leaves_the_others(tmp_path: pathlib.Path):
    """Three devices on one node were never measured, nor anything near."""
    rows = ["dies,0,tiny,3,8", "lives,0,tiny,1,8"]
    trace = schedule_tables.write_trace(tmp_path, rows)
    found = figures(trace, "1x4", "fifo")
    assert found.jobs == 1
    assert "no step time is known near placement (3,)" in found.failed["dies"]


def test_a_table_of_jobs_needs_no_measured_tables(tmp_path: pathlib.Path):
    path = tmp_path / "jobs.csv"
    path.write_text("name,submitted_s,devices,duration_s\na,0,2,600\nb,10,1,60\n")
    assert average(path, "2x2", "fifo") == pytest.approx(
        (60 + 60 + 601 + 50 + 121) / 2, abs=1
    )
    assert figures(path, "2x2", "goodput").jobs == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_runs_programs_without_tables(policy: str, tmp_path: pathlib.Path):
    """What gives jobs more than they asked for ends them sooner than one by one."""
    path = tmp_path / "jobs.csv"
    lines = [
        "name,submitted_s,devices,duration_s",
        "a,0,4,900",
        "b,10,8,500",
        "c,20,1,90",
    ]
    path.write_text("\n".join(lines))
    found = figures(path, "4x4", policy)
    assert found.jobs == 3
    assert found.makespan_s < 900 + 500


@pytest.mark.parametrize("text", ["16", "0x4", "4x4:t4+", "4x-1"])
def test_a_wrong_cluster_is_refused(text: str):
    with pytest.raises(ScheduleError, match="write NODESxDEVICES"):
        Nodes.parse(text)
