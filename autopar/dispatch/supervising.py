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
from autopar.elastic.processes.members import GIVEN_UP, MemberLimits
from autopar.elastic.processes.network import (
    Network,
    open_listener,
    split_address,
)
from autopar.elastic.processes.records import read_state
from autopar.elastic.processes.runner import (
    RunEnded,
    RunJob,
    Runner,
    RunNotFound,
)
from autopar.errors import PlanError
from autopar.whole_files import FileLock

# The last line of an output is searched in this many bytes at its end.
_TAIL_BYTES = 4096
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


def ending_of(folder: pathlib.Path, attempt: int) -> Ending | None:
    """How an attempt ended; None if it has not ended."""
    try:
        return Ending(**json.loads(ending_file(folder, attempt).read_text()))
    except (OSError, ValueError):
        return None


def is_elsewhere(state: Mapping[str, Any], words: Mapping[str, str]) -> bool:
    """Whether a job's last supervisor ran on another host than its scheduler.

    Args:
      state: what the supervisor has written (`read_state`); empty if there is nothing.
      words: data that supervisors of the scheduler get (`Backend.words`); empty for a
        command without a scheduler, which then means the host of the command.
    """
    if not state or words.get("name", "hosts") != "hosts":
        return False
    host, _ = split_address(state["address"])
    if words:
        return host != words["host"]
    try:
        open_listener(host, 0).close()
    except OSError:
        return True
    return False


def settings_over_hosts(
    job: RunJob, folder: pathlib.Path, given: Mapping[str, Any]
) -> RunJob:
    """The settings of a job over hosts, whose last supervisor may be lost."""
    state, host = read_state(folder) or {}, given["backend"]["host"]
    # Each job has a secret of its own; the supervisor before this one may have made it,
    # and its workers know it.
    secret = state.get("secret") or new_secret()
    limits = job.limits
    grace_s = float(given["backend"]["grace"])
    fence_s = grace_s + limits.silent_s
    # The workers look for a supervisor at the same port of each host that a scheduler
    # may have.
    moved = is_elsewhere(state, given["backend"])
    last = ending_of(folder, given["attempt"] - 1)
    return dataclasses.replace(
        job,
        limits=dataclasses.replace(limits, fence_s=fence_s),
        grace_s=grace_s,
        network=Network(host, secret),
        port=split_address(state["address"])[1] if moved else 0,
        standby=moved,
        standby_s=fence_s,
        anew=last is not None and last.code == GIVEN_UP,
    )


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
        job = settings_over_hosts(job, folder, given)
        launcher: Launcher = HostLauncher(
            given["words"],
            limits.silent_s,
            places=given["places"],
            folder=given["cwd"],
        )
    else:
        launcher = PlacedLauncher(_launcher(given, slots), slots)
    try:
        runner = Runner(job, launcher)
    except RunEnded as ended:
        return Ending(code=ended.code, reason=str(ended) if ended.code else "")
    except RunNotFound:
        # Its workers have stopped since, and the scheduler says where it goes on.
        runner = Runner(dataclasses.replace(job, standby=False, anew=True), launcher)
    code, supervisor = runner.run(), runner.supervisor
    reason = supervisor.reason
    if code and reason:
        reason = f"{reason} {_last_line(folder / 'output')}".strip()
    return Ending(code=code, reason=reason, lost=supervisor.lost or code == GIVEN_UP)


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
