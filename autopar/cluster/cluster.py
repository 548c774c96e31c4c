"""A cluster: one class of device, and the levels of links between the devices."""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import Self

from autopar.cluster import local, mesh, text, toml
from autopar.cluster.errors import ClusterError
from autopar.cluster.mesh import MeshShape
from autopar.cluster.specs import DeviceSpec, Level


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices in nested levels, the outermost first.

    The last level holds the devices that share the fastest links, such as the GPUs
    of a host.

    >>> cluster = Cluster.parse("2x4:h100")
    >>> cluster.num_devices
    8
    >>> [shape.sizes for shape in cluster.mesh_shapes(max_axes=2)]
    [(2, 4)]
    """

    device: DeviceSpec
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        """Check the levels."""
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ClusterError(
                f"Cluster: levels must have different names, and at least one: {names}."
            )

    @classmethod
    def parse(cls, description: str) -> Self:
        """The cluster that a short text or the path of a TOML file describes.

        ``"8x8:h100"`` is 8 hosts of 8 devices; ``"2x4x4:cpu"`` is 2 pods of 4 hosts
        of 4 devices; ``"8:h100"`` is 8 devices in one host (or, more widely, in one
        domain of the fastest links). For TPUs the sizes are the dimensions of the
        torus: ``"16x16:v5e"``. Without a device, ``"8x8"``, it is an H100. Options
        follow after commas: ``memory=40GB`` (memory a program may use, per device),
        ``efficiency=0.5`` (of large matrix products), ``network=100Gb/s`` and
        ``network_latency=10us`` (between hosts, per device, one direction).

        Raises:
          ClusterError: if the text is wrong or the file cannot be read.
        """
        if description.strip().endswith(".toml"):
            return cls.from_toml(description.strip())
        device, levels = text.parse_text(description)
        return cls(device=device, levels=levels)

    @classmethod
    def from_toml(cls, path: str | pathlib.Path) -> Self:
        """The cluster that a TOML file describes (see docs/cost-model.md)."""
        device, levels = toml.read(pathlib.Path(path))
        return cls(device=device, levels=levels)

    @classmethod
    def local(cls, devices: int | None = None) -> Self:
        """The devices of this process's JAX backend, or the first `devices` of them.

        Takes the profile that `autopar profile` saved for this machine and number of
        devices if there is one, and otherwise the preset of the device. This starts
        the JAX backend; no other function of this package does.
        """
        device, levels = local.discover(devices)
        return cls(device=device, levels=levels)

    def to_toml(self) -> str:
        """The text of a TOML file that `from_toml` reads."""
        return toml.write(self.device, self.levels)

    @property
    def num_devices(self) -> int:
        """How many devices the cluster has."""
        return math.prod(level.size for level in self.levels)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that a program may use."""
        return self.device.memory_bytes

    def mesh_shapes(
        self, max_axes: int = 3, names: Sequence[str] | None = None
    ) -> tuple[MeshShape, ...]:
        """Every mesh of all devices in which each axis lies within one level.

        Meshes with fewer axes come first; no axis has size 1, but for the one axis
        of a single device. `names` replaces the default names, outermost first.
        """
        return mesh.mesh_shapes(self.levels, max_axes, names)

    def default_mesh(self, names: Sequence[str] | None = None) -> MeshShape:
        """The mesh with one axis for each level."""
        axes = max(1, sum(level.size > 1 for level in self.levels))
        return self.mesh_shapes(axes, names)[0]

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when any number of the cluster does."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The text that `parse` reads; of a custom cluster, its shape and name."""
        short = text.format_text(self.device, self.levels)
        if short is not None:
            return short
        shape = "x".join(str(level.size) for level in self.levels)
        return f"{shape}:{self.device.name} (custom {self.fingerprint()[:8]})"
