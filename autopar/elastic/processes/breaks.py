"""Decides whether a world broke by the loss of a process or by its own script."""

from __future__ import annotations

import math
from collections.abc import Callable

# Number of worlds in a row that may break at one step although no process died.
_BREAKS = 3
# Kinds of errors that the loss of another process may have caused.
_OF_OTHERS = (
    "RuntimeError",
    "RunError",
    "Connection",
    "OSError",
    "TimeoutError",
    "WorldBroken",
)
# Parts of error texts from transports, for which JAX raises any kind of error.
_TRANSPORTS = ("Gloo", "gloo", "NCCL")
# For this time after a loss, the loss may have caused any error: when another process
# ends between two calls, a process may read only half of the expected data.
_AFTERMATH_S = 30.0
# If no process is found to be gone for this time after an error, the error is the
# script's own.
_OWN_S = 3.0


class Breaks:
    """Counts broken worlds, and finds errors that a lost process explains."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Has seen no broken world yet.

        Args:
          clock: returns the time in seconds.
        """
        self._clock = clock
        self._lost_s = -math.inf
        self._count = 0
        self._due_s: dict[int, float] = {}

    def on_kill(self) -> None:
        """Records that a process of a world was killed."""
        self._lost_s = self._clock()

    def on_progress(self) -> None:
        """Records that a world has formed at a later step than all worlds before."""
        self._count = 0

    @property
    def aftermath(self) -> bool:
        """Whether a process was lost within the last `_AFTERMATH_S` seconds."""
        return self._clock() - self._lost_s < _AFTERMATH_S

    def of_others(self, error: str) -> bool:
        """Whether an error may have been caused by the loss of another process.

        Args:
          error: kind and text of the error, with a colon between them.
        """
        kind = error.partition(":")[0]
        known = any(part in kind for part in _OF_OTHERS)
        return self.aftermath or known or any(x in error for x in _TRANSPORTS)

    def too_many(self, size: int) -> bool:
        """Counts an error of a world; returns whether there were too many at one step.

        Args:
          size: number of processes of the world.
        """
        self._count += 1
        return self._count > _BREAKS * max(1, size)

    def wait(self, worker: int) -> None:
        """Records that a worker waits to learn whether a loss explains its error."""
        self._due_s[worker] = self._clock() + _OWN_S

    def on_leave(self) -> None:
        """Records that the world is left; this explains errors of its processes."""
        self._due_s.clear()

    def own(self) -> list[int]:
        """The workers whose error proved to be their own; each is returned once."""
        now = self._clock()
        found = [worker for worker, due_s in self._due_s.items() if due_s <= now]
        for worker in found:
            del self._due_s[worker]
        return found
