"""SIGTERM as an event: this process, with its devices, goes."""

from __future__ import annotations

import functools
import queue
import signal
import threading
from typing import Any

from autopar.elastic.events import Event
from autopar.elastic.sources.source import Sink
from autopar.elastic.sources.watching import Watched
from autopar.errors import PlanError

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
