"""The interfaces of a source of events and of its receiver."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from autopar.elastic.events import Event, Resolved
from autopar.errors import EventError


class Sink(Protocol):
    """Receives events; any thread may call its methods, which never raise."""

    def put(self, event: Event) -> Resolved:
        """Takes an event; returns its outcome, which the source tells the sender."""
        ...

    def wrong(self, source: str, reason: str) -> None:
        """Records a message that is not an event.

        Args:
          source: origin of the message.
          reason: why the message is not an event.
        """
        ...


class Source(Protocol):
    """Receives messages from outside, and turns them into events."""

    def start(self, sink: Sink) -> None:
        """Begins to listen in its own thread.

        Raises:
          PlanError: the source cannot listen.
        """
        ...

    def stop(self) -> None:
        """Stops listening; further calls do nothing."""
        ...


# Largest number of bytes of a message, and largest number of events in a message.
LARGEST_BYTES, MOST_EVENTS = 1 << 20, 100


def read_events(data: bytes, source: str) -> list[Event]:
    """The events of a message: one event, a list of events, or the text of a cluster.

    Args:
      data: JSON in UTF-8, or a cluster's text, such as ``6:cpu``.
      source: name of the sender.

    Raises:
      EventError: the message is none of these.

    >>> [event.kind for event in read_events(b'["4:cpu", {"cluster": "2:cpu"}]', "")]
    ['cluster', 'cluster']
    """
    if len(data) > LARGEST_BYTES:
        raise EventError(f"a message has at most {LARGEST_BYTES} bytes: {len(data)}.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise EventError(f"a message is text in UTF-8: {error}.") from error
    found = _parse(text)
    items = cast("list[Any]", found) if isinstance(found, list) else [found]
    if len(items) > MOST_EVENTS:
        raise EventError(f"a message has at most {MOST_EVENTS} events: {len(items)}.")
    return [Event.from_data(item, source) for item in items]


def _parse(text: str) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse)
        # JSON can contain an escaped half of a surrogate pair, which is not valid text.
        # Encoding raises an error for it.
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise EventError(f"a text of the message is not UTF-8: {error}.") from error
    except RecursionError as error:
        raise EventError("the JSON is nested too deeply.") from error
    except ValueError as error:
        bare = text.strip()
        if bare and bare[0] not in '{["' and "\n" not in bare:
            return bare  # a cluster's text, without quotes
        raise EventError(f"not JSON: {str(error).rstrip('.')}.") from error


def _refuse(name: str) -> Any:
    raise EventError(f"{name} is no number of JSON.")


# Shortest and longest pause in seconds before failed work starts again in its thread.
_FIRST_S, _LONGEST_S = 0.05, 10.0


class Watched:
    """Runs work in a thread; after any error, reports it and starts the work again.

    Attributes:
      ending: an event that is set when the work must return.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Watched], None],
        report: Callable[[str], None],
    ) -> None:
        """Starts the thread.

        Args:
          name: name of the thread.
          work: function that runs in the thread, and returns once ``ending`` is set.
          report: called with a text about each error.
        """
        self.ending = threading.Event()
        self._work, self._report = work, report
        self._called: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function; if it raises an error, reports it and calls it again.

        Args:
          function: a function that may run twice without harm.
        """
        self._called = function
        function()
        self._called = None

    def end(self) -> None:
        """Waits until the work has returned."""
        self.ending.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _FIRST_S
        while not self.ending.is_set():
            try:
                called, self._called = self._called, None
                if called is not None:
                    called()
                self._work(self)
            except BaseException as error:  # SystemExit must not end the thread either
                with contextlib.suppress(BaseException):
                    text = f"its thread ended by {type(error).__name__}: {error}"[:500]
                    self._report(f"{text}; it begins again.")
                    self.ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
