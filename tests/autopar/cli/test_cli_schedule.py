"""``autopar schedule`` and ``autopar jobs``: what is refused, and what is shown."""

from __future__ import annotations

import pathlib

import pytest
from command_line import Run, assert_fails
from dispatching import HALVES, World, handed

from autopar.cli.dispatching import configurations
from autopar.dispatch.backend import Place
from autopar.dispatch.supervising import FileLock, holder

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
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], parts: tuple[str, ...], run: Run, table: pathlib.Path
) -> None:
    state = table.parent / "state"
    assert_fails(run("schedule", table, "--state", state, *words), *parts)
    assert not list(state.glob("jobs/*"))


def test_a_job_that_is_too_large_is_named(run: Run, table: pathlib.Path) -> None:
    table.write_text(ONE + "devices = 3\n")
    words = ("--state", table.parent / "s", "--nodes", "2x1", "--policy", "fifo")
    assert_fails(run("schedule", table, *words), "job 'one' needs 3 devices")


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
    table, follows = found.out.rstrip().split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["one", "done"], ["two", "failed"]]
    assert "its loss is not finite" in table
    assert follows.startswith("1 of 2 jobs are done, 0 are open; average completion")
    data = run("jobs", tmp_path, "--json").json
    assert [job["state"] for job in data["jobs"]] == ["done", "failed"]
    assert data["decisions"][0]["job"] == "one"
    assert "configurations" in run("jobs", tmp_path, "--decisions").out


def test_jobs_of_no_scheduler(run: Run, tmp_path: pathlib.Path) -> None:
    assert_fails(run("jobs", tmp_path), "no scheduler's state", "autopar schedule")


def test_another_job_of_a_name_is_refused(
    run: Run, table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 10})
    world.scheduler.run()
    words = ("--state", tmp_path)
    assert_fails(run("schedule", table, *words), "job 'one' is in", "was another one")


def test_a_curve_is_planned_for_what_a_job_may_get() -> None:
    places = [Place("a", 4), Place("b", 4), Place("c", 2)]
    found = [str(cluster) for cluster in configurations(places, 8)]
    assert found == ["1x1:cpu", "1x2:cpu", "1x4:cpu", "2x4:cpu"]
