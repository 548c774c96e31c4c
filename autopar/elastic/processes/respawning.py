"""A process that ends with its world, for one that takes its place.

While it trains it writes its state to shared memory now and then; as it ends, its last
steps. The process after it maps what is there, offers it, and joins the next world.
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

# How long a process that ends may take to write its state: a device that hangs may
# never hand it out.
_FLUSH_S = 30.0
# And how long the script may take to end behind it.
_UNWIND_S = 5.0


class Respawning:
    """Writes states to shared memory, and ends this process with its world.

    Attributes:
      is_on: whether this process ends with its world; known for good once the platform
        of its devices is.
      notes: plain data that the process before this one has left.
      start_s: seconds from the start of this process to here: Python, JAX, the script.
    """

    def __init__(self, worker: int) -> None:
        """Takes what the process before this one has left.

        Args:
          worker: number of this process's worker.

        Raises:
          PlanError: processes are to be started again by what cannot do so.
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
        """Is told the platform of the devices."""
        there = self._states is not None
        self.is_on = there and self._recovery.respawns(platform)

    def load(self, offers: Offers) -> None:
        """Offers the states that dead processes have left on this host."""
        begin = time.perf_counter()
        for held in [] if self._states is None else self._states.load():
            offers.put(held)
        self._map_s = time.perf_counter() - begin

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is written while training goes on."""
        return self.is_on and step % self._recovery.every == 0

    def write(self, content: Callable[[], Holding], spare: int) -> None:
        """Writes a state in the background.

        Args:
          content: returns it; steps must not consume it.
          spare: states that this process may have to write besides as it ends.
        """
        self.wait()
        states, writer = self._states, self._writer
        assert states is not None
        assert writer is not None
        self._write = writer.submit(lambda: states.write(content(), spare))

    def wait(self) -> None:
        """Waits until the last state is written.

        It is called before a step whose state is written, too. A process that is ahead
        then writes over no state that another one has as its last.

        Raises:
          PlanError: there is no room for it.
        """
        begin = time.perf_counter()
        write, self._write = self._write, None
        if write is not None:
            write.result()
        self._waited_s += time.perf_counter() - begin

    def seconds(self) -> dict[str, float | None]:
        """What a respawn has cost, as a world forms; empty where there is none.

        Returns:
          ``start_s``: Python, JAX and the script up to here; ``map_s``: to map what is
          in shared memory; ``write_s``: to write the state that the world begins with,
          as far as it was waited for; and of the process before this one,
          ``flush_s``: to write its last states, and ``keep_s``: that its steps waited
          for states to be written.
        """
        if not self.is_on:
            return {}
        write_s, self._waited_s = self._waited_s, 0.0
        before = {name: self.notes.get(name) for name in ("flush_s", "keep_s")}
        known = {"start_s": self.start_s, "map_s": self._map_s, "write_s": write_s}
        return {**known, **before}

    def note(self, **notes: Any) -> None:
        """Leaves plain data for the process after this one."""
        self._left |= notes

    def drop(self, generation: int) -> None:
        """Removes what dead processes have left of older worlds."""
        if self._states is not None:
            self._states.drop(generation)

    def remove(self) -> None:
        """Removes what all workers on this host have left: the run has ended."""
        if self._prefix:
            remove_shared(self._prefix)

    def end(self, holdings: Callable[[], Sequence[Holding]]) -> NoReturn:
        """Writes the last states, and ends this process, to be started again.

        Args:
          holdings: returns the states; reading them may hang.

        Raises:
          SystemExit: always; the script's own ``with`` and ``finally`` run.
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
        # Behind it JAX would wait for a backend that may hang.
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
