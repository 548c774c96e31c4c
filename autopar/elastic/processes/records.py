"""Writes a run's log and state into the run's folder, and sends commands to the run.

The folder holds a log, and the supervisor's state, from which a later supervisor can
take over the run. If the disk is full or read-only, the run goes on: the failure is
printed once, and log lines are kept in memory until they can be written. This module
does not import JAX, so that commands start fast.
"""

from __future__ import annotations

import errno
import json
import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from autopar.elastic.processes.members import Connection, Message
from autopar.elastic.processes.network import Network
from autopar.errors import PlanError
from autopar.units import number_of
from autopar.whole_files import FileLock, WaitingLines, write_whole

# Largest number of log lines to keep in memory while they cannot be written; the oldest
# are dropped first.
_WAITING = 10_000
# Seconds that a supervisor may take to answer a command.
_ANSWER_S = 10.0
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class _StateFields(msgspec.Struct):
    """The fields of a supervisor's state, with their types."""

    workers: dict[int, Any]
    world: list[int]
    generation: Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)]
    wanted: _Count
    numbers: _Count
    token: str
    run: str
    address: str = ""
    reached: Annotated[int, msgspec.Meta(ge=-1)] = -1
    secret: str = ""
    formed: bool = True


# The decoder is made when this module is imported, because msgspec crashes if two
# threads inspect a type at the same time.
_STATE = msgspec.json.Decoder(_StateFields)


def read_state(folder: pathlib.Path) -> Message | None:
    """Reads the state that a supervisor has written; None if there is none.

    Raises:
      PlanError: the file is damaged, or cannot be read.
    """
    path = folder / "run.json"
    try:
        data = path.read_bytes()
        _STATE.decode(data)
        return json.loads(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise PlanError(
            f"{path}: not the state of a run: {reason}. Remove it; what still runs of "
            "that run ends by itself after its --grace seconds."
        ) from error


def read_ending(folder: pathlib.Path) -> Mapping[str, Any] | None:
    """How the last run in a folder ended; None if it runs or its end is unknown.

    Returns:
      The number of steps done, the exit code and the reason.
    """
    if (folder / "run.json").exists():
        return None
    try:
        lines = (folder / "log.jsonl").read_text().splitlines()
        found = next(x for x in reversed(lines) if '"event": "end"' in x)
        ended = json.loads(found)
        return {
            "steps": int(ended["step"]),
            "code": int(ended["code"]),
            "reason": ended["reason"] or "the script has ended in all processes.",
        }
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def ending_text(ended: Mapping[str, Any]) -> str:
    """A sentence that tells how a run has ended."""
    steps = number_of(ended["steps"], "step")
    code, reason = ended["code"], ended["reason"]
    return f"the run has ended after {steps} with exit code {code}: {reason}"


def _lock(folder: pathlib.Path) -> FileLock:
    """Locks a folder until this process ends or releases the lock.

    Raises:
      PlanError: another process holds the lock, or the folder cannot be used.
    """
    lock, taken = FileLock(folder / "supervisor.lock"), True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = lock.take()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise PlanError(
                f"{folder} cannot be the folder of a run: {error.strerror}. Name "
                "another one with --folder."
            ) from error
        print(
            f"autopar run: the file system of {folder} has no locks: see to it that "
            "no other `autopar run` serves that folder.",
            file=sys.stderr,
            flush=True,
        )
    if not taken:
        raise PlanError(
            f"another `autopar run` serves {folder}: see `{workers_command(folder)}`, "
            "or name another folder with --folder."
        )
    return lock


class Records:
    """Writes the log and the state of a run."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Locks the folder for this supervisor; writes nothing yet.

        Args:
          folder: folder of the run.

        Raises:
          PlanError: another supervisor uses the folder, or it cannot be used.
        """
        self._folder, self._state = folder, folder / "run.json"
        self._lock = _lock(folder)
        self._log = WaitingLines(folder / "log.jsonl", _WAITING)
        self._kept: bytes | None = None
        self._failed = False

    def log(self, line: Mapping[str, Any]) -> None:
        """Adds a line to the log, after earlier lines that could not be written yet."""
        self._log.add(json.dumps(line).encode() + b"\n")
        self.flush()

    def state(self, data: Mapping[str, Any]) -> None:
        """Replaces the state in the folder."""
        self._kept = json.dumps(data).encode()
        self.flush()

    def flush(self) -> None:
        """Tries to write the lines in memory; if this fails, prints so once."""
        try:
            self._log.flush()
            if self._kept is not None:
                write_whole(self._state, self._kept)
                self._kept = None
        except OSError as error:
            if not self._failed:
                self._say(f"cannot be written: {error.strerror}. The run goes on")
            self._failed = True
            return
        if self._failed:
            self._say("can be written again")
        self._failed = False

    def close(self) -> None:
        """Releases the folder for other supervisors."""
        self._lock.free()

    def end(self) -> None:
        """Removes the state, because the run has ended."""
        self._kept = None
        self.flush()
        try:
            self._state.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"cannot be written: {error.strerror}. Remove {self._state.name}")
        self._lock.free()

    def _say(self, what: str) -> None:
        text = f"autopar run: {self._folder} {what}."
        print(text, file=sys.stderr, flush=True)


def workers_command(folder: pathlib.Path) -> str:
    """The command by which a user can show and change the processes of a run.

    >>> workers_command(pathlib.Path("runs/my model"))
    "autopar workers --folder 'runs/my model'"
    """
    return f"autopar workers --folder {shlex.quote(str(folder))}"


def command(
    folder: pathlib.Path, *, limit_s: float = _ANSWER_S, **words: Any
) -> Message:
    """Sends a command to a run's supervisor, and returns the answer.

    Args:
      folder: folder of the run.
      limit_s: longest time to wait for a connection, and then for the answer.
      **words: the command and its arguments.

    Raises:
      OSError: no supervisor runs, or it does not answer.
      PlanError: the state file of the run is damaged.
    """
    state = read_state(folder)
    if state is None:
        if (ended := read_ending(folder)) is not None:
            raise FileNotFoundError(ending_text(ended).rstrip("."))
        raise FileNotFoundError(
            "there is no run.json. Start one: autopar run --folder "
            f"{shlex.quote(str(folder))} SCRIPT.py"
        )
    network = Network(secret=state["secret"])
    connection = Connection(network.connect(state["address"], limit_s))
    connection.patience(limit_s)
    connection.send("command", token=state["token"], **words)
    answer = connection.receive()
    connection.close()
    if answer is None:
        raise ConnectionError("the supervisor did not answer")
    return answer
