"""The supervisor process of a job: manages the workers, also while no scheduler runs.

Usage: python -m autopar.dispatch.supervising FOLDER
The file ``job.json`` in the folder describes the job. A `FileLock` allows only one
supervisor in the folder. The supervisor writes how an attempt ended to
``ending-ATTEMPT.json``.
"""

from __future__ import annotations

import dataclasses
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
from autopar.elastic.processes.certificates import new_secret
from autopar.elastic.processes.hosts import HostLauncher
from autopar.elastic.processes.launching import (
    Launcher,
    LocalLauncher,
    python_command,
)
from autopar.elastic.processes.link import CHECKPOINT_VARIABLE, EVERY_VARIABLE
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.network import Network
from autopar.elastic.processes.records import read_state
from autopar.elastic.processes.runner import RunJob, Runner
from autopar.errors import PlanError
from autopar.whole_files import FileLock

# The last line of an output is searched in this many bytes at its end.
_TAIL_BYTES = 4096
# Seconds for which workers on other hosts go on without their supervisor. A job that
# has lost all of its hosts waits so long, and `MemberLimits.silent_s` more, before it
# goes on elsewhere.
_GRACE_S = 15.0
# If there are several workers, each line of their output begins with the number of the
# worker in brackets.
_NUMBER = re.compile(r"^\[\d+\] ")


def main(folder: pathlib.Path) -> None:
    """Runs the job of a folder until it ends, and writes how it ended to a file."""
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
    except Exception as error:  # reported as a failure, so the job is not restarted
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        ending = Ending(code=1, reason=f"its own process failed: {why}; see `output`.")
    # The lock is released before the end is reported, because whoever reads the report
    # may start the job again.
    lock.free()
    told = {"code": ending.code, "reason": ending.reason, "lost": ending.lost}
    put(path, json.dumps(told).encode())


def ending_file(folder: pathlib.Path, attempt: int) -> pathlib.Path:
    """The path of the file that tells how an attempt ended."""
    return folder / f"ending-{attempt}.json"


def _run(folder: pathlib.Path, given: Mapping[str, Any]) -> Ending:
    os.chdir(given["cwd"])
    os.environ[CHECKPOINT_VARIABLE] = str(folder / "checkpoints")
    os.environ[EVERY_VARIABLE] = str(given["save_every"])
    slots = Slots(given["places"], folder / "places.json")
    if not (folder / "run.json").exists():
        slots.forget()
    processes = sum(given["places"].values())
    limits = MemberLimits(
        processes=processes,
        least=min(given["least"], processes),
        most=max(processes, given["most"]),
        prepares=given["ahead"],
    )
    job = RunJob(command=python_command(given["words"]), limits=limits, folder=folder)
    if given["backend"]["name"] == "hosts":
        # Each job has a secret of its own; the supervisor before this one may have made
        # it, and its workers know it.
        secret = (read_state(folder) or {}).get("secret") or new_secret()
        fence_s = _GRACE_S + limits.silent_s
        job = dataclasses.replace(
            job,
            limits=dataclasses.replace(limits, fence_s=fence_s),
            grace_s=_GRACE_S,
            network=Network(given["backend"]["host"], secret),
        )
        launcher: Launcher = HostLauncher(
            given["words"],
            limits.silent_s,
            places=given["places"],
            folder=given["cwd"],
        )
    else:
        launcher = PlacedLauncher(_launcher(given, slots), slots)
    runner = Runner(job, launcher)
    code, supervisor = runner.run(), runner.supervisor
    reason = supervisor.reason
    if code and reason:
        reason = f"{reason} {_last_line(folder / 'output')}".strip()
    return Ending(code=code, reason=reason, lost=supervisor.lost)


def _last_line(path: pathlib.Path) -> str:
    """A sentence with the last line of a job's output and the output file's name."""
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
    if given["backend"]["name"] == "ray":
        return RayLauncher(words, processes, given["backend"]["address"], slots)
    return LocalLauncher(python_command(words), names=processes > 1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
