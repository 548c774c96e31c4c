"""How processes continue after another one was lost, and their shared memory's names.

A world is a set of processes that train together. A world breaks if one of its
processes is lost.
  With ``inplace``, each other process leaves the broken world and joins the next one.
  With ``respawn``, each other process ends, is started again, and reads its training
  state from shared memory. This module does not import JAX, because supervisors and
  agents use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.errors import InputError

# The environment variable by which `autopar run` tells its workers how to recover.
RECOVERY_VARIABLE = "AUTOPAR_RECOVERY"
# The environment variable for the prefix of the names of the workers' shared memory.
# The launcher of the workers sets this variable.
SHARED_VARIABLE = "AUTOPAR_SHARED"
# With this exit status, a worker asks to be started again. It is not used in
# <sysexits.h>.
RESPAWNED = 79

# A file system in memory (Linux). Its files outlive processes, but not a restart of the
# machine.
_SHARED = pathlib.Path("/dev/shm")
HOWS = ("auto", "inplace", "respawn")


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """How workers recover from a broken world.

    Attributes:
      how: ``inplace``, ``respawn``, or ``auto``. ``auto`` is ``inplace`` on CPUs, where
        a process can stop waiting in a collective, and ``respawn`` on other platforms.
      every: with ``respawn``, a training process writes its state to shared memory
        after every this many steps.

    Raises:
      InputError: ``how`` is unknown, or ``every`` is less than 1.
    """

    how: str = "auto"
    every: int = 10

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.how not in HOWS:
            raise InputError(f"recovery {self.how!r}: expected one of {HOWS}.")
        if self.every < 1:
            raise InputError(f"recovery: every {self.every} steps: expected 1 or more.")

    def __str__(self) -> str:
        """The text for the environment variable `RECOVERY_VARIABLE`.

        >>> str(Recovery("respawn", 5))
        'respawn:5'
        """
        return f"{self.how}:{self.every}"

    @classmethod
    def of_environment(cls) -> Recovery:
        """Reads how this worker must recover, from `RECOVERY_VARIABLE`.

        Raises:
          InputError: `autopar run` did not set the variable.
        """
        text = os.environ.get(RECOVERY_VARIABLE)
        if not text:
            return cls()
        how, _, every = text.partition(":")
        try:
            return cls(how, int(every))
        except ValueError as error:
            raise InputError(
                f"{RECOVERY_VARIABLE}={text!r} was not set by `autopar run`: unset it."
            ) from error

    def respawns(self, platform: str) -> bool:
        """Whether processes on this device platform end when their world breaks.

        Args:
          platform: JAX's name of the platform.

        >>> Recovery().respawns("cpu"), Recovery().respawns("gpu")
        (False, True)
        """
        return self.how == "respawn" or (self.how == "auto" and platform != "cpu")


def shared_prefix(run: str) -> str:
    """The prefix of the paths of a run's shared memory on this host.

    Args:
      run: name of the run; an agent adds the address of its host.
    """
    return str(_SHARED / f"autopar-{run.replace('/', '_')}-")


def remove_shared(prefix: str, workers: Iterable[int] | None = None) -> None:
    """Removes files in shared memory; processes that have mapped them keep them.

    Args:
      prefix: see `shared_prefix`; '': there is no shared memory.
      workers: the workers whose memory is removed; None: all workers.
    """
    if not prefix:
        return  # the launcher has not begun a run
    if workers is None:
        patterns = [f"{glob.escape(prefix)}*"]
    else:
        patterns = [f"{glob.escape(prefix)}{w}[-.]*" for w in workers]
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)


# Notes: data that a process leaves for the process that replaces it.


def write_notes(prefix: str, worker: int, notes: Mapping[str, Any]) -> None:
    """Writes a worker's notes to a file that only this user can read."""
    path = f"{prefix}{worker}.notes"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(f"{path}.new", flags, 0o600)
    with open(descriptor, "w") as file:
        json.dump(dict(notes), file)
    os.rename(f"{path}.new", path)


def take_notes(prefix: str, worker: int) -> dict[str, Any]:
    """Reads and removes the notes of a worker; empty if there are none."""
    path = f"{prefix}{worker}.notes"
    try:
        with open(path) as file:
            found = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def have_notes(prefix: str, workers: Iterable[int]) -> bool:
    """Whether all these workers have left notes, so that they can be restarted."""
    return all(os.path.exists(f"{prefix}{w}.notes") for w in workers)
