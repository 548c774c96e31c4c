"""The interfaces by which a scheduler sees nodes and controls the processes of jobs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autopar.backends import ray as ray_backend
from autopar.dispatch.store import JobRecord
from autopar.scheduler.nodes import Nodes


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
            nodes, _ = ray_backend.nodes_here(self._ray)
        except self._ray.exceptions.RayError:
            return self._last
        self._last = tuple(ClusterNode(node.name, node.room) for node in nodes)
        return self._last

    def close(self) -> None:
        """See `Backend`."""
        self._ray.shutdown()
