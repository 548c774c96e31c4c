"""Receives the events of a run of several processes, in the supervisor's process.

In the planned cluster, each process is a host: the process with rank k in the world
(the processes that train together) is host k. The outcome of an event is determined as
in a run of one process (`autopar.elastic.events`). It is then turned into a number of
processes, the processes that leave, and perhaps a cluster with changed links.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.cluster.specs import ClusterError
from autopar.elastic.events import Event, Inbox, Notes, Resolved, ids_there
from autopar.elastic.processes.links import LinkWatch, SentBytes
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.records import workers_command
from autopar.elastic.processes.sizing import cluster_of
from autopar.elastic.processes.speeds import CpuUse, SpeedWatch
from autopar.elastic.sources.http import Http
from autopar.elastic.sources.named import source_of
from autopar.elastic.sources.source import Source
from autopar.errors import EventError, PlanError

# A measured rate within this factor of a rate for which the run has planned before
# counts as that rate, so that the stored plan and programs are used. Links count as
# changed only from a factor of 1.5 on (`LinkWatch`).
_SAME_RATE = 1.25


@dataclasses.dataclass(frozen=True, slots=True)
class WantedAction:
    """What an event changes for the processes of a run.

    Attributes:
      processes: number of processes that the run should have from now on.
      gone: ranks of the processes that leave.
      cluster: the cluster to plan for from now on; None: links and devices do not
        change.
      expected: whether the cluster may soon change in this way, so that a plan is
        prepared for it; nothing else changes yet.
    """

    processes: int
    gone: tuple[int, ...]
    cluster: Cluster | None
    expected: bool = False


class Listening:
    """The event sources that a script names, and the cluster that events refer to."""

    def __init__(
        self,
        limits: MemberLimits,
        notes: Notes,
        follow: Callable[[WantedAction], None],
        folder: pathlib.Path,
    ) -> None:
        """Does not listen before the first world has formed.

        Args:
          limits: smallest and largest allowed number of processes.
          notes: record of events that change nothing.
          follow: called with the outcome of each event, from any thread, to carry it
            out.
          folder: folder of the run.
        """
        self._limits, self._notes, self._follow = limits, notes, follow
        self._folder = folder
        self._lock = threading.RLock()
        self._inbox: Inbox | None = None
        self._world: Cluster | None = None
        self._devices = 1
        self._sources: dict[str, Source] = {}
        self._links, self._speeds = LinkWatch(), SpeedWatch()
        # The last cluster of equal devices for which a world has planned, the workers
        # by rank, the speeds for which they are to plan, and the cluster with these.
        self._equal: Cluster | None = None
        self._workers: tuple[int, ...] = ()
        self._wanted_speeds: tuple[float, ...] = ()
        self._uneven: Cluster | None = None
        # The bandwidths of the links between hosts for which worlds have planned.
        self._rates: list[float] = []

    def on_world(self, said: Mapping[str, Any], hosts: Mapping[int, str]) -> None:
        """Records a world that has formed; starts the sources that its script names.

        Args:
          said: message of a process of the world, with ``cluster``, the planned cluster
            as data; ``devices``, the number of devices of each process; and ``events``,
            the texts that name sources.
          hosts: the workers of the world by rank -> addresses of their hosts.
        """
        world = Cluster.from_data(said["cluster"])
        self._links.begin(time.monotonic())
        self._watch_speeds(world, hosts)
        with self._lock:
            self._world, self._devices = world, said["devices"]
            if not world.groups and world.levels:
                self._rates.append(world.levels[0].link.bandwidth_bytes_per_s)
            if self._inbox is None:
                most = self._limits.most * self._devices
                self._inbox = Inbox(world, (), self._check, self._notes, most=most)
            else:
                self._inbox.take()
                self._inbox.settle(world)
        for text in said["events"]:
            if text not in self._sources:
                self._start(text)

    def _start(self, text: str) -> None:
        self._sources[text] = source = source_of(text)
        try:
            source.start(self)
        except PlanError as error:
            self.wrong(text, str(error))

    def addresses(self) -> list[dict[str, str]]:
        """The URLs to which events can be posted, with the tokens that they need."""
        https = [x for x in self._sources.values() if isinstance(x, Http)]
        return [{"url": x.url, "token": x.token} for x in https]

    def stop(self) -> None:
        """Stops listening."""
        for source in self._sources.values():
            source.stop()

    def heard(self, data: Any) -> None:
        """Handles an event that a script has sent, given as data."""
        try:
            self.put(Event.from_data(data))
        except EventError as error:
            self.wrong("script", str(error))

    def on_sent(self, worker: int, sent: SentBytes) -> None:
        """Records the bytes that a worker of the world has sent to other hosts.

        If a link has become slower or faster than the plan assumes, this method makes
        an event of it.
        """
        if self._speeds.deviates():
            return  # a host that waits for CPU time is slow to send, too
        factor = self._links.take(time.monotonic(), worker, sent)
        world, lasts = self._world, factor is not None
        factor = factor or self._links.expect()
        if factor is None or world is None or world.groups or not world.levels:
            return
        level = world.levels[0]
        found = level.link.bandwidth_bytes_per_s * factor
        known = min(self._rates, key=lambda x: max(x / found, found / x))
        same = 1 / _SAME_RATE <= known / found <= _SAME_RATE
        rate = known if same else float(f"{found:.2g}")
        if not lasts:
            # If the change lasts, it counts as a change to this rate.
            self._rates.append(rate)
            self._expect(world.with_link(level.name, bandwidth_bytes_per_s=rate))
            return
        self.put(
            Event(
                kind="link",
                level=level.name,
                bandwidth_bytes_per_s=rate,
                source="links",
            )
        )

    def _watch_speeds(self, world: Cluster, hosts: Mapping[int, str]) -> None:
        """Begins to compare the speeds of a world's workers with the planned ones."""
        planned: tuple[float, ...] = ()
        if not world.groups:
            self._equal = world
            # A world of other devices or without preparation plans for no speeds.
            if world.device.kind == "cpu" and self._limits.prepares:
                planned = (1.0,) * len(hosts)
        elif world == self._uneven and len(hosts) == len(self._wanted_speeds):
            planned = self._wanted_speeds
        self._workers, self._wanted_speeds = tuple(hosts), planned
        self._speeds.begin(time.monotonic(), hosts, planned)

    def on_computed(self, worker: int, use: CpuUse) -> Mapping[int, float]:
        """Records the CPU time of a worker of the world.

        If a host computes more slowly or faster than the plan assumes, this method
        makes an event of it: a cluster in which the devices of each host have its
        speed.

        Returns:
          Worker -> its speed as a fraction of the fastest worker's speed, if a speed
          has changed; otherwise empty.
        """
        speeds = self._speeds.take(time.monotonic(), worker, use)
        expected = None if speeds else self._speeds.expect()
        if expected and self._equal is not None:
            with contextlib.suppress(ClusterError):
                self._expect(self._equal.with_speeds(expected))
        if speeds is None or self._equal is None:
            return {}
        self._wanted_speeds = speeds
        try:
            self._uneven = self._equal.with_speeds(speeds)
            event = Event(kind="cluster", cluster=self._uneven, source="speeds")
            accepted = self.put(event).status == "accepted"
        except ClusterError as error:
            self.wrong("speeds", str(error))
            accepted = False
        if not accepted:
            self._speeds.assume(speeds)
        return dict(zip(self._workers, speeds, strict=True))

    def _expect(self, cluster: Cluster) -> None:
        """Has a plan prepared for a cluster to which the world's may soon change."""
        processes = cluster.num_devices // self._devices
        self._follow(WantedAction(processes, (), cluster, expected=True))

    def on_dropped(self) -> None:
        """Settles for the present cluster, because a changed one has no plan."""
        with self._lock:
            if self._inbox is not None and self._world is not None:
                self._inbox.take()
                self._inbox.settle(self._world)
        # The run plans again only for other speeds than these.
        self._speeds.assume(self._wanted_speeds)

    # The methods that sources of events call (`autopar.elastic.sources.source.Sink`).

    def put(self, event: Event) -> Resolved:
        """Handles an event, and returns its outcome."""
        with self._lock:
            if self._inbox is None or self._world is None:
                reason = "no world has formed yet; send it again."
                return Resolved(
                    event=event, status="refused", cluster=None, reason=reason
                )
            found = self._inbox.put(event)
            if found.status != "accepted":
                return found
            self._inbox.take()
            if found.cluster is None:
                self._inbox.settle(self._world)
                return self._none_left(found)
            wanted = self._wanted_from(self._world, found.cluster)
        self._follow(wanted)
        return found

    def wrong(self, source: str, reason: str) -> None:
        """Records a message that is not an event."""
        self._notes.wrong(source, reason)

    def _none_left(self, found: Resolved) -> Resolved:
        reason = (
            f"at least {self._limits.least} processes must stay (--min); "
            f"`{workers_command(self._folder)} --stop` ends the run."
        )
        refused = dataclasses.replace(
            found, status="refused", cluster=self._world, reason=reason
        )
        self._notes.note(refused)
        return refused

    def _check(self, cluster: Cluster) -> None:
        """Checks that a cluster contains each process with all of its devices.

        Raises:
          PlanError: the cluster has only some of the devices of a process.
        """
        devices, limits = self._devices, self._limits
        there = ids_there(cluster)
        processes, rest = divmod(len(there), devices)
        if rest or (cluster.members is not None and _parts(there, devices)):
            raise PlanError(
                f"a process has {devices} devices, which come and go together."
            )
        if not limits.least <= processes <= limits.most:
            raise PlanError(
                f"{processes} processes: expected {limits.least} to {limits.most} "
                "(--min, --max)."
            )

    def _wanted_from(self, world: Cluster, target: Cluster) -> WantedAction:
        """The changes that turn the world's cluster into the target cluster."""
        there = ids_there(target)
        count = len(ids_there(world)) // self._devices
        firsts = [k * self._devices for k in range(count)]
        gone = [k for k, first in enumerate(firsts) if first not in there]
        whole = target
        if not target.groups:  # a cluster of groups is always whole
            whole = dataclasses.replace(target, members=None)
        changed = True
        with contextlib.suppress(PlanError):
            changed = cluster_of(whole, count, self._devices) != world
        return WantedAction(
            processes=len(there) // self._devices,
            gone=tuple(gone) if target.members is not None else (),
            cluster=whole if changed else None,
        )


def _parts(there: set[int], devices: int) -> Sequence[int]:
    """The processes of which some devices are present and others are not."""
    counts = collections.Counter(i // devices for i in there)
    return [k for k, count in counts.items() if count != devices]
