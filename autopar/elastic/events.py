"""Events: changes of the devices or links of a run, reported from outside.

An event names devices that leave or join, a whole cluster, or the measured rate of a
link. Sources (`autopar.elastic.sources`) make events. This module computes, from an
event and the present cluster, the cluster on which the run continues.

A scheduler may report the same change twice, report it too late, or withdraw it. None
of these mistakes may stop a run. So every event gets an outcome: one of `STATUSES`,
with a reason.

Sources put events into an `Inbox`, and the training loop takes changes from the inbox.
Each source runs in its own thread. The inbox determines the outcome of an event as soon
as the event arrives, from the cluster that results from all earlier events. So the
sender gets an answer at once.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from autopar.cluster import Cluster
from autopar.cluster import membership as members
from autopar.cluster.members import list_names, size_of
from autopar.cluster.specs import MOST_DEVICES, ClusterError, show
from autopar.errors import AutoparError, EventError
from autopar.runtime.recent import Recent
from autopar.units import bytes_text, count_text, seconds_text

# The kinds of events.
KINDS = ("gone", "added", "cluster", "link")

# Limits on an event, which is a short message: the characters of a text, the number of
# names, and the characters of a name.
_LONGEST, _MOST, _LONGEST_NAME = 10_000, 10_000, 256

# Largest allowed values of numbers in an event; a larger value counts as a mistake of
# the sender.
_LARGEST = {
    "bandwidth_bytes_per_s": 1e18,
    "latency_s": 3600.0,
    "deadline_s": 1e9,
    "time_s": 1e11,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change of the devices or links of a run.

    A ``gone`` event without hosts and devices means the process that received it, with
    all devices of that process.

    Attributes:
      kind: one of `KINDS`.
      hosts: names of the hosts that leave or join, or the numbers of the hosts in the
        whole cluster.
      devices: names of devices that leave or join, or ids of the devices in the whole
        cluster.
      cluster: the whole next cluster; set only in a ``cluster`` event.
      level: which links were measured, such as ``host`` for the links between hosts and
        ``between`` for the links between groups of devices. Set only in a ``link``
        event.
      bandwidth_bytes_per_s: the measured bandwidth; None: unchanged. Set only in a
        ``link`` event.
      latency_s: the measured latency in seconds; None: unchanged. Only of a ``link``
        event.
      deadline_s: seconds from ``time_s`` until the devices leave; None: the time is not
        known.
      source: name of the sender.
      id: identifier of the event; a second event with the same id is ignored as a
        repetition.
      time_s: when the event was sent, in seconds since the epoch.

    Raises:
      EventError: a field is wrong, missing, or belongs to another kind of event.
    """

    kind: str
    hosts: tuple[str | int, ...] = ()
    devices: tuple[str | int, ...] = ()
    cluster: Cluster | None = None
    level: str = ""
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    deadline_s: float | None = None
    source: str = "call"
    id: str = ""
    time_s: float = dataclasses.field(default_factory=time.time)

    def __post_init__(self) -> None:
        """Checks that the fields fit the kind of event."""
        if self.kind not in KINDS:
            raise EventError(
                f"kind={self.kind!r} is not known; write one of {', '.join(KINDS)}."
            )
        for name, kinds in _FIELDS.items():
            given = getattr(self, name) not in (None, (), "")
            if given and self.kind not in kinds:
                raise EventError(f"a {self.kind!r} event has no {name}.")
        if self.kind == "added" and not (self.hosts or self.devices):
            raise EventError("an 'added' event names hosts or devices.")
        if self.kind == "cluster" and self.cluster is None:
            raise EventError("a 'cluster' event needs cluster, such as '2x4:h100'.")
        if self.kind == "link":
            _check_link(self)
        if self.deadline_s is not None and self.deadline_s < 0:
            raise EventError(f"deadline_s={self.deadline_s} is negative.")

    @property
    def ends_s(self) -> float:
        """The deadline in seconds since the epoch; infinite without a deadline."""
        return math.inf if self.deadline_s is None else self.time_s + self.deadline_s

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Event:
        """Reads an event from dictionaries, lists, texts and numbers, as found in JSON.

        Args:
          data: an object with the fields of an event, or the text of a cluster.
          source: name of the sender, if the data does not name it.

        Raises:
          EventError: the data is not an event; the message names the field.

        >>> Event.from_data({"kind": "gone", "hosts": ["host1"]}).hosts
        ('host1',)
        >>> Event.from_data("6:cpu").kind
        'cluster'
        """
        fields: dict[str, Any] = {"source": source} if source else {}
        if isinstance(data, str):
            return cls(kind="cluster", cluster=_cluster(data), **fields)
        if not isinstance(data, Mapping):
            raise EventError(
                f"an event is an object with a kind, or the text of a cluster; got "
                f"{type(data).__name__}."
            )
        given = cast("Mapping[Any, Any]", data)
        for name, value in given.items():
            if name not in _READERS:
                raise EventError(
                    f"an event has no field {str(name)[:40]!r}; the fields are "
                    f"{', '.join(_READERS)}."
                )
            if value is not None:
                fields[name] = _READERS[name](name, value)
        fields.setdefault("kind", "cluster" if "cluster" in fields else "")
        return cls(**fields)

    def to_data(self) -> dict[str, Any]:
        """The data that `from_data` reads; fields without a value are left out."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept = {name: x for name, x in found.items() if x not in (None, (), "")}
        for name in ("hosts", "devices"):
            if name in kept:
                kept[name] = list(kept[name])
        if self.cluster is not None:
            kept["cluster"] = self.cluster.to_data()
        return kept

    def __str__(self) -> str:
        """A short description of the event."""
        if self.kind == "cluster":
            return f"cluster {self.cluster}"
        if self.kind == "link":
            return f"link {self.level}: {_rate(self)}"
        names = [str(name)[:80] for name in (*self.hosts, *self.devices)]
        return f"{self.kind} {list_names(names) or 'this process'}"


# The fields that only some kinds of events have.
_FIELDS = {
    "hosts": ("gone", "added"),
    "devices": ("gone", "added"),
    "cluster": ("cluster",),
    "level": ("link",),
    "bandwidth_bytes_per_s": ("link",),
    "latency_s": ("link",),
}


def _check_link(event: Event) -> None:
    if not event.level:
        raise EventError("a 'link' event needs level, such as 'host'.")
    rate, latency = event.bandwidth_bytes_per_s, event.latency_s
    if rate is None and latency is None:
        raise EventError("a 'link' event needs bandwidth_bytes_per_s or latency_s.")
    if rate is not None and rate < 1:
        raise EventError(f"bandwidth_bytes_per_s={rate} must be above 0, at least 1.")
    if latency is not None and latency < 0:
        raise EventError(f"latency_s={latency} is negative.")


def _rate(event: Event) -> str:
    rate, latency = event.bandwidth_bytes_per_s, event.latency_s
    parts: list[str] = []
    if rate is not None:
        inside = event.level == "device"
        text = f"{bytes_text(rate)}/s" if inside else f"{count_text(8 * rate)}b/s"
        parts.append(text)
    parts += [] if latency is None else [f"{seconds_text(latency)}"]
    return ", ".join(parts)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise EventError(
            f"{name} must be a text of at most {_LONGEST} letters, got {_short(value)}."
        )
    return value


def _number(name: str, value: Any) -> float:
    most = _LARGEST[name]
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not -most <= value <= most:
        raise EventError(
            f"{name} must be a number of at most {most:g}, got {_short(value)}."
        )
    return float(value)


def _short(value: Any) -> str:
    """A short text of a value, for an error message."""
    if isinstance(value, (int, float)):
        return show(value)[:40]
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def _names(name: str, value: Any) -> tuple[str | int, ...]:
    items = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
    for x in items[:_MOST]:
        number = isinstance(x, int) and not isinstance(x, bool)
        if number and 0 <= x < MOST_DEVICES:
            continue
        if not isinstance(x, str) or len(x) > _LONGEST_NAME:
            raise EventError(
                f"{name} must be a list of names, of at most {_LONGEST_NAME} letters, "
                f"or of numbers from 0 to {MOST_DEVICES - 1}; got {_short(x)}."
            )
    if len(items) > _MOST:
        raise EventError(f"{name}: at most {_MOST} names; got {len(items)}.")
    return tuple(items)


def _read_cluster(name: str, value: Any) -> Cluster:
    del name
    return _cluster(value)


def _cluster(value: Any) -> Cluster:
    """Reads a cluster from text or data; the sender of an event may not name a file."""
    try:
        if isinstance(value, Cluster):
            return value
        if isinstance(value, Mapping):
            return Cluster.from_data(cast("Mapping[str, Any]", value))
        text = _text("cluster", value)
        if text.strip().endswith(".toml"):
            raise EventError("cluster: send the text or the data, not a file's name.")
        return Cluster.parse(text)
    except EventError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise EventError(f"cluster: {error}") from error


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "kind": _text,
    "hosts": _names,
    "devices": _names,
    "cluster": _read_cluster,
    "level": _text,
    "bandwidth_bytes_per_s": _number,
    "latency_s": _number,
    "deadline_s": _number,
    "source": _text,
    "id": _text,
    "time_s": _number,
}


# accepted: the cluster changes; repeated: the cluster already is as the event says, or
# an event with this id came before; late: the devices have left already; refused: the
# event does not fit this cluster or this run.
STATUSES = ("accepted", "repeated", "late", "refused")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An event and its outcome.

    Attributes:
      event: the event.
      status: one of `STATUSES`.
      cluster: the next cluster, after this event and all earlier events; None: no
        device is left.
      reason: the reason in words; '' if there is none.
    """

    event: Event
    status: str
    cluster: Cluster | None
    reason: str = ""

    def __str__(self) -> str:
        """The outcome in one line, with the next cluster."""
        found = f"{self.status}: {self.cluster or 'no device is left'}"
        return f"{found} ({self.reason})" if self.reason else found

    def __repr__(self) -> str:
        """The same text as `__str__`, for a notebook."""
        return f"<{self}>"


def resolve_event(
    event: Event, cluster: Cluster | None, own: Sequence[int]
) -> Resolved:
    """Returns the outcome of an event, with the next cluster.

    Args:
      event: the event.
      cluster: the cluster after all earlier events; None: no device is left.
      own: ids of the devices of the process that received the event.
    """
    if cluster is None and event.kind != "cluster":
        return _answer(event, "late", None, "no device is left, and the run ends.")
    try:
        return _resolve(event, cluster, own)
    except (ClusterError, EventError) as error:
        return _answer(event, "refused", cluster, str(error))


def _resolve(event: Event, cluster: Cluster | None, own: Sequence[int]) -> Resolved:
    if event.kind == "cluster" or cluster is None:
        return _resolve_change(
            event, cluster, event.cluster, "this is the cluster already."
        )
    if event.kind == "link":
        found = cluster.with_link(
            event.level,
            bandwidth_bytes_per_s=event.bandwidth_bytes_per_s,
            latency_s=event.latency_s,
        )
        return _resolve_change(
            event, cluster, found, "this is the rate of the link already."
        )
    if event.kind == "gone":
        return _resolve_loss(event, cluster, own)
    return _resolve_join(event, cluster)


def _resolve_change(
    event: Event, old: Cluster | None, new: Cluster | None, same: str
) -> Resolved:
    if new == old:
        return _answer(event, "repeated", old, same)
    return _answer(event, "accepted", new)


def _resolve_loss(event: Event, cluster: Cluster, own: Sequence[int]) -> Resolved:
    there = ids_there(cluster)
    if not event.hosts and not event.devices:
        named = set(own)
    else:
        named = _ids(event.hosts, _hosts(cluster)) | _ids(event.devices, _all(cluster))
    gone = named & there
    if not gone:
        return _answer(event, "late", cluster, f"{_words(event)} gone already.")
    if gone == there:
        return _answer(event, "accepted", None, "no device is left.")
    reason = "some of them are gone already." if gone < named else ""
    left = cluster.without(devices=sorted(gone))
    return _answer(event, "accepted", left, reason)


def _resolve_join(event: Event, cluster: Cluster) -> Resolved:
    known, there = _hosts(cluster), ids_there(cluster)
    new = [h for h in event.hosts if isinstance(h, str) and h not in known]
    old = [h for h in event.hosts if h not in new]
    back = (_ids(old, known) | _ids(event.devices, _all(cluster))) - there
    if not back and not new:
        return _answer(event, "repeated", cluster, f"{_words(event)} there already.")
    found = cluster.with_devices(sorted(back)) if back else cluster
    return _answer(event, "accepted", found.with_hosts(new) if new else found)


def _answer(
    event: Event, status: str, cluster: Cluster | None, reason: str = ""
) -> Resolved:
    return Resolved(event=event, status=status, cluster=cluster, reason=reason)


def _words(event: Event) -> str:
    names = [str(name)[:80] for name in (*event.hosts, *event.devices)]
    if not names:
        return "this process is"
    return f"{list_names(names)} {'is' if len(names) == 1 else 'are'}"


def ids_there(cluster: Cluster) -> set[int]:
    """The ids of the cluster's present devices, including idle devices."""
    found: set[int] = set()
    for part in members.parts(cluster):
        of = members.members_of(part)
        found |= {of.start + p for p in (*of.positions, *of.idle)}
    return found


def _all(cluster: Cluster) -> dict[str | int, set[int]]:
    """Name or id in the whole cluster -> the ids of the devices that it stands for."""
    found: dict[str | int, set[int]] = {}
    for part in members.parts(cluster):
        of = members.members_of(part)
        for name, block in of.blocks().items():
            found[name] = {of.start + p for p in block}
            if len(block) == 1:
                found[of.start + block[0]] = found[name]
    return found


def _hosts(cluster: Cluster) -> dict[str | int, set[int]]:
    """Name or number of a host -> the ids of the host's devices."""
    known, found = _all(cluster), dict[str | int, set[int]]()
    for part in members.parts(cluster):
        of = members.members_of(part)
        for name in of.host_names:
            found[len(found) // 2] = found[name] = known[name]
    return found


def _ids(names: Iterable[str | int], known: Mapping[str | int, set[int]]) -> set[int]:
    """The ids of the devices that the names stand for.

    Raises:
      EventError: a name is unknown.
    """
    found: set[int] = set()
    for name in names:
        if name not in known:
            shown = ", ".join(str(x) for x in list(known)[:12])
            raise EventError(
                f"{str(name)[:80]!r} is not in the cluster; known are {shown}"
                f"{', ...' if len(known) > 12 else ''}."
            )
        found |= known[name]
    return found


# Number of event ids that an inbox remembers, and number of events that may wait in it.
# The limits bound the memory that a sender of many events can fill.
_IDS, _WAITING = 1024, 256


class Notes(Protocol):
    """A record of events that do not change the cluster."""

    def note(self, found: Resolved) -> None:
        """Records an event that changes nothing, with the reason."""
        ...

    def wrong(self, source: str, reason: str) -> None:
        """Records a message that is not an event."""
        ...


class Inbox:
    """Events that the training loop has not taken yet, and the cluster after them."""

    def __init__(
        self,
        cluster: Cluster,
        own: tuple[int, ...],
        check: Callable[[Cluster], None],
        notes: Notes,
        *,
        most: int = MOST_DEVICES,
    ) -> None:
        """Starts without events.

        Args:
          cluster: cluster on which the run trains.
          own: ids of the devices of this process.
          check: called with a next cluster; raises an `AutoparError` if this process
            does not have the devices for it.
          notes: record of events that change nothing.
          most: number of devices that this run can have; an event with more devices is
            refused.
        """
        self._most = most
        self._lock = threading.Lock()
        self._current: Cluster = cluster
        self._next: Cluster | None = cluster
        self._own, self._check, self._notes = own, check, notes
        self._waiting: list[Resolved] = []
        self._ids: Recent[str, bool] = Recent(_IDS)

    def put(self, event: Event) -> Resolved:
        """Stores an event, and returns its outcome; never raises."""
        with self._lock:
            found = self._resolve_event(event)
            if found.status == "accepted":
                self._waiting.append(found)
                self._next = found.cluster
        if found.status != "accepted":
            self._notes.note(found)
        return found

    def wrong(self, source: str, reason: str) -> None:
        """Records a message of a source that is not an event."""
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
        except Exception as error:  # no event may end the thread of a source
            reason = f"a bug in autopar: {type(error).__name__}: {error}"[:500]
            return _same(event, "refused", self._next, reason)

    def _resolve(self, event: Event) -> Resolved:
        found = resolve_event(event, self._next, self._own)
        if found.status == "accepted" and found.cluster is not None:
            try:
                self._check(found.cluster)
            except AutoparError as error:
                return _same(event, "refused", self._next, str(error))
        return found

    def take(self) -> tuple[Resolved, ...]:
        """Removes and returns the waiting events, oldest first.

        If the events cancel each other, so that the cluster stays the same, they are
        recorded and the result is empty.
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
        """Sets the cluster on which the run now trains.

        The outcomes of events that still wait are determined again, for this cluster.
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
    """The least number of devices of a cluster that contains the event's devices."""
    named = len(event.hosts) + len(event.devices)
    return named if event.cluster is None else _whole(event.cluster)


def _whole(cluster: Cluster) -> int:
    """The number of devices of the whole cluster, including devices that have left."""
    sizes = (
        part.num_devices if part.members is None else size_of(part.members.whole)
        for part in cluster.groups or (cluster,)
    )
    return sum(sizes)


def _same(event: Event, status: str, cluster: Cluster | None, reason: str) -> Resolved:
    return Resolved(event=event, status=status, cluster=cluster, reason=reason)
