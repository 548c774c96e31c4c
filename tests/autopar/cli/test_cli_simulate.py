"""``autopar simulate``: what it prints, and which traces it refuses."""

from __future__ import annotations

import json
import pathlib

import pytest
import schedule_tables
from command_line import Run, assert_fails

RUBICK = "name,submission_time,duration,application,num_gpus,exec_plan,steps,is_sla"
PLAIN = "name,submitted_s,devices,duration_s"
GOOD = ["one,30,tiny,1,8", "two,40,tiny,2,16"]


def plain(folder: pathlib.Path, *rows: str) -> pathlib.Path:
    path = folder / "jobs.csv"
    path.write_text("\n".join([PLAIN, *rows]))
    return path


def plans(folder: pathlib.Path, *rows: str, seconds: str = "1.0") -> pathlib.Path:
    """A trace of Rubick's form beside a table of one program."""
    where = folder / "traces" / "wide"
    where.mkdir(parents=True)
    lines = ["exec_plan,placement,iter_time", "ga,1,2.0", f"ga,2,{seconds}"]
    (where / "placements.csv").write_text("\n".join(lines))
    (folder / "workloads").mkdir()
    path = folder / "workloads" / "trace.csv"
    path.write_text("\n".join([RUBICK, *rows]))
    return path


def test_figures_as_a_table_and_as_json(run: Run, tmp_path: pathlib.Path) -> None:
    trace = schedule_tables.write_trace(tmp_path, GOOD)
    words = ("simulate", trace, "--cluster", "2x2", "--policy", "sia")
    shown, data = run(*words), run(*words, "--json", "--explain")
    assert shown.code == data.code == 0
    assert "jobs done                 2" in shown.out
    assert data.json["jobs"] == 2
    assert f"{data.json['average_s']:,.1f} s" in shown.out
    assert any("normalised goodput" in line for line in data.json["decisions"])


def test_a_page_is_written(run: Run, tmp_path: pathlib.Path) -> None:
    trace = schedule_tables.write_trace(tmp_path, GOOD)
    page = tmp_path / "page.html"
    assert run("simulate", trace, "--cluster", "2x2", "--html", page).code == 0
    assert "<rect" in page.read_text()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["one,30,unheard,1,8"], ("trace.csv:2", "'unheard' has no tables", "tiny")),
        (["one,-3,tiny,1,8"], ("trace.csv:2", "time is '-3'", "at least 0")),
        ([*GOOD, "late,nan,tiny,1,8"], ("trace.csv:4", "time is 'nan'")),
        (["one,inf,tiny,1,8"], ("trace.csv:2", "time is 'inf'")),
        (["one,30,tiny,0,8"], ("trace.csv:2", "num_replicas", "at least 1")),
        (["one,30,tiny,1.5,8"], ("trace.csv:2", "num_replicas", "whole number")),
        (["one,30,tiny,1,many"], ("trace.csv:2", "batch_size is 'many'")),
        (["one,30,tiny"], ("trace.csv:2", "3 cells")),
        ([*GOOD, "one,50,tiny,1,8"], ("'one' stands in the trace twice",)),
        ([], ("it has no jobs",)),
    ],
)
def test_a_wrong_trace_is_refused_in_one_line(
    rows: list[str], words: tuple[str, ...], run: Run, tmp_path: pathlib.Path
) -> None:
    trace = schedule_tables.write_trace(tmp_path, rows)
    assert_fails(run("simulate", trace, "--cluster", "2x2"), *words)


@pytest.mark.parametrize("policy", ["fifo", "tiresias", "gavel"])
def test_a_job_larger_than_the_cluster_is_named(
    policy: str, run: Run, tmp_path: pathlib.Path
) -> None:
    trace = plain(tmp_path, "small,0,1,60", "huge,0,9,60")
    words = ("simulate", trace, "--cluster", "2x2", "--policy", policy)
    assert_fails(run(*words), "job 'huge' asks for 9 devices", "the cluster has 4")


def test_a_job_that_no_size_of_the_cluster_runs_is_named(
    run: Run, tmp_path: pathlib.Path
) -> None:
    """Its tables begin at two devices, and there is one: it would wait for ever."""
    trace = plans(tmp_path, "first,0,0,wide,1,ga,10,0")
    table = tmp_path / "traces" / "wide" / "placements.csv"
    table.write_text("exec_plan,placement,iter_time\nga,2,1.0\n")
    result = run("simulate", trace, "--cluster", "1x1")
    assert_fails(result, "job 'first'", "cluster")


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf", "fast"])
def test_a_step_time_that_cannot_be_is_named(
    seconds: str, run: Run, tmp_path: pathlib.Path
) -> None:
    trace = plans(tmp_path, "one,0,0,wide,1,ga,10,0", seconds=seconds)
    result = run("simulate", trace, "--cluster", "1x2")
    assert_fails(result, "placements.csv:3", f"iter_time is '{seconds}'")


def test_a_curve_that_is_not_monotone_is_simulated(
    run: Run, tmp_path: pathlib.Path
) -> None:
    """Two devices are slower than one: the job keeps to one, alone on two."""
    trace = plans(tmp_path, "one,0,0,wide,1,ga,99,0", seconds="9.0")
    result = run("simulate", trace, "--cluster", "1x2", "--json")
    assert result.code == 0
    # A decision, a restart, and a hundred steps of 2 s on one device.
    assert result.json["average_s"] == pytest.approx(60 + 260 + 200)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("200,7,leave", ("away.csv:2", "node 7 is not there", "0 to 1")),
        ("200,0,dies", ("away.csv:2", "event 'dies'", "leave or join")),
        ("-1,0,leave", ("away.csv:2", "at_s is '-1'")),
    ],
)
def test_a_wrong_event_is_named(
    row: str, words: tuple[str, ...], run: Run, tmp_path: pathlib.Path
) -> None:
    away = tmp_path / "away.csv"
    away.write_text(f"at_s,node,event\n{row}\n")
    trace = plain(tmp_path, "a,0,1,60")
    result = run("simulate", trace, "--cluster", "2x2", "--away", away)
    assert_fails(result, *words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--cluster", "2by2"), ("NODESxDEVICES",)),
        (("--cluster", "2x2", "--policy", "best"), ("'best'", "goodput")),
        (("--cluster", "2x2", "--interval", "0"), ("the interval is 0",)),
        (("--cluster", "2x2", "--interval", "nan"), ("the interval is nan",)),
        (("--cluster", "2x2", "--interference", "1"), ("from 0 to 1",)),
        (("--cluster", "2x2", "--restart", "-5"), ("restart", "-5")),
        (("--cluster", "2x2", "--restart", "nan"), ("restart", "nan")),
    ],
)
def test_options_that_make_no_sense(
    words: tuple[str, ...], parts: tuple[str, ...], run: Run, tmp_path: pathlib.Path
) -> None:
    assert_fails(run("simulate", plain(tmp_path, "a,0,1,60"), *words), *parts)


def test_a_file_that_is_no_trace(run: Run, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("when,who\n1,2\n")
    result = run("simulate", path, "--cluster", "2x2")
    assert_fails(result, "its columns are when, who", "submitted_s")
    assert_fails(run("simulate", tmp_path / "none.csv", "--cluster", "2x2"), "none.csv")


def test_a_job_that_dies_leaves_the_others(run: Run, tmp_path: pathlib.Path) -> None:
    trace = schedule_tables.write_trace(
        tmp_path, ["dies,0,tiny,3,8", "lives,0,tiny,1,8"]
    )
    words = ("simulate", trace, "--cluster", "1x4", "--policy", "fifo")
    data = json.loads(run(*words, "--json").out)
    assert data["jobs"] == 1
    assert "near placement (3,)" in data["failed"]["dies"]
    assert "job dies died: " in run(*words).out
