"""The ledger: one JSON object a line for every event and every re-plan of a run.

Kinds of lines:

* ``replan``: what led to a re-plan, what was compared, what the choice was predicted to
  gain and to cost, and how long its pause was;
* ``measured``: the seconds of a step before and after a re-plan, some steps later;
* ``batch``: a change of the batch, the plan or the codecs by their goodput: what was
  compared, and what the choice was predicted to be worth;
* ``batch measured``: what a step took and was worth before and after it;
* ``batch refused``: a way to go on that could not be planned;
* ``world``: a world of processes that formed in a run of `autopar run`: what led to it,
  and how long its pause was;
* ``refused``: a change that could not be planned;
* ``event``: an event that changed nothing, and why;
* ``wrong``: a message that is no event;
* ``stop``: the end of a run whose devices are gone.

A line of kind ``progress``, about one a second, says how many steps are done and
samples consumed, the median seconds from step to step since the line before, and the
loss, which is the first number that a step returns.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.elastic.events import Resolved
from autopar.errors import PlanError
from autopar.whole_files import WaitingLines

# Said of the log that `autopar run` keeps in its folder.
_OF_RUN = (
    " It is the log of `autopar run`; the ledger is the file that the script names by "
    "autopar.elastic(..., ledger=) or autopar.train(..., ledger=)."
)
# Lines that a run keeps in memory.
_KEPT = 1000


class Ledger:
    """Writes lines to a file, and keeps the latest in memory.

    A line that cannot be written, as on a full disk, does not stop the run: it is said
    once, ``failure`` says why, and lines that wait are written when there is room.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Writes nothing yet.

        Args:
          path: of the file, whose lines stay; None: in memory only.

        Raises:
          PlanError: the file cannot be written.
        """
        self.path = None if path is None else Path(path)
        self.lines: list[dict[str, Any]] = []
        self.failure = ""
        self._file = None if self.path is None else WaitingLines(self.path, _KEPT)
        self._lock = threading.Lock()
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.open("a").close()
            except OSError as error:
                raise PlanError(f"ledger={str(path)!r}: {error}.") from error

    def write(self, kind: str, **fields: Any) -> None:
        """Adds a line; sources call it from threads of their own.

        Args:
          kind: of the line.
          fields: what JSON can hold.
        """
        line = {"kind": kind, "time_s": time.time(), **fields}
        with self._lock:
            self.lines = [*self.lines[1 - _KEPT :], line]
            if self._file is None:
                return
            self._file.add(json.dumps(line, allow_nan=False).encode() + b"\n")
            try:
                self._file.flush()
            except OSError as error:
                if not self.failure:
                    print(f"autopar: {self.path}: {error}.", file=sys.stderr)
                self.failure = str(error)
            else:
                self.failure = ""

    def note(self, found: Resolved) -> None:
        """Adds an event that changes nothing."""
        self.write("event", event=event_data(found))

    def wrong(self, source: str, reason: str) -> None:
        """Adds a message that is no event."""
        self.write("wrong", source=source, reason=reason)


def event_data(found: Resolved) -> dict[str, Any]:
    """An event and what came of it, for a line."""
    event = found.event
    return {
        "what": str(event),
        "source": event.source,
        "id": event.id,
        "sent_s": event.time_s,
        "deadline_s": event.deadline_s,
        "status": found.status,
        "reason": found.reason,
    }


def read_ledger(path: str | os.PathLike[str]) -> list[Mapping[str, Any]]:
    """The lines of a ledger.

    A last line that was cut short, as by a kill, is left out.

    Raises:
      PlanError: there is no such file, or another line is none of a ledger.
    """
    try:
        texts = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{os.fspath(path)}: {error}.") from error
    found: list[Mapping[str, Any]] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            good = isinstance(line, dict) and isinstance(line.get("kind"), str)
        except (ValueError, RecursionError):
            line, good = {}, False
        if not good:
            of_run = isinstance(line, dict) and isinstance(line.get("event"), str)
            if number == len(texts) and not of_run:
                break
            hint = _OF_RUN if of_run else ""
            raise PlanError(
                f"{os.fspath(path)}: line {number} is none of a ledger.{hint}"
            )
        found.append(line)
    return found


_EVERY_S = 1.0


class Pace:
    """Writes lines of progress to a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes nothing yet.

        Args:
          ledger: where to.
          every_s: least seconds between two lines.
          clock: seconds now.
        """
        self._ledger, self._every_s, self._clock = ledger, every_s, clock
        self._told_s = -math.inf
        self._done_s: float | None = None
        self._seconds: list[float] = []
        self._devices = 0

    def take(
        self,
        step: int,
        position: int,
        batch: int,
        devices: int,
        result: Any,
        *,
        last: bool = False,
        lost: bool = False,
    ) -> None:
        """Takes a step that was done.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the step.
          devices: of the world that ran it.
          result: what it returned besides the state.
          last: whether no other step follows; such a step is always written.
          lost: whether the step is not finite and its state stays so; likewise.
        """
        now = self._clock()
        if devices != self._devices:
            # The time since the last step in another world is that of the change.
            self._devices, self._seconds, self._done_s = devices, [], None
        if self._done_s is not None:
            self._seconds.append(now - self._done_s)
        self._done_s = now
        if now - self._told_s < self._every_s and not (last or lost):
            return
        loss = loss_of(result)
        finite = loss is None or math.isfinite(loss)
        self._ledger.write(
            "progress",
            step=step,
            position=position,
            batch=batch,
            devices=devices,
            steps=len(self._seconds),
            step_s=statistics.median(self._seconds) if self._seconds else None,
            loss=loss if finite else None,
            finite=finite and not lost,
        )
        self._told_s, self._seconds = now, []


def loss_of(result: Any) -> float | None:
    """The first number in what a step returned; None: there is none.

    >>> loss_of({"accuracy": np.ones(3), "loss": np.float32(0.5)})
    0.5
    """
    for leaf in jax.tree.leaves(result):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        found = np.asarray(leaf)
        if found.ndim == 0 and found.dtype.kind in "fiu":
            return float(found)
        if found.ndim == 0 and jax.numpy.issubdtype(found.dtype, jax.numpy.floating):
            return float(found.astype(np.float32))
    return None
