"""Clusters of CPUs whose links send all arrays of a message at once."""

from __future__ import annotations

import dataclasses

from autopar import Cluster


def sharing(cluster: Cluster) -> Cluster:
    """The cluster with links that send all arrays of a message at once."""
    known = dataclasses.replace(cluster.device.corrections, arrays_apart=False)
    device = dataclasses.replace(cluster.device, calibration=known)
    return dataclasses.replace(cluster, device=device)
