"""Positions and names of devices in the whole cluster from which some may have left.

A device has a position, counted in row-major order over the levels of the whole
cluster. A device also has a name: ``host3/device1`` is the second device of the fourth
host. Position and name stay the same when other devices leave.

The protocol `ClusterFields` lists the fields of a cluster that the modules below
`autopar.cluster.cluster` read.

The modules that use this protocol take and return clusters without importing the class
`Cluster`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from autopar.cluster.specs import (
    MOST_DEVICES,
    ClusterError,
    DeviceSpec,
    Level,
    LinkSpec,
    show,
)

# An error message lists at most this many names in full.
_SHOWN = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Which devices of a whole cluster a cluster uses.

    Attributes:
      whole: the levels of the whole cluster.
      positions: positions of the devices in use, in the order in which meshes are made
        of them.
      idle: positions of the devices that are available but not used.
      hosts: a name for each host of the whole cluster; empty: hosts are named after
        their level, such as ``host3``.
      group: name of the group to which the devices belong, in a cluster of unequal
        devices.
      start: the position of the group's first device among the devices of all groups.
    """

    whole: tuple[Level, ...]
    positions: tuple[int, ...]
    idle: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str = ""
    start: int = 0

    def __post_init__(self) -> None:
        """Check the positions and the names."""
        held, size = (*self.positions, *self.idle), checked_size(self.whole)
        if len(set(held)) < len(held) or (
            held and not 0 <= min(held) <= max(held) < size
        ):
            raise ClusterError(
                f"Members: positions {show(list(self.positions[:99]))} and idle "
                f"{show(list(self.idle[:99]))} must be different, from 0 to "
                f"{size - 1}."
            )
        if not 0 <= self.start <= MOST_DEVICES or "/" in self.group:
            raise ClusterError(
                f"Members: start={show(self.start)} must be 0 or more, and "
                f"group={show(self.group)} have no '/'."
            )
        if self.hosts:
            _check_hosts(self)

    @property
    def ids(self) -> tuple[int, ...]:
        """Positions among the devices of all groups."""
        return tuple(self.start + position for position in self.positions)

    @property
    def host_names(self) -> tuple[str, ...]:
        """The name of every host of the whole cluster."""
        prefix = f"{self.group}/" if self.group else ""
        names = self.hosts or default_hosts(self.whole)
        return tuple(prefix + name for name in names)

    def names(self, positions: Iterable[int]) -> tuple[str, ...]:
        """The names of the devices at these positions."""
        hosts, last = self.host_names, self.whole[-1]
        split = (divmod(position, last.size) for position in positions)
        return tuple(f"{hosts[host]}/{last.name}{i}" for host, i in split)

    def blocks(self) -> dict[str, range]:
        """Name of each part, host and device -> its positions."""
        found: dict[str, range] = {}
        prefix = f"{self.group}/" if self.group else ""
        if self.group:
            found[self.group] = range(size_of(self.whole))
        for depth in range(1, len(self.whole) - 1):
            found |= _spread(
                [prefix + name for name in paths(self.whole[:depth])],
                size_of(self.whole[depth:]),
            )
        found |= _spread(self.host_names, self.whole[-1].size)
        return found | _spread(self.names(range(size_of(self.whole))), 1)


def size_of(levels: Sequence[Level]) -> int:
    """The number of devices that the levels hold."""
    return math.prod(level.size for level in levels)


def checked_size(levels: Sequence[Level]) -> int:
    """The number of devices that the levels hold.

    Raises:
      ClusterError: the number is larger than a cluster may have.
    """
    if (found := size_of(levels)) > MOST_DEVICES:
        raise ClusterError(f"a cluster has at most {MOST_DEVICES} devices: {found}.")
    return found


def num_hosts(levels: Sequence[Level]) -> int:
    """The number of hosts, or of rows of a torus."""
    return size_of(levels[:-1])


def paths(levels: Sequence[Level]) -> tuple[str, ...]:
    """The names of the parts of nested levels, row-major.

    >>> from autopar.cluster import Cluster
    >>> paths(Cluster.parse("2x2x8:h100").levels[:2])
    ('pod0/host0', 'pod0/host1', 'pod1/host0', 'pod1/host1')
    """
    named = [[f"{level.name}{i}" for i in range(level.size)] for level in levels]
    return tuple("/".join(path) for path in itertools.product(*named))


def default_hosts(levels: Sequence[Level]) -> tuple[str, ...]:
    """The default names of hosts, after their level; ``host0`` if there is only one
    level.
    """
    return paths(levels[:-1]) if len(levels) > 1 else ("host0",)


def _spread(names: Sequence[str], size: int) -> dict[str, range]:
    """Name -> its block of `size` consecutive positions."""
    return {name: range(i * size, (i + 1) * size) for i, name in enumerate(names)}


def _check_hosts(members: Members) -> None:
    hosts, count = members.hosts, num_hosts(members.whole)
    if len(hosts) != count:
        raise ClusterError(
            f"hosts: {len(hosts)} names for {count} hosts; name every host, row-major "
            "over the levels, or none."
        )
    # Names must be unique among parts, hosts and devices together.
    outer = sum(size_of(members.whole[:i]) for i in range(1, len(members.whole) - 1))
    expected = outer + count + size_of(members.whole) + bool(members.group)
    if "" in hosts or len(members.blocks()) != expected:
        raise ClusterError(
            "hosts: names must be different, not empty, and not those of other parts: "
            f"{list_names(hosts)}."
        )


def everything(levels: tuple[Level, ...]) -> Members:
    """The members of a cluster that uses all devices of a whole cluster."""
    return Members(whole=levels, positions=tuple(range(size_of(levels))))


def settle(members: Members, levels: tuple[Level, ...]) -> Members | None:
    """Checks members against levels; returns None for the default members, which use
    all devices under default names.

    Raises:
      ClusterError: the members do not fit a cluster with these levels.
    """
    if len(members.positions) != size_of(levels):
        raise ClusterError(
            f"Members: {len(members.positions)} positions, and the levels have "
            f"{size_of(levels)} devices."
        )
    inside = len(members.whole) == len(levels) and all(
        part.name == level.name and part.size <= level.size
        for part, level in zip(levels, members.whole, strict=False)
    )
    if not inside:
        raise ClusterError(
            f"Members: the levels {_shape(levels)} are no part of "
            f"{_shape(members.whole)}."
        )
    return None if members == everything(levels) else members


def _shape(levels: Sequence[Level]) -> str:
    return " ".join(f"{level.name}={level.size}" for level in levels)


def list_names(names: Sequence[str]) -> str:
    """Names as a text for an error message: all of a short list, the first and the last
    of a long one.

    >>> list_names(["a", "b"])
    'a, b'
    """
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, ..., {names[-1]} ({len(names)} in all)"


class ClusterFields(Protocol):
    """The fields and derived properties of `autopar.cluster.Cluster`."""

    # Type checkers require this attribute for `dataclasses.replace`.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def device(self) -> DeviceSpec:
        """Figures of a device; raises an error for a cluster of groups."""
        ...

    @property
    def levels(self) -> tuple[Level, ...]:
        """Sizes and links of the levels; raises an error for a cluster of groups."""
        ...

    @property
    def members(self) -> Members | None:
        """Positions of these devices in the whole cluster; None: these are all its
        devices.
        """
        ...

    @property
    def groups(self) -> tuple[Self, ...]:
        """Clusters of equal devices; empty if all devices are equal."""
        ...

    @property
    def between(self) -> LinkSpec | None:
        """The link between groups; None if all devices are equal."""
        ...

    @property
    def num_devices(self) -> int:
        """The number of devices, without idle devices."""
        ...

    @property
    def ids(self) -> tuple[int, ...]:
        """Positions of the devices in the whole cluster."""
        ...

    def slice(self, shape: Sequence[int], offset: int = 0) -> Self:
        """The slice (part of the cluster) of this shape that begins at the device
        ``offset``.
        """
        ...

    def fingerprint(self) -> str:
        """Digits that change if any value of the cluster changes."""
        ...


AnyCluster = TypeVar("AnyCluster", bound=ClusterFields)
