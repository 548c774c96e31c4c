"""How processes recover from a broken world, and files of their shared memory.

``inplace``: a process leaves a broken world and joins the next one. ``respawn``: it
ends, is started again, and takes its state from shared memory. Nothing here imports
JAX: supervisors and agents use it.
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

# Where `autopar run` tells its workers how they recover.
RECOVERY_VARIABLE = "AUTOPAR_RECOVERY"
# Where a launcher tells its workers how names of their shared memory begin.
SHARED_VARIABLE = "AUTOPAR_SHARED"
# The exit status of a worker that is to be started again (not one of <sysexits.h>).
RESPAWNED = 79

# A file system in memory, which outlives processes and not the machine (Linux).
_SHARED = pathlib.Path("/dev/shm")
HOWS = ("auto", "inplace", "respawn")


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """How workers recover from a broken world.

    Attributes:
      how: ``inplace``, ``respawn``, or ``auto``: in place on CPUs, whose collectives
        can be left, and by a respawn on other platforms.
      every: under ``respawn``, after how many steps the state is written to shared
        memory while training goes on.

    Raises:
      InputError: there is no such way, or the number of steps is no positive one.
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
        """What this worker was told.

        Raises:
          InputError: the variable was set by something else.
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
          platform: JAX's name of it.

        >>> Recovery().respawns("cpu"), Recovery().respawns("gpu")
        (False, True)
        """
        return self.how == "respawn" or (self.how == "auto" and platform != "cpu")


def shared_prefix(run: str) -> str:
    """How the paths of a run's shared memory on this host begin.

    Args:
      run: name of the run; of an agent, with the address of its host.
    """
    return str(_SHARED / f"autopar-{run.replace('/', '_')}-")


def remove_shared(prefix: str, workers: Iterable[int] | None = None) -> None:
    """Removes shared memory; processes that have mapped it keep it.

    Args:
      prefix: see `shared_prefix`; '': there is none.
      workers: whose it is; None: everybody's.
    """
    if not prefix:
        return  # a launcher that has begun no run
    if workers is None:
        patterns = [f"{glob.escape(prefix)}*"]
    else:
        patterns = [f"{glob.escape(prefix)}{w}[-.]*" for w in workers]
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)


# What a process leaves for the one that takes its place.


def write_notes(prefix: str, worker: int, notes: Mapping[str, Any]) -> None:
    """Leaves plain data of a worker that ends to be started again; mode 600."""
    path = f"{prefix}{worker}.notes"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(f"{path}.new", flags, 0o600)
    with open(descriptor, "w") as file:
        json.dump(dict(notes), file)
    os.rename(f"{path}.new", path)


def take_notes(prefix: str, worker: int) -> dict[str, Any]:
    """Reads what a worker has left, and removes it; empty: nothing is there."""
    path = f"{prefix}{worker}.notes"
    try:
        with open(path) as file:
            found = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def have_notes(prefix: str, workers: Iterable[int]) -> bool:
    """Whether all of some workers have ended to be started again."""
    return all(os.path.exists(f"{prefix}{w}.notes") for w in workers)
