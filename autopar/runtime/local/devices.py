"""Which devices a replica has, and which replicas a process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.runtime.world import World


def part_of(cluster: Cluster, replicas: int) -> Cluster:
    """The devices of one replica, where replicas share a cluster evenly.

    Raises:
      PlanError: the cluster has no such equal parts.
    """
    if cluster.groups:
        raise PlanError(
            f"local_steps: {cluster} has unequal groups; replicas need equal ones."
        )
    size, rest = divmod(cluster.num_devices, replicas)
    if not rest:
        for part, number in cluster.slices():
            if part.num_devices == size and number == replicas:
                return part
    raise PlanError(
        f"local_steps: {cluster} has no {replicas} equal parts for replicas; choose "
        "replicas= as the number of hosts, or of equal parts of a host."
    )


def divide_devices(world: World, replicas: int, size: int) -> list[tuple[Any, ...]]:
    """The devices of each replica.

    Args:
      world: all processes and devices.
      replicas: number of replicas.
      size: number of devices of a replica.

    Raises:
      PlanError: the world has too few devices; or a process has devices of several
        replicas, of which another process has some, too.
    """
    devices = world.devices
    if len(devices) < size * replicas:
        raise PlanError(
            f"local_steps: {replicas} replicas of {size} devices need "
            f"{size * replicas}; this world has {len(devices)}."
        )
    groups = [tuple(devices[k * size : (k + 1) * size]) for k in range(replicas)]
    homes = [{d.process_index for d in group} for group in groups]
    for process in range(world.process_count if world.process_count > 1 else 0):
        inside = [k for k in range(replicas) if process in homes[k]]
        shared = any(len(homes[k]) > 1 for k in inside)
        if not inside or (shared and len(inside) > 1):
            raise PlanError(
                f"local_steps: process {process} has devices of replicas {inside}. A "
                "replica lies in one process, or in several that have no other: "
                "choose replicas= as a multiple or a divisor of the processes."
            )
    return groups


def own_replicas(world: World, groups: Sequence[Sequence[Any]]) -> list[int]:
    """The numbers of the replicas that have devices of this process.

    Args:
      world: all processes and devices.
      groups: the devices of each replica.
    """
    mine = world.process_index
    return [
        k
        for k, group in enumerate(groups)
        if world.process_count == 1 or any(d.process_index == mine for d in group)
    ]
