"""Watches the other processes of a pipeline: one that hangs must not stop all others.

Each process counts in the store of the coordination service while it lives. A process
whose count stands still is lost, and so is the service where it does not answer. A
process that waits in a step asks for that meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from autopar_passes import jax_compat

T = TypeVar("T")

# A process is lost whose count stands still for so long.
SILENCE_S = 7.0
_BEAT_S, _POLL_S = 0.5, 0.1
# How long the end of the program waits for a thread to come back to Python.
_END_S = 5.0
_ROOT = "autopar/beats"


class ProgressWatch:
    """Counts in this process, and looks at the counts of the others."""

    def __init__(
        self, client: Any, index: int, count: int, silence_s: float = SILENCE_S
    ) -> None:
        """Begins to count, in a thread that ends with the program.

        Args:
          client: of the coordination service.
          index: number of this process.
          count: number of processes.
          silence_s: how long a count may stand still.
        """
        self._client = client
        self._index = index
        self._others = [k for k in range(count) if k != index]
        self._silence_s = silence_s
        self._counts: dict[int, str] = {}
        # When each count was seen to change last, and when this looked last.
        self._seen = dict.fromkeys(self._others, time.monotonic())
        self._looked = time.monotonic()
        # What processes have said that cannot go on.
        self.said: dict[int, str] = {}
        self._ended = threading.Event()
        beat = threading.Thread(target=self._beat, name="watch", daemon=True)
        self._threads = [beat]
        beat.start()
        # A thread that comes back to Python after its end would abort the process.
        atexit.register(self.close)

    def close(self) -> None:
        """Stops counting, and waits for the threads that were left to themselves."""
        atexit.unregister(self.close)
        self._ended.set()
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def leave(self, thread: threading.Thread) -> None:
        """Leaves a thread to itself that waits for a process which is lost."""
        self._threads.append(thread)

    def fail(self, text: str) -> None:
        """Tells the others that this process cannot go on."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_ROOT}/{self._index}/failed", text)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            found = jax_compat.coordination()
            if found is None or found.client is not self._client:
                return  # the world of these processes has been left
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_increment(f"{_ROOT}/{self._index}", 1)
                for process in self._others:
                    self._look(process)
                self._looked = time.monotonic()

    def _look(self, process: int) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # not there yet
            count = str(self._client.key_value_try_get(f"{_ROOT}/{process}"))
            if count != self._counts.get(process):
                self._counts[process] = count
                self._seen[process] = time.monotonic()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it goes on
            key = f"{_ROOT}/{process}/failed"
            self.said[process] = str(self._client.key_value_try_get(key))

    def lost_processes(self, since: float) -> tuple[int, ...]:
        """The processes that are silent; those that may be, where nothing answers.

        Args:
          since: when this process began to wait: silence counts from then on, as it
            may have been stopped itself before.
        """
        if self.said:
            return tuple(self.said)
        now = time.monotonic()
        if now - max(self._looked, since) > self._silence_s:
            return tuple(self._others)
        return tuple(
            process
            for process, seen in self._seen.items()
            if now - max(seen, since) > self._silence_s
        )


class LostError(Exception):
    """A process is silent while this one waits for it.

    Attributes:
      processes: their numbers.
      said: what they have said last; '': nothing.
    """

    def __init__(self, processes: tuple[int, ...], said: str = "") -> None:
        """Says which."""
        super().__init__(f"processes {', '.join(map(str, processes))} are silent")
        self.processes, self.said = processes, said


def wait_watched(watch: ProgressWatch | None, work: Callable[[], T]) -> T:
    """The result of what waits for other processes, in a thread that may be left.

    Args:
      watch: looks at the other processes; None: nobody does.
      work: waits; where a process is lost it is left to itself.

    Raises:
      LostError: a process is silent.
      Exception: what the work raises.
    """
    if watch is None:
        return work()
    done, found = threading.Event(), list[Any]()

    def run() -> None:
        try:
            found.append((True, work()))
        except BaseException as error:
            found.append((False, error))
        done.set()

    begin = time.monotonic()
    thread = threading.Thread(target=run, name="waits for others", daemon=True)
    thread.start()
    while not done.wait(_POLL_S):
        if lost := watch.lost_processes(begin):
            watch.leave(thread)
            raise LostError(lost, "; ".join(watch.said.values()))
    good, value = found[0]
    if not good:
        raise value
    return value
