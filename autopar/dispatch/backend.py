"""The interfaces by which a scheduler sees nodes and controls the processes of jobs."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from autopar.backends import ray as ray_backend
from autopar.dispatch.store import JobRecord
from autopar.elastic.processes.hosts import mismatch
from autopar.elastic.processes.members import Connection, Message
from autopar.scheduler.nodes import Nodes

# Seconds after the last message of an agent until its host counts as lost: if the
# connection has ended, and if it has not.
_AWAY_S, _SILENT_S = 5.0, 15.0
# Seconds that a new scheduler waits for the hosts of jobs that an earlier one started.
_RETURN_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a cluster.

    Attributes:
      name: name of the node, which never changes.
      devices: number of devices, which is also the largest number of workers on the
        node: each worker has one device.
      kind: kind of the node's devices; '' if it is not known.
    """

    name: str
    devices: int
    kind: str = "cpu"


class Backend(Protocol):
    """A cluster on whose nodes a scheduler runs jobs."""

    @property
    def words(self) -> Mapping[str, str]:
        """Plain data that a job's supervisor process needs to connect to the
        cluster.
        """
        ...

    def places(self) -> Sequence[ClusterNode]:
        """Returns the current nodes of the cluster."""
        ...

    def close(self) -> None:
        """Closes the connection to the cluster; jobs go on."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes of a job ended.

    Attributes:
      code: exit status: 0 if the script has finished, `SUSPENDED` if the job will
        continue later, and any other number for a failure.
      reason: why they ended, in words.
      lost: whether workers were lost without the script's fault, for example with a
        node.
    """

    code: int
    reason: str = ""
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a scheduler sees when it looks at the processes of a job.

    Attributes:
      alive: whether the process that supervises the job's workers is running.
      ending: how the processes ended; None if they have not ended.
      wanted: number of workers that the supervisor tries to run; None if it does not
        answer.
      lines: lines of progress that were added since the last look.
    """

    alive: bool
    ending: Ending | None = None
    wanted: int | None = None
    lines: tuple[Mapping[str, Any], ...] = ()


class Runs(Protocol):
    """Starts and controls the processes of jobs, which go on when the scheduler
    ends.
    """

    def start(self, job: JobRecord) -> None:
        """Starts the processes of a job on its nodes, or finds those that still run.

        If the job already runs with this attempt number, nothing changes.
        """
        ...

    def look(self, job: JobRecord) -> Look:
        """Returns the status of a job's processes."""
        ...

    def move(self, job: JobRecord) -> str:
        """Moves a job's workers to its new nodes; returns an error text, or ''."""
        ...

    def suspend(self, job: JobRecord) -> str:
        """Makes a job save its state and end; returns an error text, or ''."""
        ...

    def kill(self, job: JobRecord) -> None:
        """Ends the processes of a job at once."""
        ...


class LocalCluster:
    """A cluster that exists only on this machine; its nodes are made up."""

    def __init__(self, text: str) -> None:
        """Creates the nodes from a text.

        Args:
          text: number of nodes and devices, such as ``4x1`` or ``2x4:cpu``.

        Raises:
          ScheduleError: the text does not have this form.
        """
        nodes = Nodes.parse(text)
        found = zip(nodes.devices, nodes.kinds, strict=True)
        self._places = tuple(
            ClusterNode(f"node{k}", devices, kind or "cpu")
            for k, (devices, kind) in enumerate(found)
        )

    @property
    def words(self) -> Mapping[str, str]:
        """See `Backend`."""
        return {"name": "local"}

    def places(self) -> Sequence[ClusterNode]:
        """See `Backend`."""
        return self._places

    def close(self) -> None:
        """See `Backend`."""


class RayCluster:
    """A Ray cluster; each CPU of a node counts as one device."""

    def __init__(self, address: str = "") -> None:
        """Connects to the Ray cluster.

        Args:
          address: address of the cluster; '' for ``RAY_ADDRESS``, or else for the
            cluster of this machine.

        Raises:
          PlanError: Ray is not installed, or there is no cluster.
        """
        self._ray = ray_backend.connect(address)
        # The address that supervisors of jobs get. With '' they would look for an
        # address themselves, and might find another one.
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self._last: tuple[ClusterNode, ...] = ()

    @property
    def words(self) -> Mapping[str, str]:
        """See `Backend`."""
        return {"name": "ray", "address": self._address}

    def places(self) -> Sequence[ClusterNode]:
        """See `Backend`; if Ray's head node does not answer, returns the last known
        nodes.
        """
        try:
            draining = ray_backend.draining_nodes(self._ray)
            nodes, _ = ray_backend.nodes_here(self._ray, draining=draining)
        except self._ray.exceptions.RayError:
            return self._last
        self._last = tuple(ClusterNode(node.name, node.room) for node in nodes)
        return self._last

    def close(self) -> None:
        """See `Backend`."""
        self._ray.shutdown()


@dataclasses.dataclass(slots=True)
class _HostNode:
    """A host of a `HostCluster`.

    Attributes:
      node: the host as a node.
      agent: name of the host's agent.
      connection: connection to the agent; None: it has ended.
      heard_s: when the last message of the agent came.
      leaves: whether the host was asked to leave.
    """

    node: ClusterNode
    agent: str
    connection: Connection | None
    heard_s: float
    leaves: bool = False

    def is_there(self, now_s: float) -> bool:
        """Whether jobs can have devices of the host."""
        limit_s = _AWAY_S if self.connection is None else _SILENT_S
        return not self.leaves and now_s - self.heard_s < limit_s


class HostCluster:
    """Hosts whose agents (`autopar worker`) connect to the scheduler.

    Each slot of a host counts as one device.
    """

    def __init__(
        self,
        host: str,
        known: Collection[ClusterNode] = (),
        grace_s: float = 15.0,
    ) -> None:
        """Starts without connections.

        Args:
          host: address at which the supervisors of jobs listen.
          known: nodes of running jobs, whose agents will connect again.
          grace_s: seconds for which jobs train on without their supervisors. A job that
            has lost all of its hosts waits so long, and `MemberLimits.silent_s` more,
            before it goes on elsewhere.
        """
        self._host, self._grace_s, self._lock = host, grace_s, threading.Lock()
        until_s = time.monotonic() + _RETURN_S - _AWAY_S
        self._hosts = {node.name: _HostNode(node, "", None, until_s) for node in known}

    @property
    def words(self) -> Mapping[str, str]:
        """See `Backend`."""
        return {"name": "hosts", "host": self._host, "grace": f"{self._grace_s:g}"}

    def places(self) -> Sequence[ClusterNode]:
        """See `Backend`."""
        now_s = time.monotonic()
        with self._lock:
            return tuple(h.node for h in self._hosts.values() if h.is_there(now_s))

    def serve(self, first: Message, connection: Connection) -> None:
        """Serves the agent of a host until its connection ends.

        Args:
          first: the agent's first message, which describes its host.
          connection: connection to the agent.
        """
        if wrong := mismatch(first) or self._admit(first, connection):
            connection.send("refused", reason=wrong)
            connection.close()
            return
        host = self._hosts[first["name"]]
        connection.patience(_SILENT_S)
        connection.send("welcome", run="", silence=_SILENT_S)
        while (message := connection.receive()) is not None:
            connection.send("beat")
            host.heard_s = time.monotonic()
            host.leaves = host.leaves or message["kind"] == "leave"
        connection.close()
        if host.connection is connection:
            host.connection = None

    def _admit(self, first: Message, connection: Connection) -> str:
        """Takes a host in; returns why this is impossible, or ''."""
        name, agent, now_s = str(first["name"]), str(first["agent"]), time.monotonic()
        node = ClusterNode(name, first["slots"], str(first.get("device", "cpu")))
        with self._lock:
            known = self._hosts.get(name)
            if known and known.connection and known.agent != agent:
                return (
                    f"another agent of {name} is connected: end it, or give this one "
                    "another --address."
                )
            self._hosts[name] = _HostNode(node, agent, connection, now_s)
        return ""

    def introduce(self, job: JobRecord, supervisor: str, secret: str) -> None:
        """Tells the hosts of a job how they reach the job's supervisor.

        Args:
          job: the job.
          supervisor: ``HOST:PORT`` of the supervisor.
          secret: the secret of the job's run.
        """
        with self._lock:
            hosts = [self._hosts[name] for name in job.places if name in self._hosts]
        for host in hosts:
            if host.connection is not None:
                words = {"job": job.name, "supervisor": supervisor, "secret": secret}
                host.connection.send("serve", **words)

    def end_agents(self) -> None:
        """Ends the agents, after all jobs have ended."""
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            if host.connection is not None:
                host.connection.send("end", done=True)

    def close(self) -> None:
        """See `Backend`; the agents wait for the next scheduler."""
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            if host.connection is not None:
                host.connection.close()
