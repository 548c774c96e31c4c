"""The class `Cluster`: equal devices with the levels of links between them, or
groups.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import numbers
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Self, final

from autopar.cluster import data, local, membership, mesh, slices, text, toml
from autopar.cluster import data as groups_of
from autopar.cluster.members import (
    ClusterFields,
    Members,
    checked_size,
    list_names,
    settle,
    size_of,
)
from autopar.cluster.membership import Prefer
from autopar.cluster.mesh import MeshShape
from autopar.cluster.specs import ClusterError, DeviceSpec, Level, LinkSpec
from autopar_errors import check_path, check_type

# The one-line text of a cluster.


def _runs(positions: Sequence[int]) -> Iterator[str]:
    """Yields texts for runs of consecutive positions, such as 0-3 and 5."""
    pairs = enumerate(positions)
    for _, run in itertools.groupby(pairs, key=lambda pair: pair[1] - pair[0]):
        ends = [position for _, position in run]
        yield f"{ends[0]}-{ends[-1]}" if len(ends) > 1 else str(ends[0])


def _place(of: Members) -> list[str]:
    """The parts of a cluster's text that say where its devices are.

    The parts are the name of the cluster's group, the positions of its devices (unless
    the cluster uses all devices), and the number of idle devices.
    """
    said = [of.group] if of.group else []
    if of.positions != tuple(range(size_of(of.whole))):
        shape = "x".join(str(level.size) for level in of.whole)
        said.append(f"devices {list_names(list(_runs(of.positions)))} of {shape}")
    return said + ([f"{len(of.idle)} idle"] if of.idle else [])


def _of_groups(cluster: ClusterFields) -> str:
    """The text of a cluster of groups; `parse` can read it if no group lacks
    devices.
    """
    bare = groups_of.without_places(cluster.groups)
    said = "+".join(map(str, bare))
    if groups_of.is_default(bare, cluster.between) and "(" not in said:
        return said
    return f"{said} (custom {cluster.fingerprint()[:8]})"


def cluster_text(cluster: ClusterFields) -> str:
    """The text that `Cluster.parse` reads, or else a description.

    The description has the shape, the device's name, and the differences from a preset.

    >>> from autopar.cluster import Cluster
    >>> cluster_text(Cluster.parse("4x8:h100").without("host1"))
    '3x8:h100 (devices 0-7, 16-31 of 4x8)'
    """
    if cluster.groups:
        return _of_groups(cluster)
    short = text.format_text(cluster.device, cluster.levels)
    said = _place(cluster.members) if cluster.members else []
    if short is None or (cluster.members and cluster.members.hosts):
        said.insert(0, f"custom {cluster.fingerprint()[:8]}")
    if short is None:
        shape = "x".join(str(level.size) for level in cluster.levels)
        short = f"{shape}:{cluster.device.name}"
    return f"{short} ({', '.join(said)})" if said else short


@final
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cluster:
    """The devices of a cluster and the links between them.

    Equal devices are arranged in nested levels, the outermost first. The last level
    holds devices that share the fastest links, such as the GPUs of a host. A cluster of
    unequal devices consists of groups of equal devices.

    >>> cluster = Cluster.parse("2x4:h100")
    >>> cluster.num_devices
    8
    >>> [shape.sizes for shape in cluster.mesh_shapes(max_axes=2)]
    [(2, 4)]
    >>> cluster.without("host1/device2", prefer="hosts").device_names[3:]
    ('host1/device0', 'host1/device1', 'host1/device3')

    Attributes:
      device: figures of a device; reading this attribute of a cluster of groups raises
        an error.
      levels: sizes and links of the levels; reading this attribute of a cluster of
        groups raises an error.
      members: positions of these devices in the whole cluster, if they are only a part
        of it; None: these are all devices of the whole cluster.
      groups: clusters of equal devices; empty if all devices are equal.
      between: the link between groups; None if all devices are equal.
    """

    # The class has no slots. So if an instance lacks this field, Python looks it up in
    # the class, where a descriptor raises the error. Ruff's rule RUF009 takes the call
    # below for a mutable default value, but it makes the descriptor.
    device: DeviceSpec = groups_of.equal_only()  # noqa: RUF009
    levels: tuple[Level, ...] = groups_of.equal_only()
    members: Members | None = None
    groups: tuple[Self, ...] = ()
    between: LinkSpec | None = None

    def __post_init__(self) -> None:
        """Check the levels and the members, or the groups."""
        given = self.__dict__
        if self.groups or given["device"] is None or given["levels"] is None:
            self._settle_groups()
            return
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ClusterError(
                f"Cluster: levels must have different names, and at least one: {names}."
            )
        if self.between is not None:
            raise ClusterError("Cluster: between= is a link between groups=.")
        checked_size(self.levels)
        if self.members is not None:
            given["members"] = settle(self.members, self.levels)

    def _settle_groups(self) -> None:
        given = self.__dict__
        own = [given.pop(name) for name in ("device", "levels")] + [self.members]
        if not self.groups or any(value is not None for value in own):
            raise ClusterError(
                "Cluster: give device= and levels=, or groups= of such clusters."
            )
        placed = groups_of.place_groups(self.groups)
        between = self.between or groups_of.default_between(placed)
        groups_of.check_groups(placed, between)
        given.update(groups=placed, between=between)

    @classmethod
    def parse(cls, description: str) -> Self:
        """Reads a cluster from a short text, or from the TOML file at a path.

        ``"8x8:h100"`` is 8 hosts of 8 devices; ``"2x4x4:cpu"`` is 2 pods of 4 hosts of
        4 devices; ``"8:h100"`` is 8 devices in one host, or in one larger domain of
        fastest links. For TPUs the sizes are the dimensions of the torus:
        ``"16x16:v5e"``. A text without a device, such as ``"8x8"``, means H100 devices.
        Options follow after commas: ``memory=40GB`` (memory per device that a program
        may use), ``efficiency=0.5`` (the fraction of the peak that large matrix
        products reach), ``power=500W`` (a power limit below the datasheet's, which
        slows products), ``network=100Gb/s`` and ``network_latency=10us`` (between
        hosts, per device, one direction). Groups of unequal devices are joined by plus
        signs: ``"4x8:h100+2x8:a100"``.

        Raises:
          ClusterError: the text is wrong or the file cannot be read.
        """
        check_type("Cluster.parse", description, str, "a text such as '2x8:h100'")
        if description.strip().endswith(".toml"):
            return cls.from_toml(description.strip())
        parsed = map(text.parse_text, groups_of.split_text(description))
        found = tuple(cls(device=device, levels=levels) for device, levels in parsed)
        return found[0] if len(found) == 1 else cls(groups=found)

    @classmethod
    def from_toml(cls, path: str | pathlib.Path) -> Self:
        """Reads a cluster from a TOML file (see docs/cost-model.md)."""
        check_path("Cluster.from_toml", path)
        return toml.read(pathlib.Path(path), functools.partial(data.read, cls))

    @classmethod
    def from_data(cls, values: Mapping[str, Any]) -> Self:
        """Reads a cluster from the result of `to_data`.

        Raises:
          ClusterError: a key is unknown or missing, or a value is wrong.
        """
        try:
            return data.read(cls, values)
        except ValueError as error:  # msgspec's errors and ClusterError are ValueErrors
            raise ClusterError(f"the data of a cluster: {error}") from error

    @classmethod
    def local(cls, devices: int | Sequence[Any] | None = None) -> Self:
        """Describes the cluster of this process's JAX devices.

        If `autopar profile` has saved measurements for this machine and number of
        devices, the cluster has the measured figures; otherwise the figures of the
        device's preset. This is the only function of this package that starts the JAX
        backend.

        Args:
          devices: number of devices, of which the first are taken; or a list of JAX
            devices, for example of several processes; None: all devices.
        """
        check_type(
            "Cluster.local",
            devices,
            (int, NoneType, list, tuple),
            "a number of devices, such as 4",
        )
        device, levels = local.discover(devices)
        return cls(device=device, levels=levels)

    def to_toml(self) -> str:
        """The cluster as the text of a TOML file, which `from_toml` reads."""
        return toml.write(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """The cluster as dictionaries, lists, texts and numbers, which `from_data`
        reads.

        >>> import json
        >>> cluster = Cluster.parse("2x4:h100").slice((1, 2), offset=4)
        >>> Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster
        True
        """
        return data.write(self)

    @property
    def num_devices(self) -> int:
        """The number of devices, without idle devices."""
        if self.groups:
            return sum(group.num_devices for group in self.groups)
        return math.prod(level.size for level in self.levels)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that a program may use."""
        return self.device.memory_bytes

    @property
    def ids(self) -> tuple[int, ...]:
        """Positions of the devices in the whole cluster, as indices of `jax.devices()`.

        >>> Cluster.parse("2x2:h100").without("host0").ids
        (2, 3)
        """
        return sum((m.ids for m in self._all_members()), ())

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices, in the order of `ids`.

        >>> Cluster.parse("2x2:h100").device_names
        ('host0/device0', 'host0/device1', 'host1/device0', 'host1/device1')
        """
        return sum((m.names(m.positions) for m in self._all_members()), ())

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that hold the devices. In a torus, the rows count as
        hosts.
        """
        return tuple(dict.fromkeys(n.rpartition("/")[0] for n in self.device_names))

    @property
    def idle(self) -> tuple[str, ...]:
        """The names of devices that are available but not used, because all parts of a
        level must have equally many devices.
        """
        return sum((m.names(m.idle) for m in self._all_members()), ())

    def _all_members(self) -> list[Members]:
        return [membership.members_of(part) for part in membership.parts(self)]

    def mesh_shapes(
        self, max_axes: int = 3, names: Sequence[str] | None = None
    ) -> tuple[MeshShape, ...]:
        """All meshes of all devices in which each axis lies within one level.

        Meshes with fewer axes come first. No axis has size 1, except the axis of a
        single device. `names` replaces the default names, outermost first.
        """
        return mesh.mesh_shapes(self.levels, max_axes, names)

    def default_mesh(self, names: Sequence[str] | None = None) -> MeshShape:
        """The mesh with one axis for each level."""
        axes = max(1, sum(level.size > 1 for level in self.levels))
        return self.mesh_shapes(axes, names)[0]

    def slices(self) -> tuple[tuple[Self, int], ...]:
        """For every shape of slices (parts of the cluster): the first slice with this
        shape, and how many disjoint slices have it.

        `autopar.cluster.slices` defines the shapes.

        >>> [(str(part), count) for part, count in Cluster.parse("2x2:h100").slices()]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('1x1:h100 (devices 0 of 2x2)', 4), ('1x2:h100 (devices 0-1 of 2x2)', 2),
         ('2x2:h100', 1)]
        """
        return tuple(
            (part._cut(shape, 0), slices.count(part.levels, shape))
            for part in membership.parts(self)
            for shape in slices.shapes(part.levels)
        )

    def slice(self, shape: Sequence[int], offset: int = 0) -> Self:
        """The slice (part of the cluster) of this shape that begins at the device
        ``offset``.

        Args:
          shape: sizes of the levels, one of the shapes of `slices`.
          offset: index of the slice's first device, counted through all groups.

        Raises:
          ClusterError: the links allow no such slice; the message lists the allowed
            slices.

        >>> Cluster.parse("2x4:h100").slice((1, 2), offset=6).device_names
        ('host1/device2', 'host1/device3')
        """
        check_type("Cluster.slice: shape", shape, (tuple, list), "sizes such as (1, 2)")
        check_type("Cluster.slice: offset", offset, numbers.Integral, "a whole number")
        if self.groups:
            return groups_of.slice_of(self, shape, offset)
        sizes = slices.check_shape(self.levels, shape)
        return self._cut(sizes, slices.check_offset(self.levels, sizes, offset))

    def _cut(self, sizes: slices.Shape, offset: int) -> Self:
        cells = slices.block(self.levels, sizes, offset)
        return membership.select(self, sizes, cells)

    def partition(self, shapes: Sequence[Sequence[int]]) -> tuple[Self, ...]:
        """Divides all devices into slices of these shapes, in the given order.

        Raises:
          ClusterError: the shapes have more or fewer devices than the cluster, or no
            such division exists.

        >>> stages = Cluster.parse("2x4:h100").partition([(1, 2), (1, 4), (1, 2)])
        >>> [stage.ids for stage in stages]
        [(0, 1), (4, 5, 6, 7), (2, 3)]
        """
        wanted = "a list of shapes, such as [(1, 2), (1, 2)]"
        check_type("Cluster.partition", shapes, (tuple, list), wanted)
        for shape in shapes:
            check_type("Cluster.partition", shape, (tuple, list), wanted)
        offsets = slices.partition(self.levels, shapes)
        pairs = zip(shapes, offsets, strict=True)
        return tuple(self._cut(tuple(shape), offset) for shape, offset in pairs)

    def without(
        self,
        *names: str,
        devices: Sequence[int] = (),
        hosts: Sequence[int] = (),
        prefer: Prefer = "devices",
    ) -> Self:
        """The largest regular cluster of the devices that remain after some leave.

        In a regular cluster all parts of a level have equally many devices. Remaining
        devices that it does not use are `idle`. Idle devices may be used again when
        more devices leave or join.

        Args:
          *names: devices, hosts, pods or groups, such as ``"host0/device1"``.
          devices: `ids` of devices that leave.
          hosts: numbers, in the whole cluster, of hosts that leave.
          prefer: which of several clusters of the same size to choose: with more
            ``"devices"`` per host, or with more ``"hosts"``.

        Raises:
          ClusterError: a name is unknown or given twice, or no device is left.

        >>> whole = Cluster.parse("8x8:h100")
        >>> str(whole.without("host3", "host0/device1"))
        '7x7:h100 (devices 0, 2-14, 16-22, 32-38, 40-46, 48-54, 56-62 of 8x8, 6 idle)'
        >>> str(whole.without("host0/device1"))
        '7x8:h100 (devices 8-63 of 8x8, 7 idle)'
        """
        left = membership.without(self, names, devices, hosts, prefer)
        return self._rejoin(left)

    def with_hosts(
        self, hosts: int | str | Sequence[str], prefer: Prefer = "devices"
    ) -> Self:
        """The largest regular cluster after hosts joined or returned.

        If a host belonged to the whole cluster, all its devices return to their old
        positions. A new host is added after the last host. If ``hosts`` is a number,
        hosts that had left return first.

        Args:
          hosts: number of hosts, or their names.
          prefer: as for `without`.

        Raises:
          ClusterError: a host is already in the cluster, or the hosts are not joined by
            a switch, to which a new host could be added.

        >>> cluster = Cluster.parse("2x4:h100").without("host0")
        >>> cluster.with_hosts(2).hosts
        ('host0', 'host1', 'host2')
        """
        return self._rejoin(membership.with_hosts(self, hosts, prefer))

    def with_devices(self, devices: Sequence[int], prefer: Prefer = "devices") -> Self:
        """The largest regular cluster after devices returned to their old positions.

        Args:
          devices: `ids` of the devices that return.
          prefer: as for `without`.

        Raises:
          ClusterError: a device is already in the cluster, or never belonged to it.

        >>> Cluster.parse("8:h100").without(devices=(2, 3)).with_devices((3,)).ids
        (0, 1, 3, 4, 5, 6, 7)
        """
        return self._rejoin(membership.with_devices(self, devices, prefer))

    def with_link(
        self,
        level: str,
        *,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> Self:
        """The same cluster with new measurements for the links of one level.

        If the link has measured times of collectives, they are scaled in proportion.

        Args:
          level: name of the level, such as ``host``; in a cluster of groups,
            ``between`` for the link between groups, or names of a group and its level.
          bandwidth_bytes_per_s: new bandwidth, as in `LinkSpec`; None: unchanged.
          latency_s: new latency, as in `LinkSpec`; None: unchanged.

        Raises:
          ClusterError: there is no such level, or a value is wrong.

        >>> cluster = Cluster.parse("2x4:h100")
        >>> slow = cluster.with_link("host", bandwidth_bytes_per_s=1e9)
        >>> slow.levels[0].link.bandwidth_bytes_per_s
        1000000000.0
        """
        rate = bandwidth_bytes_per_s, latency_s
        if not self.groups:
            return membership.with_link(self, level, *rate)
        groups, between = membership.groups_with_link(self, level, *rate)
        return type(self)(groups=groups, between=between)

    def with_speeds(self, speeds: Sequence[float]) -> Self:
        """The same cluster while some of its parts compute at other speeds.

        Args:
          speeds: for each part of the outermost level, or for each of several equally
            large blocks of its parts, the speed divided by the present speed.

        Returns:
          A cluster of groups, in the order of the devices. If all speeds are equal, the
          result has no groups.

        Raises:
          ClusterError: the cluster has groups or lacks devices, or the speeds are not
            as many as the parts.

        >>> cluster = Cluster.parse("4x1:cpu").with_speeds([1, 0.5, 1, 1])
        >>> [group.num_devices for group in cluster.groups]
        [1, 1, 2]
        """
        groups, between = membership.with_speeds(self, speeds)
        if len(groups) == 1:
            return dataclasses.replace(self, device=groups[0].device)
        return type(self)(groups=groups, between=between)

    def _rejoin(self, left: Sequence[Self]) -> Self:
        """Makes one cluster of the remaining groups; a cluster of groups if several are
        left.
        """
        if len(left) == 1:
            return left[0]
        return type(self)(groups=tuple(left), between=self.between)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change if any value of the cluster changes."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def _key(self) -> tuple[object, ...]:
        own = (self.__dict__.get("device"), self.__dict__.get("levels"))
        return (*own, self.members, self.groups, self.between)

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal. A field that a cluster of groups lacks is equal
        to the same missing field.
        """
        if not isinstance(other, Cluster):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        """The hash of all fields."""
        return hash(self._key())

    def __repr__(self) -> str:
        """The text and the number of devices; `to_toml` has all figures.

        >>> Cluster.parse("2x4:h100")
        <Cluster 2x4:h100, 8 devices>
        """
        count = self.num_devices
        return f"<Cluster {self}, {count} {'device' if count == 1 else 'devices'}>"

    def __str__(self) -> str:
        """The text that `parse` reads; if there is no such text, the cluster's shape
        and the device's name.
        """
        return cluster_text(self)
