"""Makes the cluster for which a run of several processes is planned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError


def cluster_of(
    base: Cluster | None,
    processes: int,
    devices: int,
    found: Sequence[Any] | None = None,
    own: Cluster | None = None,
) -> Cluster:
    """The cluster for which the processes of a world plan: each process is a host.

    Args:
      base: the cluster of the last event, or the user's cluster, from which kinds of
        links and devices are taken; None: the devices that exist.
      processes: number of processes that train together (the world).
      devices: number of devices of each process.
      found: the world's devices; None: the devices of this process's backend.
      own: the user's cluster. It replaces a ``base`` of groups with another number of
        devices, because nothing tells which group has changed.

    Raises:
      PlanError: processes with this number of devices cannot form a part of ``base``.

    >>> cluster_of(Cluster.parse("4x2:h100"), 3, 2).num_devices
    6
    >>> groups = Cluster.parse("1x1:cpu+1x1:cpu,efficiency=0.1")
    >>> str(cluster_of(groups, 3, 1, own=Cluster.parse("4x1:cpu")))
    '3x1:cpu'
    """
    if base is not None and base.groups and base.num_devices != processes * devices:
        base = own
    if base is None:
        return Cluster.local(processes * devices if found is None else list(found))
    if base.num_devices == processes * devices:
        return base
    levels = [] if base.groups else list(base.levels)
    if not levels:
        raise PlanError(
            "a cluster of groups has no hosts of one kind; leave cluster= out."
        )
    inner = math.prod(level.size for level in levels[1:])
    size, rest = divmod(processes * devices, inner)
    if rest or (len(levels) > 1 and devices % inner):
        raise PlanError(
            f"{processes} processes of {devices} devices are no part of {base}: give "
            f"each process {inner} devices (--devices), or another cluster=."
        )
    outer = dataclasses.replace(levels[0], size=size)
    return dataclasses.replace(base, levels=(outer, *levels[1:]), members=None)
