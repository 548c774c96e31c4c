"""How processes recover from a broken world, and files of their shared memory.

``inplace``: a process leaves a broken world and joins the next world. ``respawn``: the
process ends, is started again, and reads its state from shared memory. Supervisors and
agents use this module, so it does not import JAX.
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

# The variable by which `autopar run` tells its workers how to recover.
RECOVERY_VARIABLE = "AUTOPAR_RECOVERY"
# The variable for the prefix of the workers' shared memory, set by a launcher.
SHARED_VARIABLE = "AUTOPAR_SHARED"
# The exit status of a worker that is to be started again (not one of <sysexits.h>).
RESPAWNED = 79

# A file system in memory. Its files outlive processes, but not a restart of the machine
# (Linux).
_SHARED = pathlib.Path("/dev/shm")
HOWS = ("auto", "inplace", "respawn")


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """How workers recover from a broken world.

    Attributes:
      how: ``inplace``, ``respawn``, or ``auto``. ``auto`` is ``inplace`` on CPUs, whose
        collectives can be left, and ``respawn`` on other platforms.
      every: under ``respawn``, number of steps between two writes of the state to
        shared memory during training.

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
        """The text for `RECOVERY_VARIABLE`.

        >>> str(Recovery("respawn", 5))
        'respawn:5'
        """
        return f"{self.how}:{self.every}"

    @classmethod
    def of_environment(cls) -> Recovery:
        """The recovery that this worker was given in `RECOVERY_VARIABLE`.

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
        """Whether processes of a platform end with their world.

        Args:
          platform: JAX's name of the platform.

        >>> Recovery().respawns("cpu"), Recovery().respawns("gpu")
        (False, True)
        """
        return self.how == "respawn" or (self.how == "auto" and platform != "cpu")


def shared_prefix(run: str) -> str:
    """The prefix of the paths of a run's shared memory on this host.

    Args:
      run: name of the run; for an agent, name of the run and address of the host.
    """
    return str(_SHARED / f"autopar-{run.replace('/', '_')}-")


def remove_shared(prefix: str, workers: Iterable[int] | None = None) -> None:
    """Removes shared memory; processes that have mapped it can still use it.

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


# The notes of a process for the process that replaces it.


def write_notes(prefix: str, worker: int, notes: Mapping[str, Any]) -> None:
    """Writes a worker's notes before it ends to be started again; mode 600."""
    path = f"{prefix}{worker}.notes"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(f"{path}.new", flags, 0o600)
    with open(descriptor, "w") as file:
        json.dump(dict(notes), file)
    os.rename(f"{path}.new", path)


def take_notes(prefix: str, worker: int) -> dict[str, Any]:
    """Reads and removes the notes of a worker; empty: there are no notes."""
    path = f"{prefix}{worker}.notes"
    try:
        with open(path) as file:
            found = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def have_notes(prefix: str, workers: Iterable[int]) -> bool:
    """Whether all these workers have ended to be started again."""
    return all(os.path.exists(f"{prefix}{w}.notes") for w in workers)
