"""What broke a world: the loss of a process, or what its own script does."""

from __future__ import annotations

import math
from collections.abc import Callable

# Worlds in a row that may break at one step though nobody died.
_BREAKS = 3
# Errors that the loss of another process may have caused.
_OF_OTHERS = (
    "RuntimeError",
    "RunError",
    "Connection",
    "OSError",
    "TimeoutError",
    "WorldBroken",
)
# Of these JAX raises errors of any kind, such as ValueError.
_TRANSPORTS = ("Gloo", "gloo", "NCCL")
# For so long after a loss, any error may come from it: a process that meets the end of
# another one between two calls may read half of what it expects.
_AFTERMATH_S = 30.0
# So long after an error, no process is found to be gone: it was the script's own.
_OWN_S = 3.0


class Breaks:
    """Counts the worlds that break, and says what is blamed on the loss of others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing has broken yet.

        Args:
          clock: seconds now.
        """
        self._clock = clock
        self._lost_s = -math.inf
        self._count = 0
        self._due_s: dict[int, float] = {}

    def on_kill(self) -> None:
        """A process of a world was killed."""
        self._lost_s = self._clock()

    def on_progress(self) -> None:
        """A world has formed with a later step than those before."""
        self._count = 0

    @property
    def aftermath(self) -> bool:
        """Whether a process was lost a short while ago."""
        return self._clock() - self._lost_s < _AFTERMATH_S

    def of_others(self, error: str) -> bool:
        """Whether an error may have been caused by the loss of another process.

        Args:
          error: its kind and its text, with a colon between them.
        """
        kind = error.partition(":")[0]
        known = any(part in kind for part in _OF_OTHERS)
        return self.aftermath or known or any(x in error for x in _TRANSPORTS)

    def too_many(self, size: int) -> bool:
        """Counts an error of a world; whether there were too many at one step.

        Args:
          size: number of processes of the world.
        """
        self._count += 1
        return self._count > _BREAKS * max(1, size)

    def wait(self, worker: int) -> None:
        """A worker waits to hear whether the loss of another one explains its error."""
        self._due_s[worker] = self._clock() + _OWN_S

    def on_leave(self) -> None:
        """The world is left: that explains the errors of its processes."""
        self._due_s.clear()

    def own(self) -> list[int]:
        """The workers whose error is their own by now; each is named once."""
        now = self._clock()
        found = [worker for worker, due_s in self._due_s.items() if due_s <= now]
        for worker in found:
            del self._due_s[worker]
        return found
