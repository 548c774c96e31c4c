"""The ledger: one line of JSON for each event and each re-plan of a run.

Kinds of lines:

* ``replan``: a re-plan: its cause, the plans that were compared, the predicted gain and
  cost of the chosen plan, and how long training paused;
* ``measured``: the measured seconds of a step before a re-plan, and those after it once
  some steps have run;
* ``batch``: a change of the batch size, the plan or the codecs to raise the goodput:
  the choices that were compared, and the predicted goodput of the new choice;
* ``batch measured``: the seconds of a step and the progress that it makes, before and
  after a change of kind ``batch``;
* ``batch refused``: a choice of batch size or codecs that could not be planned;
* ``world``: a new set of processes that train together (a world), in a run of `autopar
  run`: why it formed, how long training paused, and how much of the pause the restart
  of processes took;
* ``refused``: a change of the cluster for which no plan could be made;
* ``event``: an event that did not change the cluster, and the reason;
* ``wrong``: a message from a source that is not a valid event;
* ``stop``: the run ended because no devices are left.
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

# A hint for users who open the log of `autopar run` as if it were a ledger.
_OF_RUN = (
    " It is the log of `autopar run`; the ledger is the file that the script names by "
    "autopar.elastic(..., ledger=) or autopar.train(..., ledger=)."
)
# Number of lines that a run keeps in memory.
_KEPT = 1000


class Ledger:
    """Writes lines to a file, and keeps the latest lines in memory.

    If a line cannot be written, for example on a full disk, the run goes on. A message
    is printed once, and ``failure`` holds the reason. Later calls write these lines
    once there is room.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Opens no file yet.

        Args:
          path: path of the file, to which lines are added; None: lines are kept only in
            memory.

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
        """Adds a line; may be called from any thread.

        Args:
          kind: kind of the line.
          fields: further fields, which JSON must be able to hold.
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
        """Adds a line for an event that does not change the cluster."""
        self.write("event", event=event_data(found))

    def wrong(self, source: str, reason: str) -> None:
        """Adds a line for a message that is not an event."""
        self.write("wrong", source=source, reason=reason)


def event_data(found: Resolved) -> dict[str, Any]:
    """An event and its outcome, as fields of a line."""
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
    """Reads the lines of a ledger.

    The last line is ignored if it is incomplete, for example because the writer was
    killed.

    Raises:
      PlanError: the file cannot be read, or a line before the last is not a line of a
        ledger.
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
