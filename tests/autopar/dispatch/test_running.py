"""Tests the processes of a real job: killed, found again, suspended and continued."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest
from checkout import ROOT

from autopar.dispatch.backend import Look
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.specs import Handed, JobSpec
from autopar.dispatch.store import JobRecord
from autopar.elastic.processes.members import SUSPENDED
from autopar.whole_files import holder

pytestmark = pytest.mark.cluster

SCRIPT = ROOT / "tests" / "support" / "elastic_script.py"
STEPS, LIMIT_S = 200, 120.0


class Watched:
    """A job, and all observations of its processes."""

    def __init__(self, folder: pathlib.Path, job: Handed) -> None:
        self.folder, self.steps = folder, list[int]()
        self.record = JobRecord(
            name=job.spec.name, handed=job, attempt=1, places={"node0": 1}
        )
        self.runs = ProcessRuns(folder, {"name": "local"})

    def wait(self, done: Callable[[Look], bool]) -> Look:
        end = time.monotonic() + LIMIT_S
        while True:
            look = self.runs.look(self.record)
            self.steps += [line["step"] for line in look.lines]
            if done(look):
                return look
            output = self.folder / self.record.name / "output"
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.05)

    def change(self, **fields: object) -> None:
        self.record = dataclasses.replace(self.record, **fields)

    @property
    def supervisor(self) -> int:
        return holder(self.folder / self.record.name / "lock")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.usefixtures("places")
def test_a_job_is_killed_found_suspended_and_gone_on_with(
    tmp_path: pathlib.Path,
) -> None:
    losses = tmp_path / "losses"

    def job(pace_s: str) -> Handed:
        words = (str(losses), str(STEPS), "0", pace_s)
        spec = JobSpec(name="one", script=str(SCRIPT), args=words)
        return Handed(spec=spec, folder=str(tmp_path))

    seen = Watched(tmp_path / "jobs", job("0.3"))
    seen.runs.start(seen.record)
    seen.wait(lambda look: bool(look.lines))
    os.kill(seen.supervisor, signal.SIGKILL)
    look = seen.wait(lambda look: not look.alive)
    assert look.ending is None
    seen.runs.start(seen.record)  # its workers are found, and go on
    seen.wait(lambda look: look.wanted == 1)
    assert seen.runs.suspend(seen.record) == ""
    look = seen.wait(lambda look: look.ending is not None)
    assert look.ending is not None
    assert look.ending.code == SUSPENDED
    first = max(seen.steps)
    assert 0 < first < STEPS
    seen.change(attempt=2, places={"node1": 1}, handed=job("0"))
    seen.runs.start(seen.record)
    look = seen.wait(lambda look: look.ending is not None)
    assert look.ending is not None
    assert look.ending.code == 0
    assert seen.steps[-1] == STEPS
    found = [
        json.loads(line)[0]
        for path in tmp_path.glob("losses.*")
        if path.suffix != ".ledger"
        for line in path.read_text().splitlines()
    ]
    assert sorted(found) == list(range(STEPS))


@pytest.mark.usefixtures("places")
def test_what_a_job_said_last_is_told(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no data here')")
    job = Handed(spec=JobSpec(name="dies", script=str(script)), folder=str(tmp_path))
    seen = Watched(tmp_path / "jobs", job)
    seen.runs.start(seen.record)
    look = seen.wait(lambda look: look.ending is not None)
    assert look.ending is not None
    assert look.ending.code == 1
    assert look.ending.reason.startswith("worker 0 ended with code 1")
    assert look.ending.reason.endswith("Last line of dies/output: no data here")
