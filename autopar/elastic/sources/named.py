"""Sources by their text: ``file:cluster.json``, ``http:8765``, ``signal``."""

from __future__ import annotations

import collections
import functools
import os
import queue
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.elastic.events import Event
from autopar.elastic.sources.http import Http
from autopar.elastic.sources.source import (
    LARGEST_BYTES,
    Sink,
    Source,
    Watched,
    read_events,
)
from autopar.errors import EventError, PlanError

# What Kubernetes gives a process between SIGTERM and SIGKILL unless told otherwise.
GRACE_S = 30.0


class Signals:
    """Makes an event of SIGTERM; what handled it before does so again after `stop`."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Handles nothing yet.

        Args:
          grace_s: seconds from SIGTERM until the process is killed.
        """
        self._grace_s = grace_s
        # A handler runs between any two instructions, also while the inbox is locked.
        # It only puts into this queue, which may be done at any time.
        self._heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._watched: Watched | None = None
        self._before: Any = None

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        if threading.current_thread() is not threading.main_thread():
            raise PlanError(
                "events: Python takes signals in the main thread only; start the run "
                "there, or leave 'signal' out."
            )
        self._before = signal.signal(signal.SIGTERM, lambda *_: self._heard.put(True))
        gone = Event(kind="gone", deadline_s=self._grace_s, source="signal")

        def wait(watched: Watched) -> None:
            while self._heard.get():
                watched.call(lambda: sink.put(gone))

        report = functools.partial(sink.wrong, "signal")
        self._watched = Watched("autopar-signal", wait, report)

    def stop(self) -> None:
        """See `Source`."""
        if self._watched is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._heard.put(False)
        self._watched.end()
        self._watched = None


# What says that a file has changed: time, size and number of the inode; or why it
# cannot be looked at.
_Stamp = tuple[int, int, int] | str


class File:
    """Watches a file; each new content is a message.

    What the file holds at the start counts where it is a whole cluster; other events
    are of the past then. Write a new file and rename it over the old one: a file that
    is read half written is a message that is no event, and is noted.
    """

    def __init__(self, path: str | os.PathLike[str], every_s: float = 0.25) -> None:
        """Watches nothing yet.

        Args:
          path: of the file; it need not be there yet.
          every_s: seconds between two looks.
        """
        self.path = Path(path)
        self._every_s = every_s
        self._watched: Watched | None = None
        self._stamp: _Stamp | None = None
        self._waiting: collections.deque[Event] = collections.deque()

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        self._look(sink)
        while self._waiting:
            event = self._waiting.popleft()
            if event.kind == "cluster":
                sink.put(event)

        def watch(watched: Watched) -> None:
            while True:
                while self._waiting:
                    event = self._waiting.popleft()
                    watched.call(functools.partial(sink.put, event))
                if watched.ending.wait(self._every_s):
                    return
                self._look(sink)

        report = functools.partial(sink.wrong, f"file:{self.path}")
        self._watched = Watched("autopar-file", watch, report)

    def stop(self) -> None:
        """See `Source`."""
        if self._watched is not None:
            self._watched.end()
            self._watched = None

    def _look(self, sink: Sink) -> None:
        """Takes the events of a new content."""
        name, stamp = f"file:{self.path}", self._stamp
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                if isinstance(stamp, str):
                    raise EventError(stamp)
                with self.path.open("rb") as file:
                    self._waiting += read_events(file.read(LARGEST_BYTES + 1), name)
        except FileNotFoundError:
            return
        except (OSError, EventError) as error:
            sink.wrong(name, str(error))
        except Exception as error:  # the next content is looked at as ever
            sink.wrong(name, f"a bug in autopar: {type(error).__name__}: {error}"[:500])
        self._stamp = stamp

    def _stamp_now(self) -> _Stamp:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            return str(error)  # said once
        return found.st_mtime_ns, found.st_size, found.st_ino


_KNOWN = "file:PATH, http:PORT, https:PORT, http:HOST:PORT, signal, signal:SECONDS"


def sources_of(given: Sequence[str | Source]) -> tuple[Source, ...]:
    """The sources that are asked for.

    Args:
      given: texts, or sources themselves.

    Raises:
      PlanError: a text names no source.
    """
    if isinstance(given, str):
        raise PlanError(f"events={given!r}: give a list, such as events=[{given!r}].")
    return tuple(source_of(x) if isinstance(x, str) else x for x in given)


def source_of(text: str) -> Source:
    """The source that a text names.

    Raises:
      PlanError: it names none.

    >>> source_of("file:cluster.json").path.name
    'cluster.json'
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return File(rest)
    try:
        if kind in ("http", "https"):
            host, _, port = rest.rpartition(":")
            return Http(int(port), host or "127.0.0.1", tls=kind == "https")
        if kind == "signal":
            return Signals(float(rest) if rest else GRACE_S)
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
    raise PlanError(f"events: {text!r} names no source; known are {_KNOWN}.")
