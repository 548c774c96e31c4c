"""Tests that a scheduler on another host finds the jobs of the last one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dispatching import handed

from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.store import JobRecord
from autopar.dispatch.supervising import ending_file, is_elsewhere, settings_over_hosts
from autopar.elastic.processes.certificates import new_secret
from autopar.elastic.processes.members import GIVEN_UP, Connection, MemberLimits
from autopar.elastic.processes.network import End, Listener, Network
from autopar.elastic.processes.runner import RunJob
from autopar.whole_files import FileLock, holder

JOB = JobRecord(name="job", handed=handed("job"), attempt=2, places={"one": 3})
WORDS = {"name": "hosts", "host": "127.0.0.9", "grace": "20"}


class Elsewhere:
    """The supervisor of a job at another address than the scheduler's."""

    def __init__(self) -> None:
        self.network = Network("127.0.0.1", new_secret())
        self.asked: list[str] = []
        self.listener: Listener = self.network.listen(self._serve)
        self.address = self.network.address(self.listener.port)

    def _serve(self, end: End) -> None:
        connection = Connection(end)
        if (message := connection.receive()) is not None:
            self.asked.append(message["command"])
            connection.send("answer", wrong="", status={"wanted": 3})
        connection.close()

    def write_state(self, folder: pathlib.Path, **fields: Any) -> None:
        """Writes what the supervisor of a job writes to the job's folder."""
        state = {"workers": {}, "world": [], "generation": 0, "wanted": 3}
        state |= {"numbers": 3, "token": "x", "run": "y", "pid": os.getpid()}
        state |= {"address": self.address, "secret": self.network.secret, **fields}
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(state))


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    made = Elsewhere()
    yield made
    made.listener.close()


def test_a_job_whose_supervisor_is_elsewhere_runs(
    elsewhere: Elsewhere, tmp_path: pathlib.Path
) -> None:
    """So it is not started a second time."""
    elsewhere.write_state(tmp_path / "job")
    told: list[str] = []
    introduce = lambda job, address, secret: told.append(address)  # noqa: E731
    look = ProcessRuns(tmp_path, WORDS, introduce).look(JOB)
    assert (look.alive, look.wanted) == (True, 3)
    assert told == [elsewhere.address]
    elsewhere.listener.close()
    look = ProcessRuns(tmp_path, WORDS, introduce).look(JOB)
    assert (look.alive, look.wanted) == (False, None)


def test_a_number_of_a_process_elsewhere_names_none_here(
    elsewhere: Elsewhere, tmp_path: pathlib.Path
) -> None:
    """A folder on a shared file system may be locked by a process of another host."""
    folder = tmp_path / "job"
    elsewhere.write_state(folder)
    sleeps = "import time, sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", sleeps], stdin=-1) as process:
        lock = FileLock(folder / "lock")
        assert lock.take()
        (folder / "lock").write_text(str(process.pid))
        assert holder(folder / "lock") == process.pid
        runs = ProcessRuns(tmp_path, WORDS)
        runs.kill(JOB)
        assert elsewhere.asked == ["interrupt"]
        elsewhere.listener.close()
        runs.kill(JOB)
        time.sleep(0.1)
        assert process.poll() is None
        process.kill()
    lock.free()
    runs.kill(JOB)  # nobody runs it, so it counts as ended
    assert json.loads(ending_file(folder, 2).read_text())["code"] == 130


def settings(folder: pathlib.Path, attempt: int = 2) -> RunJob:
    limits = MemberLimits(processes=1, least=1, most=2)
    plain = RunJob(command=("python",), limits=limits, folder=folder)
    return settings_over_hosts(plain, folder, {"attempt": attempt, "backend": WORDS})


def test_a_supervisor_takes_over_where_the_last_one_was_elsewhere(
    elsewhere: Elsewhere, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "job"
    elsewhere.write_state(folder)
    moved = settings(folder)
    assert (moved.standby, moved.standby_s, moved.anew) == (True, 35.0, False)
    assert moved.port == elsewhere.listener.port
    assert moved.network == Network("127.0.0.9", elsewhere.network.secret)
    assert (moved.grace_s, moved.limits.fence_s) == (20.0, 35.0)

    state = json.loads((folder / "run.json").read_text())
    own = {**state, "address": f"127.0.0.9:{moved.port}"}
    (folder / "run.json").write_text(json.dumps(own))
    assert not is_elsewhere(own, WORDS)
    assert not is_elsewhere(state, {"name": "local"})
    # A command without a scheduler compares with its own host.
    assert not is_elsewhere(state, {})
    assert is_elsewhere({**state, "address": "192.0.2.1:7000"}, {})
    again = settings(folder)
    assert (again.standby, again.anew, again.port) == (False, False, 0)


def test_an_attempt_after_a_lost_vote_asks_no_host(tmp_path: pathlib.Path) -> None:
    told = {"code": GIVEN_UP, "reason": "too few hosts", "lost": True}
    ending_file(tmp_path, 1).write_text(json.dumps(told))
    assert settings(tmp_path, attempt=2).anew
    assert not settings(tmp_path, attempt=3).anew
