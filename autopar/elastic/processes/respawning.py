"""A process that ends with its world, and is replaced by a new process.

While the process trains, it regularly writes its state to shared memory. When it ends,
it writes the states of its last steps. The next process maps these states, offers them
to other processes, and joins the next world.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NoReturn

from autopar.elastic.processes.holding import Holding
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.offers import Offers
from autopar.elastic.processes.recovery import (
    RESPAWNED,
    SHARED_VARIABLE,
    Recovery,
    remove_shared,
    take_notes,
    write_notes,
)
from autopar.elastic.processes.shared import SharedStates
from autopar.errors import PlanError
from autopar.runtime.threads import Threads

# How long an ending process may take to write its state. A device that hangs may never
# return the state.
_FLUSH_S = 30.0
# How long the script may take to end after the state is written.
_UNWIND_S = 5.0


class Respawning:
    """Writes states to shared memory, and ends this process with its world.

    Attributes:
      is_on: whether this process ends with its world; final after `decide`.
      notes: plain data that the previous process has left.
      start_s: seconds from the start of this process to here, for Python, JAX and the
        script.
    """

    def __init__(self, worker: int) -> None:
        """Reads the notes that the previous process has left.

        Args:
          worker: number of this process's worker.

        Raises:
          PlanError: respawning is asked for, but the launcher of workers cannot do it.
        """
        self._recovery = Recovery.of_environment()
        self._worker, self._prefix = worker, os.environ.get(SHARED_VARIABLE, "")
        self.is_on = self._recovery.how == "respawn"
        if self.is_on and not self._prefix:
            raise PlanError(
                "--recovery respawn: these workers are started by what has no shared "
                "memory for them, such as Ray. Use --recovery inplace."
            )
        usable = self._prefix and self._recovery.how != "inplace"
        self._states = SharedStates(self._prefix, worker) if usable else None
        self.notes = take_notes(self._prefix, worker) if usable else {}
        self._left: dict[str, Any] = dict(self.notes)
        self._writer = Threads(1, "shared") if usable else None
        self._write: futures.Future[None] | None = None
        self._waited_s = self._map_s = 0.0
        self.start_s = _age_s()

    def decide(self, platform: str) -> None:
        """Decides by the device platform whether this process ends with its world."""
        there = self._states is not None
        self.is_on = there and self._recovery.respawns(platform)

    def load(self, offers: Offers) -> None:
        """Offers the states that dead processes have left on this host."""
        begin = time.perf_counter()
        for held in [] if self._states is None else self._states.load():
            offers.put(held)
        self._map_s = time.perf_counter() - begin

    def is_due(self, step: int) -> bool:
        """Whether the state after this many steps is written while training goes on."""
        return self.is_on and step % self._recovery.every == 0

    def write(self, content: Callable[[], Holding], spare: int) -> None:
        """Writes a state in the background.

        Args:
          content: returns the state; later steps must not consume (donate) it.
          spare: number of further states that this process may have to write when it
            ends.
        """
        self.wait()
        states, writer = self._states, self._writer
        assert states is not None
        assert writer is not None
        self._write = writer.submit(lambda: states.write(content(), spare))

    def wait(self) -> None:
        """Waits until the last state is written.

        This method is also called before each step whose state will be written.
        Otherwise a process that is ahead could overwrite the state that another process
        has as its last.

        Raises:
          PlanError: there is no room for the state.
        """
        begin = time.perf_counter()
        write, self._write = self._write, None
        if write is not None:
            write.result()
        self._waited_s += time.perf_counter() - begin

    def seconds(self) -> dict[str, float | None]:
        """The times of a respawn, read when a world forms; empty without respawning.

        Returns:
          ``start_s``: to start Python, JAX and the script; ``map_s``: to map the states
          in shared memory; ``write_s``: the wait for writing the state that the world
          begins with. Two times are those of the previous process. ``flush_s``: to
          write its last states; ``keep_s``: the wait of its steps for writing states.
        """
        if not self.is_on:
            return {}
        write_s, self._waited_s = self._waited_s, 0.0
        before = {name: self.notes.get(name) for name in ("flush_s", "keep_s")}
        known = {"start_s": self.start_s, "map_s": self._map_s, "write_s": write_s}
        return {**known, **before}

    def note(self, **notes: Any) -> None:
        """Leaves plain data for the next process."""
        self._left |= notes

    def drop(self, generation: int) -> None:
        """Removes the states that dead processes have left of older worlds."""
        if self._states is not None:
            self._states.drop(generation)

    def remove(self) -> None:
        """Removes all states of workers on this host, because the run has ended."""
        if self._prefix:
            remove_shared(self._prefix)

    def end(self, holdings: Callable[[], Sequence[Holding]]) -> NoReturn:
        """Writes the last states, and ends this process, to be started again.

        Args:
          holdings: returns the states; reading the states may hang.

        Raises:
          SystemExit: always, so that ``with`` and ``finally`` of the script run.
        """
        begin = time.perf_counter()
        states = self._states
        assert states is not None

        def flush() -> None:
            if self._write is not None:
                futures.wait([self._write], _FLUSH_S)
            states.flush(holdings())

        thread = threading.Thread(target=flush, daemon=True, name="flush")
        thread.start()
        thread.join(_FLUSH_S)
        flush_s = time.perf_counter() - begin
        known = {"flush_s": flush_s, "keep_s": self._waited_s}
        write_notes(self._prefix, self._worker, {**self._left, **known})
        # At exit JAX would wait for a backend that may hang, so the process exits
        # before.
        atexit.register(_exit_at_once)
        threading.Thread(target=_exit_late, daemon=True).start()
        sys.exit(RESPAWNED)


def _exit_at_once() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(RESPAWNED)


def _exit_late() -> NoReturn:
    time.sleep(_UNWIND_S)
    os._exit(RESPAWNED)


def _age_s() -> float:
    """Seconds since this process was started."""
    own = ProcessId.of(os.getpid())
    assert own is not None
    started_s = own.started / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
