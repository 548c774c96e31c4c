"""What a source of events is, and where it puts them."""

from __future__ import annotations

from typing import Protocol

from autopar.elastic.events import Event
from autopar.elastic.resolve import Resolved


class Sink(Protocol):
    """Takes events; may be called from any thread, and never raises."""

    def put(self, event: Event) -> Resolved:
        """Returns what comes of an event, which the source tells its sender."""
        ...

    def wrong(self, source: str, reason: str) -> None:
        """Takes note of a message that is no event.

        Args:
          source: where it came from.
          reason: what is wrong with it.
        """
        ...


class Source(Protocol):
    """Makes events of what it hears."""

    def start(self, sink: Sink) -> None:
        """Begins to listen, in a thread of its own.

        Raises:
          PlanError: it cannot listen.
        """
        ...

    def stop(self) -> None:
        """Stops listening; more than once does no harm."""
        ...
