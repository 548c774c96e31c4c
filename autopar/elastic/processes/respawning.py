"""Ends a process when its world breaks, and hands its state to a new process.

A world is a set of processes that train together. While a process trains, it regularly
writes its training state to shared memory. Before it ends, it writes the states of its
last steps. The process that replaces it maps these states into memory, serves them to
other processes, and joins the next world.
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

# Seconds that an ending process may take to write its state. The limit is needed
# because a device that hangs may never return the state.
_FLUSH_S = 30.0
# Seconds that the user's script may take to end after the state was written.
_UNWIND_S = 5.0


class Respawning:
    """Writes states to shared memory, and ends this process when its world breaks.

    Attributes:
      is_on: whether this process ends when its world breaks; `decide` sets it.
      notes: plain data that the process before this one left for it.
      start_s: seconds from the start of this process until this object was made: the
        start of Python, JAX and the script.
    """

    def __init__(self, worker: int) -> None:
        """Reads the notes that the process before this one left.

        Args:
          worker: number of this process's worker.

        Raises:
          PlanError: the run asks for respawning, but the launcher of its workers cannot
            restart them.
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
        """Decides by the device platform whether to end when the world breaks."""
        there = self._states is not None
        self.is_on = there and self._recovery.respawns(platform)

    def load(self, offers: Offers) -> None:
        """Serves the states that dead processes have left on this host."""
        begin = time.perf_counter()
        for held in [] if self._states is None else self._states.load():
            offers.put(held)
        self._map_s = time.perf_counter() - begin

    def is_due(self, step: int) -> bool:
        """Whether `write` must be called with the state after this many steps."""
        return self.is_on and step % self._recovery.every == 0

    def write(self, content: Callable[[], Holding], spare: int) -> None:
        """Writes a state in the background.

        Args:
          content: returns the state. Later steps must not donate its arrays.
          spare: number of further states that this process may have to write when it
            ends, for which room must remain.
        """
        self.wait()
        states, writer = self._states, self._writer
        assert states is not None
        assert writer is not None
        self._write = writer.submit(lambda: states.write(content(), spare))

    def wait(self) -> None:
        """Waits until the last state has been written.

        The training loop must also call this method before each step whose state will
        be written. Without it, a process that is ahead of others could overwrite the
        last state that all processes have.

        Raises:
          PlanError: there is no room for the state.
        """
        begin = time.perf_counter()
        write, self._write = self._write, None
        if write is not None:
            write.result()
        self._waited_s += time.perf_counter() - begin

    def seconds(self) -> dict[str, float | None]:
        """How long the steps of a respawn took; empty without respawning.

        Returns:
          Seconds. ``start_s``: to start Python, JAX and the script; ``map_s``: to map
            the states in shared memory; ``write_s``: to wait until the world's first
            state was written. Two are about the process before this one: ``flush_s``:
            to write its last states; ``keep_s``: how long its steps waited for states
            to be written.
        """
        if not self.is_on:
            return {}
        write_s, self._waited_s = self._waited_s, 0.0
        before = {name: self.notes.get(name) for name in ("flush_s", "keep_s")}
        known = {"start_s": self.start_s, "map_s": self._map_s, "write_s": write_s}
        return {**known, **before}

    def note(self, **notes: Any) -> None:
        """Stores plain data in a file for the process that replaces this one."""
        self._left |= notes

    def drop(self, generation: int) -> None:
        """Removes states that dead processes left from worlds before this one."""
        if self._states is not None:
            self._states.drop(generation)

    def remove(self) -> None:
        """Removes the states of all workers on this host, because the run has ended."""
        if self._prefix:
            remove_shared(self._prefix)

    def end(self, holdings: Callable[[], Sequence[Holding]]) -> NoReturn:
        """Writes the last states and ends this process, so that it is started again.

        Args:
          holdings: returns the states; the call may hang with a device.

        Raises:
          SystemExit: always, so that ``with`` and ``finally`` blocks of the script run.
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
        # At Python's exit, JAX waits for a backend that may hang. So this handler ends
        # the process first.
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
    """Seconds since this process started."""
    own = ProcessId.of(os.getpid())
    assert own is not None
    started_s = own.started / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
