"""The cluster of a world, with a host for each process."""

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
) -> Cluster:
    """The cluster for which the plan of a world is made.

    Args:
      base: the requested cluster, whose links and devices are kept; None: this machine.
      processes: number of processes of the world.
      devices: number of devices of each process.
      found: the world's devices, if they differ from those of this process's backend.

    Raises:
      PlanError: the hosts of ``base`` have another number of devices than the
        processes.

    >>> cluster_of(Cluster.parse("4x2:h100"), 3, 2).num_devices
    6
    """
    if base is None:
        return Cluster.local(processes * devices if found is None else list(found))
    if base.num_devices == processes * devices:
        return base
    levels = list(base.levels)
    if base.groups or not levels:
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
