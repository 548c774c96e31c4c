"""Makes event sources from texts: ``file:cluster.json``, ``http:8765``, ``signal``."""

from __future__ import annotations

import functools
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any

from autopar.elastic.events import Event
from autopar.elastic.sources.file import File
from autopar.elastic.sources.http import Http
from autopar.elastic.sources.source import Sink, Source, Watched
from autopar.errors import PlanError

# Kubernetes' default number of seconds between SIGTERM and SIGKILL.
GRACE_S = 30.0


class Signals:
    """Turns SIGTERM into an event; `stop` restores the previous signal handler."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Does not handle the signal yet.

        Args:
          grace_s: seconds from SIGTERM until the process is killed.
        """
        self._grace_s = grace_s
        # A signal handler can run between any two instructions, even while the inbox is
        # locked. So the handler only puts a value into this queue, which is always
        # safe.
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


_KNOWN = "file:PATH, http:PORT, https:PORT, http:HOST:PORT, signal, signal:SECONDS"


def sources_of(given: Sequence[str | Source]) -> tuple[Source, ...]:
    """The sources that a list names.

    Args:
      given: texts that name sources, or sources.

    Raises:
      PlanError: a text names no source.
    """
    if isinstance(given, str):
        raise PlanError(f"events={given!r}: give a list, such as events=[{given!r}].")
    return tuple(source_of(x) if isinstance(x, str) else x for x in given)


def source_of(text: str) -> Source:
    """The source that a text names.

    Raises:
      PlanError: the text names no source.

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
