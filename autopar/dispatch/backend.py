"""Interfaces between a scheduler and a cluster: nodes, and processes of jobs."""

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
      devices: the largest number of workers on the node; each worker has one device.
      kind: kind of the node's devices.
    """

    name: str
    devices: int
    kind: str = "cpu"


class Backend(Protocol):
    """A cluster whose nodes run jobs."""

    @property
    def words(self) -> Mapping[str, str]:
        """Plain data with which the supervisor of a job connects to the cluster."""
        ...

    def places(self) -> Sequence[ClusterNode]:
        """Returns the current nodes of the cluster."""
        ...

    def close(self) -> None:
        """Closes the connection; jobs continue."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes of a job ended.

    Attributes:
      code: exit status: 0 if the script has ended, `SUSPENDED` if the job is to
        continue later, any other number for a failure.
      reason: the reason in words.
      lost: whether workers were lost for a reason outside the script.
    """

    code: int
    reason: str = ""
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The observed status of a job's processes.

    Attributes:
      alive: whether the supervisor of the job's workers is running.
      ending: how the processes ended; None if they have not ended.
      wanted: the number of workers that the supervisor tries to run; None if it does
        not answer.
      lines: lines of progress that were added since the last look.
    """

    alive: bool
    ending: Ending | None = None
    wanted: int | None = None
    lines: tuple[Mapping[str, Any], ...] = ()


class Runs(Protocol):
    """The processes of jobs, which continue when the scheduler ends."""

    def start(self, job: JobRecord) -> None:
        """Starts the processes of a job at its places, or finds those that still run.

        A job that runs already with the same attempt number is left unchanged.
        """
        ...

    def look(self, job: JobRecord) -> Look:
        """Returns the status of a job's processes."""
        ...

    def move(self, job: JobRecord) -> str:
        """Moves a job's workers to its places; returns an error text, or ''."""
        ...

    def suspend(self, job: JobRecord) -> str:
        """Lets a job save its state and end; returns an error text, or ''."""
        ...

    def kill(self, job: JobRecord) -> None:
        """Ends the processes of a job at once."""
        ...


class LocalCluster:
    """A cluster on this machine, whose nodes are slots for processes."""

    def __init__(self, text: str) -> None:
        """Creates the nodes.

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
        """Connects to the cluster.

        Args:
          address: address of the cluster; '' for ``RAY_ADDRESS``, or else for the
            cluster of this machine.

        Raises:
          PlanError: Ray is not installed, or there is no cluster.
        """
        self._ray = ray_backend.connect(address)
        # The address for supervisors of jobs, which would look '' up anew.
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self._last: tuple[ClusterNode, ...] = ()

    @property
    def words(self) -> Mapping[str, str]:
        """See `Backend`."""
        return {"name": "ray", "address": self._address}

    def places(self) -> Sequence[ClusterNode]:
        """See `Backend`; if the head does not answer, returns the last known nodes."""
        try:
            nodes, _ = ray_backend.nodes_here(self._ray)
        except self._ray.exceptions.RayError:
            return self._last
        self._last = tuple(ClusterNode(node.name, node.room) for node in nodes)
        return self._last

    def close(self) -> None:
        """See `Backend`."""
        self._ray.shutdown()
