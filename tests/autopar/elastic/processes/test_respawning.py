"""Tests the supervisor if processes end with their world."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from supervised import LEFT, RIGHT, WHOLE, Fake, holding

from autopar.elastic.processes import launching, runner
from autopar.elastic.processes.members import MemberLimits, ProcessId
from autopar.elastic.processes.recovery import RESPAWNED, write_notes


def running(count: int, **limits: int) -> Fake:
    """A run whose first world trains, and whose workers end with their world."""
    fake = Fake(processes=count, **limits)
    fake.ready(*range(count))
    generation = fake.supervisor.generation
    for worker in range(count):
        fake.tell(worker, "formed", generation=generation, step=0, respawns=True)
    return fake


def test_survivors_end_and_are_started_again() -> None:
    """As the same workers; the world waits for all of them."""
    fake = running(3)
    fake.supervisor.on_end(1, -9)
    assert [w for w, _ in fake.of("abort")] == [0, 2]
    fake.supervisor.on_end(0, RESPAWNED)
    fake.supervisor.on_end(2, RESPAWNED)
    assert fake.started == [0, 1, 2, 0, 2]
    fake.ready(0, holds=holding(6, 1, WHOLE))
    assert len(fake.of("form")) == 3
    fake.ready(2, holds=holding(5, 1, WHOLE))
    assert fake.world() == [0, 2]
    assert fake.of("form")[-1][1]["state"]["step"] == 6
    assert fake.of("form")[-1][1]["why"] == "worker 1 died by signal 9"


def test_the_dead_are_replaced_as_restarts_say() -> None:
    """A replacement has what it found in shared memory."""
    fake = running(2, restarts=1)
    fake.supervisor.on_end(1, -9)
    fake.supervisor.on_end(0, RESPAWNED)
    assert fake.started == [0, 1, 2, 0]
    fake.ready(0, holds=holding(6, 1, LEFT) | holding(4, 1, LEFT))
    fake.ready(2, holds=holding(4, 1, RIGHT))
    assert fake.world() == [0, 2]
    assert fake.of("form")[-1][1]["state"]["step"] == 4


def test_what_a_broken_collective_ends_is_started_again() -> None:
    """Not by its own code: XLA has ended it; and one that hangs is killed for it."""
    fake = running(3)
    fake.supervisor.on_end(1, -9)
    fake.supervisor.on_end(0, -6)
    fake.now += 61.0
    fake.supervisor.tick()
    assert fake.killed == [2]
    fake.supervisor.on_end(2, -9)
    assert fake.started == [0, 1, 2, 0, 2]


def test_one_that_is_killed_as_its_world_is_left_is_dead() -> None:
    fake = running(3)
    fake.supervisor.on_end(1, -9)
    fake.supervisor.on_end(2, -9)
    fake.supervisor.on_end(0, RESPAWNED)
    assert fake.started == [0, 1, 2, 0]
    fake.ready(0)
    assert fake.world() == [0]


def test_one_that_dies_as_it_starts_again_is_not_waited_for() -> None:
    fake = running(2)
    fake.tell(0, "broken", generation=1, error="JaxRuntimeError: NCCL")
    fake.supervisor.on_end(0, RESPAWNED)
    fake.supervisor.on_end(1, RESPAWNED)
    fake.ready(0, holds=holding(5, 1, WHOLE))
    assert len(fake.of("form")) == 2
    fake.supervisor.on_end(1, -9)
    assert fake.world() == [0]


def test_an_error_as_it_starts_again_ends_the_run() -> None:
    fake = running(2)
    fake.tell(0, "broken", generation=1, error="JaxRuntimeError: NCCL")
    fake.supervisor.on_end(0, RESPAWNED)
    fake.supervisor.on_end(1, RESPAWNED)
    fake.supervisor.on_end(1, 1)
    assert fake.supervisor.result == 1
    assert "worker 1 ended with code 1" in fake.supervisor.reason


def test_a_process_joins_and_all_start_again() -> None:
    """They leave at one step, by an order that is no end of their world."""
    fake = running(2)
    assert fake.supervisor.resize(3) == ""
    fake.ready(2)
    for worker in (0, 1):
        fake.tell(worker, "started", generation=1, step=4)
    assert [d["step"] for _, d in fake.of("limit")] == [4, 4]
    for worker in (0, 1):
        fake.supervisor.on_end(worker, RESPAWNED)
        fake.ready(worker, holds=holding(5, 1, WHOLE))
    assert fake.world() == [0, 1, 2]
    assert fake.filled == []


def test_a_worker_that_is_asked_to_leave_hands_its_state_out() -> None:
    fake = running(2)
    assert fake.supervisor.remove(1) == ""
    for worker in (0, 1):
        fake.tell(worker, "started", generation=1, step=4)
    for worker, part in ((0, LEFT), (1, RIGHT)):
        fake.supervisor.on_end(worker, RESPAWNED)
        fake.ready(worker, holds=holding(5, 1, part))
    assert fake.world() == [0]
    assert len(fake.of("form")[-1][1]["state"]["holders"]) == 2
    fake.formed(0, step=5)
    assert [w for w, _ in fake.of("end")] == [1]


def test_workers_that_ended_without_a_supervisor_are_started_again() -> None:
    known = {**running(2).supervisor.notes(), "workers": {"0": None, "1": None}}
    assert known["respawns"]
    fake = Fake(processes=0)
    fake.supervisor.adopt(known)
    fake.supervisor.on_end(0, None)
    fake.supervisor.on_end(1, None)
    assert fake.started == [0, 1]
    fake.ready(0, 1, holds=holding(5, 1, WHOLE))
    assert fake.world() == [0, 1]
    assert fake.of("form")[-1][1]["state"]["step"] == 5


def test_a_host_that_is_out_of_reach_is_not_waited_for() -> None:
    """Neither is a worker that waits for another host."""
    fake = running(3)
    fake.supervisor.on_unreached(2, spare=False)
    assert fake.started == [0, 1, 2]
    for worker in (0, 1):
        fake.supervisor.on_end(worker, RESPAWNED)
    fake.supervisor.on_wait(1)
    fake.ready(0, holds=holding(5, 1, WHOLE))
    assert fake.world() == [0]


@pytest.mark.parametrize("all_left", [True, False])
def test_a_run_whose_processes_had_all_ended_is_taken_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, all_left: bool
) -> None:
    """Where all of them ended to be started again; else another run begins."""

    def prefix(run: str) -> str:
        return str(tmp_path / f"autopar-{run}-")

    monkeypatch.setattr(runner, "shared_prefix", prefix)
    monkeypatch.setattr(launching, "shared_prefix", prefix)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        process = ProcessId.of(child.pid)
        child.kill()
    assert process is not None
    known = {**running(2).supervisor.notes(), "token": "t", "run": "abc"}
    known |= {"workers": dict.fromkeys("01", process.to_data()), "reached": 7}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(known))
    for worker in range(1 + all_left):
        write_notes(prefix("abc"), worker, {})
    job = runner.RunJob(
        command=("true",), limits=MemberLimits(processes=2), folder=folder
    )
    made = runner.Runner(job)
    made._server.close()
    made._records.close()
    assert sorted(made.supervisor.members) == ([0, 1] if all_left else [])
    left = list(tmp_path.glob("autopar-*"))
    assert len(left) == (2 if all_left else 0)
