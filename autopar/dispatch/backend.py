"""What a scheduler needs of a cluster: where processes can run, and who runs them."""

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
      name: which it keeps.
      devices: how many workers of jobs it can have; each has one device.
      kind: of its devices.
    """

    name: str
    devices: int
    kind: str = "cpu"


class Backend(Protocol):
    """A cluster."""

    @property
    def words(self) -> Mapping[str, str]:
        """How a job's own process reaches the cluster, as plain data."""
        ...

    def places(self) -> Sequence[ClusterNode]:
        """The nodes that are there now."""
        ...

    def close(self) -> None:
        """Ends the connection; jobs go on."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes of a job ended.

    Attributes:
      code: 0: the script has ended; `SUSPENDED`: it is to go on later; others: wrong.
      reason: in words.
      lost: whether its workers were lost, through no fault of its script.
    """

    code: int
    reason: str = ""
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is seen of a job's processes.

    Attributes:
      alive: whether its own process, which supervises the workers, is there.
      ending: how they ended; None: they did not.
      wanted: how many workers it tries to have; None: it does not answer.
      lines: of its progress, since the last look.
    """

    alive: bool
    ending: Ending | None = None
    wanted: int | None = None
    lines: tuple[Mapping[str, Any], ...] = ()


class Runs(Protocol):
    """The processes of jobs, which live on without the scheduler."""

    def start(self, job: JobRecord) -> None:
        """Starts the processes of a job at its places, or takes up those there are.

        A job that was started before with the same number of attempts and is alive is
        left as it is.
        """
        ...

    def look(self, job: JobRecord) -> Look:
        """Looks at the processes of a job."""
        ...

    def move(self, job: JobRecord) -> str:
        """Moves the workers of a job to its places; returns what is wrong, or ''."""
        ...

    def suspend(self, job: JobRecord) -> str:
        """Has a job saved and its processes ended; returns what is wrong, or ''."""
        ...

    def kill(self, job: JobRecord) -> None:
        """Ends the processes of a job at once."""
        ...


class LocalCluster:
    """Nodes that are slots for processes of this machine."""

    def __init__(self, text: str) -> None:
        """Makes the nodes.

        Args:
          text: such as ``4x1`` or ``2x4:cpu``.

        Raises:
          ScheduleError: the text is none of these.
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
    """The nodes of a Ray cluster; a device is a CPU there."""

    def __init__(self, address: str = "") -> None:
        """Connects.

        Args:
          address: of the cluster; '' for ``RAY_ADDRESS``, or that of this machine.

        Raises:
          PlanError: Ray is not installed, or there is no cluster.
        """
        self._ray = ray_backend.connect(address)
        # What a job's process connects to; '' would be looked for anew.
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self._last: tuple[ClusterNode, ...] = ()

    @property
    def words(self) -> Mapping[str, str]:
        """See `Backend`."""
        return {"name": "ray", "address": self._address}

    def places(self) -> Sequence[ClusterNode]:
        """See `Backend`; those seen last while the head does not answer."""
        try:
            nodes, _ = ray_backend.nodes_here(self._ray)
        except self._ray.exceptions.RayError:
            return self._last
        self._last = tuple(ClusterNode(node.name, node.room) for node in nodes)
        return self._last

    def close(self) -> None:
        """See `Backend`."""
        self._ray.shutdown()
