"""Decides whether a lost process or the user's script made processes fail."""

from __future__ import annotations

import math
from collections.abc import Callable

# A world is a set of processes that train together. If this many successive worlds
# break at the same step although no process died, the run ends with an error.
_BREAKS = 3
# Names of exception types that the loss of another process may have caused.
_OF_OTHERS = (
    "RuntimeError",
    "RunError",
    "Connection",
    "OSError",
    "TimeoutError",
    "WorldBroken",
)
# Parts of error texts from communication libraries. JAX raises their errors as
# exceptions of any type.
_TRANSPORTS = ("Gloo", "gloo", "NCCL")
# For this many seconds after a process was lost, any error of another process may be a
# consequence: it may have read only half of the expected data.
_AFTERMATH_S = 30.0
# If no process is found to be lost within this many seconds after an error, the user's
# script caused the error.
_OWN_S = 3.0


class Breaks:
    """Counts broken worlds, and tells errors of the script from effects of a loss."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts with no broken world.

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
        """Records that training got further than in all earlier worlds."""
        self._count = 0

    @property
    def aftermath(self) -> bool:
        """Whether a process was lost within the last `_AFTERMATH_S` seconds.

        Such a loss may cause errors in the other processes.
        """
        return self._clock() - self._lost_s < _AFTERMATH_S

    def of_others(self, error: str) -> bool:
        """Whether an error may have been caused by the loss of another process.

        Args:
          error: type and text of the error, with a colon between them.
        """
        kind = error.partition(":")[0]
        known = any(part in kind for part in _OF_OTHERS)
        return self.aftermath or known or any(x in error for x in _TRANSPORTS)

    def too_many(self, size: int) -> bool:
        """Counts an error in a broken world; returns whether there are too many.

        Args:
          size: number of processes of the world; `_BREAKS` errors per process are
            allowed.
        """
        self._count += 1
        return self._count > _BREAKS * max(1, size)

    def wait(self, worker: int) -> None:
        """Records that a worker with an error waits to learn the cause of the error."""
        self._due_s[worker] = self._clock() + _OWN_S

    def on_leave(self) -> None:
        """Records that processes leave the world, which may cause errors in them."""
        self._due_s.clear()

    def own(self) -> list[int]:
        """The workers whose own script caused their error; returns each worker once."""
        now = self._clock()
        found = [worker for worker, due_s in self._due_s.items() if due_s <= now]
        for worker in found:
            del self._due_s[worker]
        return found
