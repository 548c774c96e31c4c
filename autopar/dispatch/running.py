"""Starts and controls the processes of jobs, by files in a folder for each job.

Each job has a supervisor: a process that manages the job's workers, and that goes on
when the scheduler ends. The job's folder holds everything that a later scheduler needs
to find the supervisor again. The later scheduler may run on another host: it then asks
the supervisor, if it runs, at its address. If it is lost with its host, its successor
on the scheduler's host takes the job over from the hosts that train.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopar.checkpoint.folders import put
from autopar.dispatch.backend import Look
from autopar.dispatch.store import JobRecord
from autopar.dispatch.supervising import ending_file, ending_of, is_elsewhere
from autopar.elastic.processes.records import command, read_state
from autopar.errors import PlanError, ScheduleError
from autopar.whole_files import holder


class ProcessRuns:
    """Starts a supervisor process for each job; see `Runs`."""

    def __init__(
        self,
        folder: pathlib.Path,
        words: Mapping[str, str],
        introduce: Callable[[JobRecord, str, str], None] | None = None,
    ) -> None:
        """Makes the object; starts no process yet.

        Args:
          folder: the folder that holds the folders of all jobs.
          words: data that supervisors need to connect to the cluster (`Backend.words`).
          introduce: tells the nodes of a job where its supervisor listens, and the
            secret of its run; None: nodes need not know this.
        """
        self._folder, self._words = folder.absolute(), dict(words)
        self._introduce = introduce
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        # Name of a job -> how many bytes of its file of progress have been read.
        self._read: dict[str, int] = {}

    def start(self, job: JobRecord) -> None:
        """See `Runs`."""
        folder = self._of(job)
        folder.mkdir(parents=True, exist_ok=True)
        if holder(folder / "lock"):
            return
        self._write(job)
        with open(folder / "output", "ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "autopar.dispatch.supervising", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[job.name] = child
        threading.Thread(target=self._attend, args=(job, child), daemon=True).start()

    def _attend(self, job: JobRecord, child: subprocess.Popen[bytes]) -> None:
        """Introduces a new supervisor to nodes; waits for the end of its process."""
        while child.poll() is None and self._state(job).get("pid") != child.pid:
            time.sleep(_PAUSE_S)
        self._introduce_job(job)
        child.wait()

    def _introduce_job(self, job: JobRecord) -> None:
        """Introduces a job's supervisor to nodes, if it listens."""
        state = self._state(job)
        if state and self._introduce is not None:
            self._introduce(job, state["address"], state["secret"])

    def _state(self, job: JobRecord) -> Mapping[str, Any]:
        """What the last supervisor of a job has written; empty if there is nothing."""
        with contextlib.suppress(PlanError):
            return read_state(self._of(job)) or {}
        return {}

    def _is_elsewhere(self, job: JobRecord) -> bool:
        """Whether a job's last supervisor ran on another host, and may still run."""
        mine = job.name in self._children
        return not mine and is_elsewhere(self._state(job), self._words)

    def look(self, job: JobRecord) -> Look:
        """See `Runs`."""
        wanted = None
        # The order matters: if the supervisor ends after this check, the reads below
        # see how it ended.
        alive = self._alive(job)
        if alive or self._is_elsewhere(job):
            self._introduce_job(job)  # agents of hosts may have come
            with contextlib.suppress(OSError, ValueError):
                wanted = self._command(job, command="status")["status"]["wanted"]
                alive = True
        return Look(
            alive=alive,
            ending=ending_of(self._of(job), job.attempt),
            wanted=wanted,
            lines=self._lines(job.name),
        )

    def move(self, job: JobRecord) -> str:
        """See `Runs`."""
        self._write(job)  # the supervisor may not have read the file yet
        self._introduce_job(job)
        return self._ask(job, command="place", places=dict(job.places))

    def suspend(self, job: JobRecord) -> str:
        """See `Runs`."""
        return self._ask(job, command="suspend")

    def kill(self, job: JobRecord) -> None:
        """See `Runs`."""
        folder = self._of(job)
        if self._is_elsewhere(job) and not self._ask(job, command="interrupt"):
            return
        if not holder(folder / "lock"):
            # If the supervisor is still starting, it finds this file and ends.
            folder.mkdir(parents=True, exist_ok=True)
            told = {"code": 130, "reason": "interrupted.", "lost": False}
            put(ending_file(folder, job.attempt), json.dumps(told).encode())
        pid = holder(folder / "lock")
        if pid > 1 and not self._is_elsewhere(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _of(self, job: JobRecord) -> pathlib.Path:
        return self._folder / job.name

    def _alive(self, job: JobRecord) -> bool:
        child = self._children.get(job.name)
        if child is not None and child.poll() is not None:
            del self._children[job.name]
            child = None
        return child is not None or bool(holder(self._of(job) / "lock"))

    def _command(self, job: JobRecord, **words: Any) -> Mapping[str, Any]:
        """Sends a command to a job's supervisor, and returns the answer.

        Raises:
          OSError: the supervisor does not answer, or has not taken the job over yet.
        """
        if is_elsewhere(self._state(job), self._words):
            if job.name in self._children:
                raise ConnectionError("it waits for the hosts of the job")
            words["limit_s"] = _ELSEWHERE_S
        return command(self._of(job), **words)

    def _ask(self, job: JobRecord, **words: Any) -> str:
        try:
            return str(self._command(job, **words)["wrong"])
        except (OSError, ValueError) as error:
            return f"its process does not answer: {error}"

    def _write(self, job: JobRecord) -> None:
        spec = job.handed.spec
        script = pathlib.Path(job.handed.folder) / spec.script
        data = {
            "attempt": job.attempt,
            "words": [str(script), *spec.args],
            "cwd": job.handed.folder,
            "places": dict(job.places),
            "least": spec.min,
            "most": max(spec.max, job.given_devices, _MOST),
            "save_every": spec.save_every,
            "ahead": spec.ahead,
            "backend": self._words,
        }
        try:
            put(self._of(job) / "job.json", json.dumps(data).encode())
        except OSError as error:
            raise ScheduleError(
                f"job {job.name!r}: {error}; free the disk, and start the scheduler "
                "again."
            ) from error

    def _lines(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """Returns the complete lines of progress that were added since the last
        call.
        """
        begin = self._read.get(name, 0)
        try:
            with open(self._folder / name / "progress.jsonl", "rb") as file:
                file.seek(begin)
                text = file.read()
        except OSError:
            return ()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[name] = begin + len(whole)
        found: list[Mapping[str, Any]] = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                data = json.loads(line)
                if isinstance(data, dict) and data.get("kind") == "progress":
                    found.append(data)
        return tuple(found)


# The largest number of workers that a scheduler can give a job later.
_MOST = 4096
# Seconds between two checks whether the supervisor of a job accepts connections yet.
_PAUSE_S = 0.05
# Seconds that a supervisor on another host may take to answer: the host may be lost.
_ELSEWHERE_S = 3.0
