"""Starts and controls the processes of jobs, by files in a folder for each job.

Each job has a supervisor: a process that manages the job's workers, and that goes on
when the scheduler ends. The job's folder holds everything that a later scheduler needs
to find the supervisor again.
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
from autopar.dispatch.backend import Ending, Look
from autopar.dispatch.store import JobRecord
from autopar.dispatch.supervising import ending_file
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
        while child.poll() is None and self._introduce_job(job) != child.pid:
            time.sleep(_PAUSE_S)
        child.wait()

    def _introduce_job(self, job: JobRecord) -> int:
        """Introduces a job's supervisor to nodes; returns its process number, or 0."""
        with contextlib.suppress(PlanError):
            if (state := read_state(self._of(job))) is not None:
                if self._introduce is not None:
                    self._introduce(job, state["address"], state["secret"])
                return state["pid"]
        return 0

    def look(self, job: JobRecord) -> Look:
        """See `Runs`."""
        folder, wanted = self._of(job), None
        # The order matters: if the supervisor ends after this check, the reads below
        # see how it ended.
        alive = self._alive(job)
        if alive:
            self._introduce_job(job)  # agents of hosts may have come
            with contextlib.suppress(OSError, ValueError):
                wanted = command(folder, command="status")["status"]["wanted"]
        return Look(
            alive=alive,
            ending=_ending(ending_file(folder, job.attempt)),
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
        if not holder(folder / "lock"):
            # If the supervisor is still starting, it finds this file and ends.
            folder.mkdir(parents=True, exist_ok=True)
            told = {"code": 130, "reason": "interrupted.", "lost": False}
            put(ending_file(folder, job.attempt), json.dumps(told).encode())
        pid = holder(folder / "lock")
        if pid > 1:
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

    def _ask(self, job: JobRecord, **words: Any) -> str:
        try:
            return str(command(self._of(job), **words)["wrong"])
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


def _ending(path: pathlib.Path) -> Ending | None:
    try:
        return Ending(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
