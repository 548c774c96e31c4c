"""From an event and a cluster to the next cluster.

A scheduler says the same thing twice, or too late, or takes back what it said. None of
this may stop a run: every event is resolved to one of `STATUSES`, with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from autopar.cluster import Cluster
from autopar.cluster import membership as members
from autopar.cluster.errors import ClusterError
from autopar.cluster.members import list_names
from autopar.elastic.events import Event
from autopar.errors import EventError

# accepted: the cluster changes; repeated: it is as the event says already, or the id
# has come before; late: what goes is gone already; refused: it makes no sense here.
STATUSES = ("accepted", "repeated", "late", "refused")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An event and what came of it.

    Attributes:
      event: the event.
      status: one of `STATUSES`.
      cluster: the next cluster, after this event and all before it; None: no device is
        left.
      reason: in words; '' where there is nothing to say.
    """

    event: Event
    status: str
    cluster: Cluster | None
    reason: str = ""

    def __str__(self) -> str:
        """One line: what came of it, and the cluster that follows."""
        found = f"{self.status}: {self.cluster or 'no device is left'}"
        return f"{found} ({self.reason})" if self.reason else found

    def __repr__(self) -> str:
        """As `__str__`, for a notebook."""
        return f"<{self}>"


def resolve(event: Event, cluster: Cluster | None, own: Sequence[int]) -> Resolved:
    """Returns what an event makes of a cluster.

    Args:
      event: the event.
      cluster: the cluster as events before it have left it; None: no device.
      own: ids of the devices of the process that got the event.
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
    """The ids of the devices that are there, idle ones too."""
    found: set[int] = set()
    for part in members.parts(cluster):
        of = members.members_of(part)
        found |= {of.start + p for p in (*of.positions, *of.idle)}
    return found


def _all(cluster: Cluster) -> dict[str | int, set[int]]:
    """The ids that each name or id of the whole cluster stands for."""
    found: dict[str | int, set[int]] = {}
    for part in members.parts(cluster):
        of = members.members_of(part)
        for name, block in of.blocks().items():
            found[name] = {of.start + p for p in block}
            if len(block) == 1:
                found[of.start + block[0]] = found[name]
    return found


def _hosts(cluster: Cluster) -> dict[str | int, set[int]]:
    """The ids that each host stands for, by name and by number."""
    known, found = _all(cluster), dict[str | int, set[int]]()
    for part in members.parts(cluster):
        of = members.members_of(part)
        for name in of.host_names:
            found[len(found) // 2] = found[name] = known[name]
    return found


def _ids(names: Iterable[str | int], known: Mapping[str | int, set[int]]) -> set[int]:
    """The ids that names stand for.

    Raises:
      EventError: a name is not known.
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
