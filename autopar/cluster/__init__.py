"""What a cluster is made of: devices, the links between them, and meshes over both.

Describing a cluster needs none of its devices: only `Cluster.local` starts a JAX
backend.
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
