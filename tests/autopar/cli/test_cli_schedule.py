"""Tests the output and the errors of ``autopar schedule`` and ``autopar jobs``."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sqlite3
import subprocess
import sys
from typing import Any

import pytest
from command_line import Run, assert_fails
from dispatching import HALVES, World, handed

from autopar.cli import owning
from autopar.cli.dispatching import configurations
from autopar.dispatch.backend import ClusterNode
from autopar.dispatch.store import Store
from autopar.elastic.processes.certificates import create_secret
from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Decisions, Reason
from autopar.whole_files import FileLock, holder

ONE = '[[job]]\nname = "one"\nscript = "train.py"\n'


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "train.py").write_text("")
    HALVES.save(tmp_path / "curve.json")
    path = tmp_path / "jobs.toml"
    path.write_text(ONE)
    return path


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--policy", "optimus"), ("'optimus' is an oracle",)),
        (("--policy", "rubick"), ("'rubick' knows", "autopar simulate")),
        (("--policy", "none"), ("there is none", "goodput")),
        (("--nodes", "0x1"), ("is no group of nodes",)),
        (("--interval", "0"), ("the interval is 0",)),
        (("--react", "-1"), ("a look follows another after -1.0 s",)),
        (("--address", "auto"), ("add --backend ray",)),
        (("--secret", "x"), ("add --listen HOST:PORT",)),
        (("--listen", "here", "--secret", "none.pem"), ("none.pem cannot be read",)),
        (("--quota", "anna"), ("--quota anna: write USER=8",)),
        (("--share", "anna=0"), ("a share is 0.0",)),
        (("--backend", "hosts"), ("name the address that hosts reach",)),
        (("--backend", "hosts", "--listen", "0.0.0.0:1"), ("that hosts reach",)),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], parts: tuple[str, ...], run: Run, table: pathlib.Path
) -> None:
    state = table.parent / "state"
    assert_fails(run("schedule", table, "--state", state, *words), *parts)
    assert not list(state.glob("jobs/*"))


def test_quotas_and_shares_stay_in_the_state(run: Run, tmp_path: pathlib.Path) -> None:
    """Later options change those of the users that they name."""

    def after(*words: Any) -> dict[str, tuple[int | None, float]]:
        assert run("schedule", "--state", tmp_path, *words).code == 0
        store = Store(tmp_path / "state.sqlite", reads=True)
        found = store.users()
        store.close()
        return {name: (x.devices, x.share) for name, x in found.items()}

    first = after("--quota=anna=8", "--share=anna=3", "--share=ben=5")
    assert first == {"anna": (8, 3.0), "ben": (None, 5.0)}
    assert after() == first
    changed = {"anna": (None, 3.0), "ben": (2, 5.0)}
    assert after("--quota=anna=none", "--quota=ben=2") == changed


def test_a_scheduler_that_is_stopped_says_what_runs_on(
    run: Run, table: pathlib.Path
) -> None:
    """And how to end it; a job that is too large waits, with the reason shown."""
    (table.parent / "train.py").write_text("import time\ntime.sleep(90)\n")
    table.write_text(ONE + ONE.replace("one", "wide") + "devices = 3\n")
    state = table.parent / "state"
    secret = table.parent / "secret.pem"
    create_secret(secret)
    words = ("schedule", str(table), "--state", str(state), "--policy", "fifo",
             "--listen", "127.0.0.1:0", "--secret", str(secret))  # fmt: skip
    there: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "autopar", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"it listens at (\S+)", line):
                there += ["--at", found[1], "--secret", str(secret)]
            if "one: 0 -> 1 devices" in line:
                break
        assert f"a scheduler runs (process {process.pid})" in run("jobs", state).out
        told = run("jobs", "hold", "wide", *there)
        assert f"the scheduler (process {process.pid}) does it" in told.out
        process.terminate()
        said = process.stderr.read()
        assert process.wait() == 130
    assert "1 job runs on: one" in said
    assert f"`autopar jobs cancel one --state {state}` ends it" in said
    listed = run("jobs", state).out
    assert "no scheduler runs; the figures are " in listed
    assert "jobs that run go on; `autopar jobs cancel one" in listed
    ended = run("jobs", "cancel", "one", "wide", "--state", state)
    assert ended.out.splitlines()[:2] == [
        "job one is cancelled",
        "job wide is cancelled",
    ]
    data = run("jobs", state, "--json").json
    assert [job["state"] for job in data["jobs"]] == ["cancelled", "cancelled"]
    assert data["scheduler"] is None
    assert_fails(run("jobs", "hold", "one", "--state", state), "'one' is cancelled")


def test_jobs_are_submitted_held_and_shown(run: Run, table: pathlib.Path) -> None:
    """Without a scheduler they wait; the clock of each starts when it is handed in."""
    state = table.parent / "state"
    words = ("--state", state)
    assert "no scheduler runs: `autopar sch" in run("jobs", "submit", table, *words).out
    script = table.parent / "train.py"
    more = ("--devices", "2", "--name", "two", "--", "--rate", "1")
    assert run("jobs", "submit", script, *words, *more).code == 0
    assert_fails(run("jobs", "submit", table, *words), "'one' is there already")
    assert_fails(run("jobs", "submit", table, *words, "--name", "x"), "says all of its")
    assert_fails(run("jobs", "submit", "none.py", *words), "there is no such file")
    table.write_text(ONE.replace("one", "three") + "[users.anna]\ndevices = 2\n")
    assert_fails(run("jobs", "submit", table, *words), "[users] is for who runs")
    table.write_text(ONE.replace("one", "three") + 'target = "train.py:f"\n')
    assert_fails(
        run("jobs", "submit", table, *words), "job 'three'", "autopar schedule"
    )
    assert run("jobs", "hold", "two", *words).out.startswith("job two is held")
    shown = run("jobs", "show", "two", *words).out
    assert f"script      {script} --rate 1" in shown
    assert "held" in shown
    assert "no scheduler runs; no scheduler has looked yet" in shown
    assert run("jobs", "release", "two", *words).out.startswith("job two is pending")
    assert run("jobs", "show", "two", *words, "--json").json["args"] == ["--rate", "1"]
    assert_fails(run("jobs", "logs", "two", *words), "'two' is pending and has printed")
    (state / "jobs" / "two").mkdir(parents=True)
    (state / "jobs" / "two" / "output").write_text("a\nb\nc\n")
    assert run("jobs", "logs", "two", *words, "-n", "2").out == "b\nc\n"
    assert_fails(
        run("jobs", "show", "four", *words), "'four': there is none", "one, two"
    )
    assert_fails(run("jobs", "cancel", "four", *words), "'four': there is none")


def test_a_state_has_one_scheduler(run: Run, table: pathlib.Path) -> None:
    state = table.parent / "state"
    state.mkdir()
    lock = FileLock(state / "lock")
    assert lock.take()
    assert holder(state / "lock") > 0
    assert_fails(run("schedule", table, "--state", state), "another scheduler uses it")
    lock.free()
    assert holder(state / "lock") == 0


def test_jobs_are_listed(run: Run, tmp_path: pathlib.Path) -> None:
    jobs = [handed("one", max=4), handed("two", submitted_s=15.0)]
    world = World(tmp_path, jobs, {"one": 300, "two": 60})
    world.trainings.losses["two"] = float("nan")
    world.scheduler.run()
    found = run("jobs", tmp_path)
    assert found.code == 0
    assert "no scheduler runs; the figures are " in found.out
    table, follows = found.out.rstrip().split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["one", "owner", "done"],
        ["two", "owner", "failed"],
    ]
    assert "its loss is not finite" in table
    assert follows.startswith("1 of 2 jobs are done, 0 are open; average completion")
    data = run("jobs", tmp_path, "--json").json
    assert [job["state"] for job in data["jobs"]] == ["done", "failed"]
    assert data["decisions"][0]["job"] == "one"
    assert "configurations" in run("jobs", tmp_path, "--decisions").out


def test_a_job_whose_worker_hangs(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the job's own process, while it has devices."""
    store = Store(tmp_path / "state.sqlite")
    store.add_jobs([handed("one", max=4)])
    asked: list[pathlib.Path] = []

    def answer(folder: pathlib.Path, **words: str) -> dict[str, Any]:
        asked.append(folder)
        return {"status": {"hangs": ["worker 1 is stopped by a signal"]}}

    monkeypatch.setattr(owning, "command", answer)
    words = ("jobs", "show", "one", "--state", tmp_path)
    assert "\nhangs " not in run(*words).out
    assert not asked
    store.update(store.job("one"), places={"n1": 2})
    store.close()
    assert "hangs       worker 1 is stopped by a signal" in run(*words).out
    assert run(*words, "--json").json["hangs"] == ["worker 1 is stopped by a signal"]
    assert asked[0] == tmp_path / "jobs" / "one"
    monkeypatch.undo()
    assert "\nhangs " not in run(*words).out  # its process has not started yet


def test_what_a_job_measured_is_shown_beside_what_was_predicted(
    run: Run, tmp_path: pathlib.Path
) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 400})
    world.trainings.tells["one"] = {
        "batch": 64, "step_s": 0.16, "noise_scale": 1234.5, "scheme": "DDP over data",
        "microbatches": 2, "codecs": ["int8"],
    }  # fmt: skip
    world.rounds(3)
    shown = run("jobs", "show", "one", "--state", tmp_path).out
    for words in (
        "step takes  160 ms", "predicted   308 ms at batch 8", "batch       64",
        "noise scale 1234 rows", "plan        DDP over data, 2 microbatches, int8",
    ):  # fmt: skip
        assert words in shown
    data = run("jobs", "show", "one", "--state", tmp_path, "--json").json
    assert data["predicted_step_s"] == pytest.approx(8 / 26)
    assert (data["noise_scale"], data["batch"]) == (1234.5, 64)
    listed = run("jobs", tmp_path).out
    assert "1234" in listed
    assert "at batch 8" in listed


def test_jobs_of_no_scheduler(run: Run, tmp_path: pathlib.Path) -> None:
    assert_fails(run("jobs", tmp_path), "no scheduler's state", "autopar schedule")


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (b"SQLite", b"sqlite", "file is not a database"),
        (b'"script"', b'"scr\xffpt"', "it is damaged"),
        (b'"script"', b'"scribe"', "a job is damaged"),
        (b"begin_s0.0", b"begin_sx.0", "begin_s is 'x.0', no time"),
    ],
)
def test_a_damaged_state_is_named(
    old: bytes, new: bytes, part: str, run: Run, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "state.sqlite"
    store = Store(path)
    store.add_jobs([handed("one", max=4)])
    store.set_facts({"begin_s": "0.0", "looked_s": "1.0"})
    store.close()
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new))
    assert_fails(run("jobs", tmp_path), "state.sqlite: ", part)


def test_a_damaged_field_of_a_state_is_an_error_of_the_package(
    tmp_path: pathlib.Path,
) -> None:
    """Damage does not keep to what the tables say of their columns."""
    path = tmp_path / "state.sqlite"
    store = Store(path)
    store.add_jobs([handed("one", max=4)])
    store.set_facts({"begin_s": "0.0", "looked_s": "1.0"})
    store.number("n1", 4, "h100")
    store.span("one", 1.0, {"n1": 2})
    reason = Reason(job="one", devices=2, kept=0, compared="fifo", gain=0.5, cost_s=1.0)
    store.add_decisions(1.0, Decisions(allocations={}, reasons=(reason,), gap=0.0))
    store.close()
    whole = path.read_bytes()
    for table in ("jobs", "nodes", "decisions", "spans", "facts"):
        for column in columns_of(path, table):
            for value in (None, "x", b"\xff", -1, 1.5, 2**62):
                path.write_bytes(whole)
                without_rules(path, table, column, value)
                with contextlib.suppress(ScheduleError):
                    owning.jobs(tmp_path, decisions=True, as_json=True)
                    owning.jobs(tmp_path, decisions=True, as_json=False)
                    owning.show(tmp_path, "one", as_json=False)


def columns_of(path: pathlib.Path, table: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as file:
        return [row[1] for row in file.execute(f"pragma table_info({table})")]


def without_rules(path: pathlib.Path, table: str, column: str, value: object) -> None:
    """Sets a column of the database to a value that its rules forbid."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute(f"create table other as select * from {table}")
        file.execute(f"update other set {column} = ?", (value,))
        file.execute(f"drop table {table}")
        file.execute(f"alter table other rename to {table}")
        file.commit()


def test_another_job_of_a_name_is_refused(
    run: Run, table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 10})
    world.scheduler.run()
    words = ("--state", tmp_path)
    assert_fails(run("schedule", table, *words), "job 'one' is in", "was another one")


def test_a_curve_is_planned_for_what_a_job_may_get() -> None:
    places = [ClusterNode("a", 4), ClusterNode("b", 4), ClusterNode("c", 2)]
    found = [str(cluster) for cluster in configurations(places, 8)]
    assert found == ["1x1:cpu", "1x2:cpu", "1x4:cpu", "2x4:cpu"]
