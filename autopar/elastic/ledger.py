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
  how long its pause was, and what starting processes again was of it;
* ``refused``: a change that could not be planned;
* ``event``: an event that changed nothing, and why;
* ``wrong``: a message that is no event;
* ``stop``: the end of a run whose devices are gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
