"""Events: what a scheduler, a host or a program says about the devices of a run.

An event names devices that go or come, a whole cluster, or the measured rate of a
link. Sources (`autopar.elastic.sources`) make events; `autopar.elastic.resolve` turns
them into the next cluster.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from autopar.cluster import Cluster
from autopar.cluster.members import list_names
from autopar.cluster.specs import MOST_DEVICES, show
from autopar.errors import EventError
from autopar.units import seconds_text

# What an event may say.
KINDS = ("gone", "added", "cluster", "link")

# Longest text that a field may hold, and most names: an event is a short message.
_LONGEST, _MOST, _LONGEST_NAME = 10_000, 10_000, 256

# Largest numbers of a message; larger ones are mistakes.
_LARGEST = {
    "bandwidth_bytes_per_s": 1e18,
    "latency_s": 3600.0,
    "deadline_s": 1e9,
    "time_s": 1e11,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change of the devices or links of a run.

    A ``gone`` event that names nothing means the process that got it, with all its
    devices.

    Attributes:
      kind: one of `KINDS`.
      hosts: names of hosts that go or come, or their numbers in the whole cluster.
      devices: names of devices, or their ids in the whole cluster.
      cluster: of a ``cluster`` event, the whole next cluster.
      level: of a ``link`` event, the level of links that was measured, such as ``host``
        (``between``: the link between groups).
      bandwidth_bytes_per_s: of a ``link`` event, the measured rate; None: as it was.
      latency_s: of a ``link`` event, the measured latency; None: as it was.
      deadline_s: seconds from ``time_s`` until devices go; None: no limit is known.
      source: who says so.
      id: names the event; one that comes again with the same id is a repetition.
      time_s: seconds since the epoch when it was sent.

    Raises:
      EventError: a field is wrong, lacking, or of another kind of event.
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
        """Checks the fields against the kind."""
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
        """Seconds since the epoch at the deadline; infinite without one."""
        return math.inf if self.deadline_s is None else self.time_s + self.deadline_s

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Event:
        """Reads an event from dictionaries, lists, texts and numbers, as JSON has them.

        Args:
          data: an object with the fields of an event, or the text of a cluster.
          source: who says so, where the data does not.

        Raises:
          EventError: the data is no event; the message names the field.

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
        given = cast(Mapping[Any, Any], data)
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
        """What `from_data` reads back; fields that say nothing are left out."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept = {name: x for name, x in found.items() if x not in (None, (), "")}
        for name in ("hosts", "devices"):
            if name in kept:
                kept[name] = list(kept[name])
        if self.cluster is not None:
            kept["cluster"] = self.cluster.to_data()
        return kept

    def __str__(self) -> str:
        """The event in a few words."""
        if self.kind == "cluster":
            return f"cluster {self.cluster}"
        if self.kind == "link":
            return f"link {self.level}: {_rate(self)}"
        names = [str(name)[:80] for name in (*self.hosts, *self.devices)]
        return f"{self.kind} {list_names(names) or 'this process'}"


# The fields that only some kinds have.
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
    parts = [] if rate is None else [f"{rate / 1e9:.4g} GB/s"]
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
    """A value for an error: its beginning, or its type where that says enough."""
    if isinstance(value, (int, float)):
        return show(value)[:40]
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def _names(name: str, value: Any) -> tuple[str | int, ...]:
    items = cast(list[Any], value) if isinstance(value, (list, tuple)) else [value]
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
    """A cluster from its text or data; never from a file that a sender names."""
    try:
        if isinstance(value, Cluster):
            return value
        if isinstance(value, Mapping):
            return Cluster.from_data(cast(Mapping[str, Any], value))
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
