"""Tests processes that end with their world and are restarted; checks the losses."""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_processes import Run
from process_losses import check_losses

pytestmark = pytest.mark.cluster

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts runs, and ends their remaining processes."""
    runs: list[Run] = []

    def started(*words: Any, **options: Any) -> Run:
        folder = tmp_path / "run"
        given = {"recovery": "respawn", **options}
        runs.append(Run(folder, folder / "losses", *words, **given))
        return runs[-1]

    yield started
    for run in runs:
        run.clean()


def shared(run_name: str) -> list[str]:
    """The files of a run in shared memory."""
    return [x for x in os.listdir("/dev/shm") if f"autopar-{run_name}" in x]


def check_yields(run: Run) -> None:
    """Checks that no worker yields a step twice, although its process is replaced."""
    workers = {x["pid"]: x["worker"] for x in run.log() if x["event"] == "start"}
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    for path in run.folder.glob("losses.*"):
        if path.suffix[1:].isdigit():
            for line in path.read_text().splitlines():
                found[workers[int(path.suffix[1:])], json.loads(line)[0]] += 1
    assert set(found.values()) == {1}


def test_a_process_is_killed_and_its_supervisor(start: Start) -> None:
    """Nothing is read of a checkpoint, and no shared memory is left behind."""
    run = start(120, 1, 0.03, processes=3, grace=60)
    run.wait_for_world([0, 1, 2])
    before = [run.pid(w) for w in (0, 2)]
    run.kill(1)
    run.wait_for_world([0, 2])
    assert not {run.pid(w) for w in (0, 2)} & set(before)
    name = run.state()["run"]
    assert shared(name)
    run.kill_supervisor()
    run.process = run.started()
    run.wait_for(lambda: run.supervisor() == run.process.pid)
    run.wait_for(lambda: len(run.worlds()) >= 3)
    run.kill(0)
    run.wait_for_world([2])
    assert run.wait() == 0, run.output()
    check_losses(run, 120)
    check_yields(run)
    assert "began" not in run.output()
    assert not shared(name)


def test_all_are_killed_at_once(start: Start) -> None:
    """Others take the last state that all of them had written, and nobody else has."""
    run = start(120, 1, 0.03, **{"keep-every": 5}, processes=2, restarts=2)
    run.wait_for_world([0, 1], steps=12)
    name = run.state()["run"]
    run.kill_all([0, 1])
    run.wait_for_world([2, 3])
    formed = [x for x in run.log() if x["event"] == "formed"]
    assert formed[-1]["step"] >= 10
    assert run.wait() == 0, run.output()
    check_losses(run, 120)
    assert not shared(name)
