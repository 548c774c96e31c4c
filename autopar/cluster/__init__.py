"""Describes clusters: devices, links between devices, and device meshes.

A cluster can be described without access to its devices. Only `Cluster.local` starts a
JAX backend.
"""

from autopar.cluster.cluster import Cluster
from autopar.cluster.members import Members
from autopar.cluster.mesh import MeshAxis, MeshShape
from autopar.cluster.specs import (
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Level,
    LinkSpec,
)

__all__ = [
    "Cluster",
    "ClusterError",
    "CollectiveFit",
    "DeviceSpec",
    "Level",
    "LinkSpec",
    "Members",
    "MeshAxis",
    "MeshShape",
]
