"""The supervisor of one job: a process that manages its workers without a scheduler.

Usage: python -m autopar.dispatch.supervising FOLDER
The file ``job.json`` in the folder describes the job. A `FileLock` keeps other
supervisors away from the folder. ``ending-ATTEMPT.json`` holds how the attempt ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from autopar.backends.ray import RayLauncher
from autopar.backends.slots import PlacedLauncher, Slots
from autopar.checkpoint.folders import put
from autopar.dispatch.backend import Ending
from autopar.elastic.processes.launching import (
    Launcher,
    LocalLauncher,
    python_command,
)
from autopar.elastic.processes.link import CHECKPOINT_VARIABLE, EVERY_VARIABLE
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.runner import RunJob, Runner
from autopar.errors import PlanError
from autopar.whole_files import FileLock

# Number of bytes at the end of an output that are searched for its last line.
_TAIL_BYTES = 4096
# The number of a worker before its lines, if there are several workers.
_NUMBER = re.compile(r"^\[\d+\] ")


def main(folder: pathlib.Path) -> None:
    """Runs the job of a folder to its end, and writes down how it ended."""
    lock = FileLock(folder / "lock")
    if not lock.take():
        return  # another supervisor runs the job
    given = json.loads((folder / "job.json").read_text())
    path = ending_file(folder, given["attempt"])
    if path.exists():
        return
    try:
        ending = _run(folder, given)
    except PlanError as error:
        ending = Ending(code=1, reason=str(error).split("\n", 1)[0])
    except Exception as error:  # reported as a failure, so that it is not retried
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        ending = Ending(code=1, reason=f"its own process failed: {why}; see `output`.")
    # The lock is freed before the end is reported, because a reader of the report may
    # start the job again.
    lock.free()
    told = {"code": ending.code, "reason": ending.reason, "lost": ending.lost}
    put(path, json.dumps(told).encode())


def ending_file(folder: pathlib.Path, attempt: int) -> pathlib.Path:
    """Returns the path of the file that holds how an attempt ended."""
    return folder / f"ending-{attempt}.json"


def _run(folder: pathlib.Path, given: Mapping[str, Any]) -> Ending:
    os.chdir(given["cwd"])
    os.environ[CHECKPOINT_VARIABLE] = str(folder / "checkpoints")
    os.environ[EVERY_VARIABLE] = str(given["save_every"])
    slots = Slots(given["places"], folder / "places.json")
    if not (folder / "run.json").exists():
        slots.forget()
    processes = sum(given["places"].values())
    job = RunJob(
        command=python_command(given["words"]),
        limits=MemberLimits(
            processes=processes,
            least=min(given["least"], processes),
            most=max(processes, given["most"]),
            prepares=given["ahead"],
        ),
        folder=folder,
    )
    runner = Runner(job, PlacedLauncher(_launcher(given, slots), slots))
    code, supervisor = runner.run(), runner.supervisor
    reason = supervisor.reason
    if code and reason:
        reason = f"{reason} {_last_line(folder / 'output')}".strip()
    return Ending(code=code, reason=reason, lost=supervisor.lost)


def _last_line(path: pathlib.Path) -> str:
    """Returns a sentence with the last line of a job's output and the file's name."""
    try:
        text = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    lines = [(x, _NUMBER.sub("", x)) for x in text.splitlines()]
    own = [x for x, said in lines if said.strip() and not said.startswith("autopar")]
    shown = "/".join(path.parts[-2:])
    return f"Last line of {shown}: {own[-1].strip()}" if own else ""


def _launcher(given: Mapping[str, Any], slots: Slots) -> Launcher:
    words, processes = given["words"], sum(given["places"].values())
    if given["backend"].get("name") == "ray":
        return RayLauncher(words, processes, given["backend"]["address"], slots)
    return LocalLauncher(python_command(words), names=processes > 1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
