"""Where sources put events, and the loop takes changes.

Sources run in threads of their own. An event is resolved when it comes, against the
cluster that the events before it lead to, so that its sender gets the answer at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from autopar.cluster import Cluster
from autopar.cluster.members import size_of
from autopar.cluster.specs import MOST_DEVICES
from autopar.elastic.events import Event
from autopar.elastic.resolve import Resolved, resolve
from autopar.errors import AutoparError
from autopar.runtime.recent import Recent

# Ids of events that are remembered, and events that may wait: a flood keeps its place.
_IDS, _WAITING = 1024, 256


class Notes(Protocol):
    """Where events that change nothing are written down."""

    def note(self, found: Resolved) -> None:
        """Writes an event down, and why it changes nothing."""
        ...

    def wrong(self, source: str, reason: str) -> None:
        """Writes a message down that is no event."""
        ...


class Inbox:
    """Events that wait for the loop, and the cluster that they lead to."""

    def __init__(
        self,
        cluster: Cluster,
        own: tuple[int, ...],
        check: Callable[[Cluster], None],
        notes: Notes,
        *,
        most: int = MOST_DEVICES,
    ) -> None:
        """Holds no event yet.

        Args:
          cluster: on which the run goes on.
          own: ids of this process's devices.
          check: raises an error of autopar where this world cannot be such a cluster.
          notes: where events that change nothing are written down.
          most: devices that this world can have; an event with more is not looked at.
        """
        self._most = most
        self._lock = threading.Lock()
        self._current: Cluster = cluster
        self._next: Cluster | None = cluster
        self._own, self._check, self._notes = own, check, notes
        self._waiting: list[Resolved] = []
        self._ids: Recent[str, bool] = Recent(_IDS)

    def put(self, event: Event) -> Resolved:
        """Takes an event, and returns what comes of it; never raises."""
        with self._lock:
            found = self._resolve_event(event)
            if found.status == "accepted":
                self._waiting.append(found)
                self._next = found.cluster
        if found.status != "accepted":
            self._notes.note(found)
        return found

    def wrong(self, source: str, reason: str) -> None:
        """Takes note of a message that is no event (`autopar.elastic.sources`)."""
        self._notes.wrong(source, reason)

    def _resolve_event(self, event: Event) -> Resolved:
        if event.id and self._ids.get(event.id):
            return _same(event, "repeated", self._next, "its id has come before.")
        if len(self._waiting) >= _WAITING:
            reason = f"{_WAITING} events wait already; send it again."
            return _same(event, "refused", self._next, reason)
        found = self._check_event(event)
        if event.id and found.status != "refused":
            self._ids.put(event.id, True)
        return found

    def _check_event(self, event: Event) -> Resolved:
        if (count := _devices(event)) > max(self._most, _whole(self._current)):
            reason = f"it has {count} devices, and this world at most {self._most}."
            return _same(event, "refused", self._next, reason)
        try:
            return self._resolve(event)
        except Exception as error:  # the threads of sources outlive any event
            reason = f"a bug in autopar: {type(error).__name__}: {error}"[:500]
            return _same(event, "refused", self._next, reason)

    def _resolve(self, event: Event) -> Resolved:
        found = resolve(event, self._next, self._own)
        if found.status == "accepted" and found.cluster is not None:
            try:
                self._check(found.cluster)
            except AutoparError as error:
                return _same(event, "refused", self._next, str(error))
        return found

    def take(self) -> tuple[Resolved, ...]:
        """Takes the events that came, oldest first; empty where nothing changes.

        Events that cancel each other are noted and not returned.
        """
        with self._lock:
            taken, self._waiting = tuple(self._waiting), []
            same = self._next == self._current
        if not taken or not same:
            return taken
        for found in taken:
            reason = "a later event takes it back before it was carried out."
            self._notes.note(_same(found.event, "repeated", self._current, reason))
        return ()

    def settle(self, cluster: Cluster) -> None:
        """Says on which cluster the run goes on.

        Events that came in the meantime are resolved anew against it.
        """
        with self._lock:
            self._current = self._next = cluster
            waiting, self._waiting = self._waiting, []
            again = [self._again(x.event) for x in waiting]
        for found in again:
            if found.status != "accepted":
                self._notes.note(found)

    def _again(self, event: Event) -> Resolved:
        found = self._check_event(event)
        if found.status == "accepted":
            self._waiting.append(found)
            self._next = found.cluster
        return found


def _devices(event: Event) -> int:
    """At least so many devices the cluster must have that an event speaks of."""
    named = len(event.hosts) + len(event.devices)
    return named if event.cluster is None else _whole(event.cluster)


def _whole(cluster: Cluster) -> int:
    """The devices of a cluster, those included that are not there."""
    sizes = (
        part.num_devices if part.members is None else size_of(part.members.whole)
        for part in cluster.groups or (cluster,)
    )
    return sum(sizes)


def _same(event: Event, status: str, cluster: Cluster | None, reason: str) -> Resolved:
    return Resolved(event=event, status=status, cluster=cluster, reason=reason)
