"""Clusters of CPUs whose links send all arrays of a message at once."""

from __future__ import annotations

import dataclasses

from autopar import Cluster


def sharing(cluster: Cluster) -> Cluster:
    """The cluster with links that send all arrays of a message at once."""
    known = dataclasses.replace(cluster.device.corrections, arrays_apart=False)
    device = dataclasses.replace(cluster.device, calibration=known)
    return dataclasses.replace(cluster, device=device)


def in_one_host(cluster: Cluster) -> Cluster:
    """The same devices and links between hosts, in one host, which has all rows.

    Between hosts, a plan that repeats work pays for the exchange of the rows.
    """
    return Cluster(device=cluster.device, levels=cluster.levels[:1])


def small_devices(memory_bytes: int = 1 << 30) -> Cluster:
    """Slow devices with little memory."""
    cluster = sharing(Cluster.parse("8:cpu"))
    rates = tuple(
        (dtype, 1e-4 * rate) for dtype, rate in cluster.device.peak_flops_per_s
    )
    device = dataclasses.replace(
        cluster.device, peak_flops_per_s=rates, memory_bytes=memory_bytes
    )
    return dataclasses.replace(cluster, device=device)
