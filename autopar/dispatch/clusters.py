"""The clusters that jobs run on: slots of this machine, or nodes of Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from autopar.backends import ray as ray_backend
from autopar.dispatch.backend import ClusterNode
from autopar.scheduler.nodes import Nodes


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
