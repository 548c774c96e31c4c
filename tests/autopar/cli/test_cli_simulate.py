"""Tests the output of ``autopar simulate``, and the traces that it refuses."""

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
    """A trace in Rubick's format, with the tables of one program."""
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
def test_a_job_larger_than_the_cluster_stands_in_the_headline(
    policy: str, run: Run, tmp_path: pathlib.Path
) -> None:
    trace = plain(tmp_path, "small,0,1,60", "huge,0,9,60")
    words = ("simulate", trace, "--cluster", "2x2", "--policy", policy)
    shown = run(*words)
    assert shown.code == 3
    assert shown.out.startswith("1 of 2 jobs could not run: the figures are of the 1 ")
    assert "jobs done                 1 of 2" in shown.out
    assert "job huge could not run: it asks for 9 devices and the cluster has 4" in (
        shown.out
    )
    data = run(*words, "--json")
    assert (data.code, data.json["jobs"], data.json["submitted"]) == (3, 1, 2)
    assert list(data.json["failed"]) == ["huge"]


def test_a_job_that_no_size_of_the_cluster_runs_is_named(
    run: Run, tmp_path: pathlib.Path
) -> None:
    """Its tables begin at two devices, and there is one: it would wait for ever."""
    trace = plans(tmp_path, "first,0,0,wide,1,ga,10,0")
    table = tmp_path / "traces" / "wide" / "placements.csv"
    table.write_text("exec_plan,placement,iter_time\nga,2,1.0\n")
    result = run("simulate", trace, "--cluster", "1x1")
    assert result.code == 3
    assert "job first could not run: policy 'goodput' gives it nothing" in result.out


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
        (("--cluster", f"{'9' * 5000}x8"), ("NODESxDEVICES",)),
        (("--cluster", "1x8+9999999x9999999"), ("more than 1048576 devices",)),
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
    assert "job dies could not run: " in run(*words).out
    assert run(*words).code == 3


PHILLY_TIMES = ("2017-10-09 07:00:00", "2017-10-09 07:01:00", "2017-10-09 07:02:00.5")


def attempt(begin: str | None, end: str | None, gpus: int) -> dict[str, object]:
    node = {"ip": "m1", "gpus": [f"gpu{k}" for k in range(gpus)]}
    return {"start_time": begin, "end_time": end, "detail": [node] if gpus else []}


def philly_log() -> list[dict[str, object]]:
    """A log with two attempts of a job, a job that never ran, and one without GPUs."""
    zero, one, two = PHILLY_TIMES
    first = [attempt(zero, one, 1), attempt(one, two, 2)]
    return [
        {"status": "Pass", "vc": "a", "jobid": "application_1", "attempts": first,
         "submitted_time": "2017-10-09 06:59:00", "user": "u"},
        {"status": "Killed", "vc": "a", "jobid": "application_2", "attempts": [],
         "submitted_time": "2017-10-09 07:00:00", "user": "u"},
        {"status": "Failed", "vc": "a", "jobid": "application_3", "user": "u",
         "attempts": [attempt(zero, "None", 1), attempt(zero, one, 0)],
         "submitted_time": "2017-10-09 07:00:00"},
    ]  # fmt: skip


SACCT = """JobID|Submit|Start|End|Elapsed|AllocTRES|State
7|2024-01-02T03:00:00|2024-01-02T03:00:10|2024-01-02T03:01:10|00:01:00|cpu=8,gres/gpu:a100=2,gres/gpu=2|COMPLETED
7.batch|2024-01-02T03:00:10|2024-01-02T03:00:10|x|00:01:00|cpu=8|COMPLETED
8_1|2024-01-02T03:00:30|2024-01-03T03:00:30|2024-01-04T05:00:30|1-02:00:00|gres/gpu:a100=4|CANCELLED by 7
9|2024-01-02T04:00:00|Unknown|Unknown|00:00:00||PENDING
10|2024-01-02T04:00:00|Unknown|Unknown|00:05:00|cpu=4|FAILED
"""  # noqa: E501 (rows are as sacct prints them)
TABLE = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:00,0.25,1,0.25,b
2017-10-09 07:00:00,90.5,2,181.0,a
2017-10-09 07:03:00,0.0,1,0.0,a
"""


@pytest.mark.parametrize(
    ("name", "text", "asked", "makespan_s", "left"),
    [
        ("log.json", json.dumps(philly_log()), [2], 240.5, {"never ran": 1, "had": 1}),
        ("sacct.txt", SACCT, [2, 4], 93720.0, {"never ran": 1, "had no GPU": 1}),
        ("philly.csv", TABLE, [2, 1], 210.5, {"never ran": 1}),
    ],
)
def test_records_of_clusters_are_read(
    name: str,
    text: str,
    asked: list[int],
    makespan_s: float,
    left: dict[str, int],
    run: Run,
    tmp_path: pathlib.Path,
) -> None:
    """A job runs as long as it did, on as many devices, to a part of a second."""
    path = tmp_path / name
    path.write_text(text)
    words = ("simulate", path, "--cluster", "2x4", "--policy", "fifo", "--restart", "0")
    data = run(*words, "--json", "--explain").json
    assert data["jobs"] == data["submitted"] == len(asked)
    found = [int(line.split("-> ")[1].split()[0]) for line in data["decisions"]]
    assert [n for n in found if n] == asked
    # Decisions are made in every minute: a job starts at the next one.
    assert data["makespan_s"] == pytest.approx(makespan_s, abs=120)
    assert data["makespan_s"] % 1 == pytest.approx(makespan_s % 1)
    assert sum(data["left_out"].values()) == len(left)
    shown = run(*words).out
    assert all(f"1 jobs of the trace {why}" in shown for why in left)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", "[{", ("a.json", "cannot be read as JSON")),
        ("a.json", '{"jobs": []}', ("a.json", "no list of jobs")),
        ("a.json", "[7]", ("job 1", "no JSON object")),
        ("a.json", '[{"jobid": "x", "attempts": 3}]', ("job 1 (x)", "attempts is 3")),
        (
            "a.json",
            json.dumps([{**philly_log()[0], "submitted_time": "soon"}]),
            ("job 1 (application_1)", "submitted_time is 'soon'"),
        ),
        ("a.csv", TABLE.replace("90.5", "long"), ("a.csv:3", "duration is 'long'")),
        ("a.csv", TABLE.replace("2017-10-09 07:01", "x"), ("a.csv:2", "timestamp")),
        ("a.txt", SACCT.replace("1-02:00:00", "26h"), ("a.txt:4", "Elapsed is '26h'")),
        ("a.txt", SACCT.replace("AllocTRES", "TRES"), ("no column AllocTRES",)),
        ("a.txt", SACCT.replace("|2024-01-03T03:00:30", ""), ("a.txt:4", "6 cells")),
        ("a.txt", SACCT.replace("a100=2", "a=" + "9" * 5000), ("a.txt:2", "AllocTRES")),
        ("a.csv", TABLE.replace("90.5", "9" * 9999), ("a.csv:3", "9999 letters")),
        ("a.csv", TABLE.replace("num_gpus", "x" * 9999), ("its columns are",)),
        ("a.json", json.dumps([{"attempts": "x" * 9999}]), ("attempts is 'xxx",)),
        ("a.csv", TABLE.replace("90.5", "1e31"), ("a.csv:3", "at most 1e+30")),
        ("a.csv", TABLE.replace("90.5,2", "9,1e17"), ("a.csv:3", "whole number")),
        (
            "a.csv",
            TABLE.replace("2017-10-09 07:01:00", "0001-01-01 00:00+23:00"),
            ("a.csv:2", "timestamp is '0001"),
        ),
    ],
)
def test_a_wrong_record_is_named(
    name: str, text: str, parts: tuple[str, ...], run: Run, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = run("simulate", path, "--cluster", "2x4")
    assert_fails(result, *parts)
    assert len(result.err) < 2000


def test_sacct_prints_names_and_steps_as_they_are(
    run: Run, tmp_path: pathlib.Path
) -> None:
    """Quotes mean nothing there; a job that began again stands there each time."""
    rows = (
        "JobID|JobName|Submit|Elapsed|State|AllocTRES",
        '1300+0|say "x|2024-01-02T03:00:00|00:10:00|NODE_FAIL|gres/gpu:a100=1',
        '1300+0.0+1|"|2024-01-02T03:00:00|00:10:00|CANCELLED|cpu=1',
        '1300+0|say "x|2024-01-02T03:20:00|00:20:00|COMPLETED|gres/gpu:a100=2',
        "1301_[5-9%2]|y|2024-01-02T03:20:00|00:00:00|PENDING|",
    )
    path = tmp_path / "sacct.txt"
    path.write_text("\n".join(rows), encoding="utf-8-sig")
    words = ("simulate", path, "--cluster", "1x4", "--policy", "fifo", "--restart", "0")
    data = run(*words, "--json").json
    assert (data["jobs"], data["left_out"]) == (1, {"never ran": 1})
    assert data["makespan_s"] == 60 + 600 + 1200


@pytest.mark.parametrize(
    ("table", "old", "new", "parts"),
    [
        ("placements.csv", "\n11,", "\n\u00b2,", ("'\u00b2' is no row of digits",)),
        (
            "placements.csv",
            "\n1,4,",
            "\n1,4,0.3,9\n1,4,",
            ("sync_time is 9", "step_time 0.3"),
        ),
        ("placements.csv", "\n1,4,", "\n1,4,0,0\n1,4,", ("step_time is '0'",)),
        ("placements.csv", "1,4,", "1,4.5,", ("local_bsz is 4.5", "whole number")),
        ("validation-8.csv", "1.0,2.0", "1.0,0", ("validation-8.csv:2", "grad_var")),
        ("validation-8.csv", "\n200,", "\n20,", ("-8.csv:3", "progress falls")),
        ("validation-x.csv", "", "", ("'x' is no batch",)),
    ],
)
def test_a_wrong_table_is_named(
    table: str,
    old: str,
    new: str,
    parts: tuple[str, ...],
    run: Run,
    tmp_path: pathlib.Path,
) -> None:
    trace = schedule_tables.write_trace(tmp_path, GOOD)
    path = tmp_path / "traces" / "tiny" / table
    whole = path.with_name(table.replace("x", "8")).read_text()
    path.write_text(whole.replace(old, new, 1), encoding="utf-8")
    assert_fails(run("simulate", trace, "--cluster", "2x2"), *parts)


def test_a_program_is_no_path(run: Run, tmp_path: pathlib.Path) -> None:
    trace = plans(tmp_path)
    for name in ("../traces/wide", "x" * 300):
        trace.write_text(f"{RUBICK}\na,0,0,{name},1,ga,9,0\n")
        assert_fails(run("simulate", trace, "--cluster", "1x4"), f"'{name}' has no")


def test_few_measured_placements_have_nothing_between_them(
    run: Run, tmp_path: pathlib.Path
) -> None:
    trace = plans(tmp_path, "a,0,0,wide,3,ga,9,0")
    result = run("simulate", trace, "--cluster", "1x4", "--policy", "fifo")
    assert result.code == 3
    assert "job a could not run: wide: no step time is known near" in result.out


def test_tables_of_each_kind_of_devices(run: Run, tmp_path: pathlib.Path) -> None:
    """On the kind that is ten times as fast, steps take a tenth; said where alike."""
    trace = plans(tmp_path, "one,0,0,wide,1,ga,99,0")
    fast = tmp_path / "fast" / "wide"
    fast.mkdir(parents=True)
    head = "exec_plan,placement,iter_time\n"
    (fast / "placements.csv").write_text(head + "ga,1,0.2\nga,2,0.1\n")
    words = ("simulate", trace, "--cluster", "1x2:slow+1x2:fast", "--restart", "0")
    alike = run(*words)
    assert alike.out.startswith("no table distinguishes slow, fast: these kinds")
    slow_s = run(*words, "--json").json["average_s"]
    assert slow_s == pytest.approx(60 + 100)
    tables = ("--tables", f"slow={tmp_path / 'traces'}", "--tables")
    data = run(*words, *tables, f"fast={tmp_path / 'fast'}", "--json").json
    assert data["average_s"] == pytest.approx(60 + 10)
    assert data["kinds_alike"] == []
    assert_fails(run(*words, *tables[:2]), "'fast' have no tables")
    assert_fails(run(*words, *tables, f"slow={tmp_path}"), "one for each kind")
    assert_fails(run(*words, *tables, f"other={tmp_path}"), "'other': the cluster has")


def test_guaranteed_jobs_have_a_row(run: Run, tmp_path: pathlib.Path) -> None:
    trace = plans(tmp_path, "one,0,0,wide,1,ga,9,1", "two,0,0,wide,1,ga,999,0")
    words = ("simulate", trace, "--cluster", "1x2", "--policy", "rubick")
    data = run(*words, "--json").json
    assert data["guaranteed"] == 1
    assert data["guaranteed_s"] < data["average_s"]
    assert "of guaranteed jobs" in run(*words).out
