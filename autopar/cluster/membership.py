"""Finds the cluster to use after devices left or joined.

A plan needs a regular cluster, in which all parts of a level (such as hosts) have
equally many devices. The devices that remain are rarely a regular cluster: 8 hosts of 8
devices without one device are 63 devices. So the largest regular cluster of the
remaining devices is used. The other devices are idle until the next change, when they
may be used again.

This module finds the largest regular cluster of the remaining devices.

If a switch joins the parts of a level, any parts and any devices in them can be used.
In a torus only blocks of neighbours can be used. If a ring has lost a part, the rest is
a line.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from autopar.cluster.members import (
    AnyCluster,
    ClusterFields,
    Members,
    default_hosts,
    everything,
    list_names,
    num_hosts,
    size_of,
)
from autopar.cluster.slices import at_rate, cut_all, is_torus, wraps_around
from autopar.cluster.specs import ClusterError, DeviceSpec, Level, LinkSpec

Prefer = Literal["devices", "hosts"]
"""Which of several regular clusters of the same size to choose: the one with more
devices per host, or the one with more hosts.
"""

Cells = npt.NDArray[np.bool_]
Shape = tuple[int, ...]


def check_prefer(prefer: str) -> None:
    """Raises `ClusterError` if the preference is unknown."""
    if prefer not in get_args(Prefer):
        raise ClusterError(
            f"prefer={prefer!r} is unknown: it is one of {get_args(Prefer)}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """Levels whose sizes must be chosen together: a single level joined by a switch, or
    all levels of a torus.

    ``wraps`` holds, for each dimension of a torus, whether it has wrap-around links;
    None for a level joined by a switch.
    """

    axes: tuple[int, ...]
    wraps: tuple[bool, ...] | None

    def options(self, cells: Cells) -> Iterator[tuple[Shape, Cells]]:
        """Yields each shape that a part can have in these levels, and which parts can
        have it.

        ``cells`` tells which inner parts are usable. The last axes of ``cells`` are the
        levels of this segment.
        """
        if self.wraps is not None:
            yield from _blocks(cells, self.axes, self.wraps)
            return
        found = cells.sum(axis=-1)
        for size in range(1, int(found.max()) + 1):
            yield (size,), found >= size

    def good(self, cells: Cells, shape: Shape) -> Cells:
        """Marks the parts that can have this shape."""
        for sizes, good in self.options(cells):
            if sizes == shape:
                return good
        raise AssertionError((shape, self))  # `options` yielded this shape

    def place(self, cells: Cells, shape: Shape) -> list[tuple[int, ...]]:
        """The coordinates of the first usable inner parts that form this shape."""
        if self.wraps is None:
            return [(int(i),) for i in np.flatnonzero(cells)[: shape[0]]]
        axes = tuple(range(cells.ndim))
        corners = dict(_corners(cells, axes, self.wraps))[shape]
        corner = np.argwhere(corners)[0]
        return [
            tuple(
                (int(c) + i) % n
                for c, i, n in zip(corner, at, cells.shape, strict=True)
            )
            for at in itertools.product(*map(range, shape))
        ]


def _segments(device: DeviceSpec, levels: Sequence[Level]) -> list[_Segment]:
    found: list[_Segment] = []
    for torus, run in itertools.groupby(
        range(len(levels)), key=lambda i: is_torus(levels[i])
    ):
        axes = tuple(run)
        if torus:
            wraps = tuple(wraps_around(device, levels[i].link) for i in axes)
            found.append(_Segment(axes, wraps))
        else:
            found += [_Segment((i,), None) for i in axes]
    return found


def _shift(cells: Cells, axis: int, by: int, wraps: bool) -> Cells:
    """Shifts cells along an axis. Without wrap-around, cells from beyond the end are
    False.
    """
    moved = np.roll(cells, -by, axis)
    if not wraps:
        index: list[Any] = [slice(None)] * cells.ndim
        index[axis] = slice(cells.shape[axis] - by, None)
        moved[tuple(index)] = False
    return moved


def _corners(
    cells: Cells, axes: tuple[int, ...], wraps: tuple[bool, ...]
) -> Iterator[tuple[Shape, Cells]]:
    """Yields each shape of a block of usable cells, and the cells at which such blocks
    begin.
    """
    if not axes:
        yield (), cells
        return
    axis, run = axes[0], cells
    for size in range(1, cells.shape[axis] + 1):
        if size > 1:
            run = run & _shift(cells, axis, size - 1, wraps[0])
        if size == cells.shape[axis]:  # a whole ring begins at its cell 0
            first = np.arange(size) == 0
            run = run & np.expand_dims(
                first, tuple(i for i in range(cells.ndim) if i != axis)
            )
        if not run.any():
            return
        for rest, corners in _corners(run, axes[1:], wraps[1:]):
            yield (size, *rest), corners


def _blocks(
    cells: Cells, axes: tuple[int, ...], wraps: tuple[bool, ...]
) -> Iterator[tuple[Shape, Cells]]:
    """Yields each shape of a block, and which parts contain such a block."""
    for shape, corners in _corners(cells, axes, wraps):
        yield shape, np.asarray(corners.any(axis=axes))


def _shapes(cells: Cells, segments: Sequence[_Segment]) -> Iterator[Shape]:
    """Yields every shape that a regular cluster of the usable devices can have."""
    if not segments:
        yield ()
        return
    for inner, good in segments[-1].options(cells):
        for outer in _shapes(good, segments[:-1]):
            yield (*outer, *inner)


def _place(
    cells: Cells, segments: Sequence[_Segment], shape: Shape
) -> list[tuple[int, ...]]:
    """Coordinates of the devices, in the order of the new cluster."""
    if not segments:
        return [()]
    first, depth = segments[0], len(segments[0].axes)
    good = cells
    for segment in reversed(segments[1:]):
        shift = tuple(axis - first.axes[0] for axis in segment.axes)
        sizes = tuple(shape[axis] for axis in shift)
        good = dataclasses.replace(segment, axes=shift).good(good, sizes)
    return [
        (*at, *inside)
        for at in first.place(good, shape[:depth])
        for inside in _place(cells[at], segments[1:], shape[depth:])
    ]


def largest_cluster(
    device: DeviceSpec, levels: Sequence[Level], there: Sequence[int], prefer: Prefer
) -> tuple[Shape, tuple[int, ...]]:
    """The shape and the positions of the largest regular cluster.

    Among clusters of the same size, ``prefer`` decides. If several of them are equally
    preferred, the cluster with the lowest positions is taken.

    Args:
      device: figures of a device, which tell whether a torus has wrap-around links.
      levels: levels of the whole cluster.
      there: positions of the remaining devices, at least one.
      prefer: which of several clusters of the same size to choose.
    """
    check_prefer(prefer)
    sizes = tuple(level.size for level in levels)
    cells = np.zeros(math.prod(sizes), np.bool_)
    cells[list(there)] = True
    cells = cells.reshape(sizes)
    segments = _segments(device, levels)

    def rank(shape: Shape) -> tuple[int, ...]:
        if prefer == "hosts":
            return math.prod(shape), math.prod(shape[:-1]), *shape
        return math.prod(shape), *shape[::-1]

    shape = max(_shapes(cells, segments), key=rank)
    found = zip(*_place(cells, segments, shape), strict=True)
    positions = np.ravel_multi_index(tuple(map(np.array, found)), sizes)
    return shape, tuple(positions.tolist())


def members_of(cluster: ClusterFields) -> Members:
    """The members of a cluster of equal devices; all devices if its field is None."""
    return cluster.members or everything(cluster.levels)


def parts(cluster: AnyCluster) -> tuple[AnyCluster, ...]:
    """The groups of a cluster, or the cluster itself if all its devices are equal."""
    return cluster.groups or (cluster,)


def select(
    cluster: AnyCluster, shape: Sequence[int], cells: Sequence[int]
) -> AnyCluster:
    """The part of a cluster that has the devices with these indices, in this shape."""
    of = members_of(cluster)
    held = tuple(of.positions[cell] for cell in cells)
    return dataclasses.replace(
        cluster,
        levels=cut_all(cluster.device, cluster.levels, shape),
        members=dataclasses.replace(of, positions=held, idle=()),
    )


def regrid(
    cluster: AnyCluster, of: Members, there: Iterable[int], prefer: Prefer
) -> AnyCluster:
    """The largest regular cluster of the devices at these positions."""
    left = sorted(there)
    shape, positions = largest_cluster(cluster.device, of.whole, left, prefer)
    idle = tuple(sorted(set(left) - set(positions)))
    return dataclasses.replace(
        cluster,
        levels=cut_all(cluster.device, of.whole, shape),
        members=dataclasses.replace(of, positions=positions, idle=idle),
    )


def _there(of: Members) -> set[int]:
    return {*of.positions, *of.idle}


def _known_names(cluster: ClusterFields) -> dict[str, set[int]]:
    """Name of a part, host or device -> ids of its devices that are available."""
    found: dict[str, set[int]] = {}
    for part in parts(cluster):
        of = members_of(part)
        there = _there(of)
        for name, block in of.blocks().items():
            held = {of.start + position for position in there.intersection(block)}
            if held:
                found[name] = held
    return found


def _all_hosts(cluster: ClusterFields) -> list[str]:
    return [name for part in parts(cluster) for name in members_of(part).host_names]


def _by_id(cluster: ClusterFields) -> dict[int, str]:
    found: dict[int, str] = {}
    for part in parts(cluster):
        of = members_of(part)
        there = sorted(_there(of))
        named = zip(there, of.names(there), strict=True)
        found |= {of.start + position: name for position, name in named}
    return found


def _names_of(
    cluster: ClusterFields, devices: Iterable[int], hosts: Iterable[int]
) -> list[str]:
    """The names of devices and hosts that are given by number."""
    ids, rows = _by_id(cluster), _all_hosts(cluster)
    found: list[str] = []
    for device in devices:
        if device not in ids:
            raise ClusterError(
                f"no device {device}; the devices are "
                f"{list_names([str(i) for i in sorted(ids)])}."
            )
        found.append(ids[device])
    for host in hosts:
        if not 0 <= host < len(rows):
            raise ClusterError(f"no host {host}; they are 0 to {len(rows) - 1}.")
        found.append(rows[host])
    return found


def _leaving(known: Mapping[str, set[int]], names: Sequence[str]) -> set[int]:
    """The ids of the devices that leave; an error if a device is named twice."""
    gone: set[int] = set()
    for name in names:
        if name not in known:
            raise ClusterError(
                f"{name!r} is not in the cluster; known are {list_names(list(known))}. "
                "Example: cluster.without('host3', 'host0/device1')."
            )
        if gone & known[name]:
            raise ClusterError(f"{name!r}, or a part of it, is named twice.")
        gone |= known[name]
    return gone


def without(
    cluster: AnyCluster,
    names: Sequence[str],
    devices: Sequence[int],
    hosts: Sequence[int],
    prefer: Prefer,
) -> list[AnyCluster]:
    """The groups (or the one cluster) that remain; see
    `autopar.cluster.Cluster.without`.
    """
    check_prefer(prefer)
    known = _known_names(cluster)
    gone = _leaving(known, [*names, *_names_of(cluster, devices, hosts)])
    left: list[AnyCluster] = []
    for part in parts(cluster):
        of = members_of(part)
        there = {p for p in _there(of) if of.start + p not in gone}
        if there == _there(of):
            left.append(part)
        elif there:
            left.append(regrid(part, of, there, prefer))
    if not left:
        raise ClusterError(f"no device is left of {cluster}: keep at least one.")
    return left


def with_devices(
    cluster: AnyCluster, devices: Sequence[int], prefer: Prefer
) -> list[AnyCluster]:
    """The groups (or the one cluster) after devices returned.

    See `autopar.cluster.Cluster.with_devices`.
    """
    check_prefer(prefer)
    wanted, left = set(devices), list[AnyCluster]()
    if not devices or len(wanted) < len(devices):
        raise ClusterError(f"with_devices: {list(devices)} must be different ids.")
    for part in parts(cluster):
        of = members_of(part)
        own = {p for p in range(size_of(of.whole)) if of.start + p in wanted}
        wanted -= {of.start + p for p in own}
        if there := sorted(own & _there(of)):
            raise ClusterError(
                f"with_devices: {list_names(list(of.names(there)))} is there already."
            )
        left.append(regrid(part, of, _there(of) | own, prefer) if own else part)
    if wanted:
        raise ClusterError(
            f"with_devices: {sorted(wanted)} are not devices of the whole cluster; "
            "describe the larger one anew, such as Cluster.parse('2x8:h100')."
        )
    return left


def with_link(
    cluster: AnyCluster, level: str, bandwidth: float | None, latency: float | None
) -> AnyCluster:
    """A cluster of equal devices with another bandwidth or latency of a level's
    link.
    """
    found = next((x for x in cluster.levels if x.name == level), None)
    if found is None:
        names = [x.name for x in cluster.levels]
        raise ClusterError(
            f"no level {level!r} of links; there are {list_names(names)}."
        )
    faster = _ratio(bandwidth, found.link.bandwidth_bytes_per_s)
    longer = _ratio(latency, found.link.latency_s)

    def change(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            dataclasses.replace(x, link=_exactly(at_rate(x.link, faster, longer), x))
            if x.name == level
            else x
            for x in levels
        )

    def _exactly(link: LinkSpec, was: Level) -> LinkSpec:
        """Sets the new bandwidth and latency exactly, without the rounding of a scaled
        value. So equal measurements give equal clusters.
        """
        if was.link != found.link:
            return link
        return dataclasses.replace(
            link,
            bandwidth_bytes_per_s=bandwidth or link.bandwidth_bytes_per_s,
            latency_s=link.latency_s if latency is None else latency,
        )

    of = cluster.members
    if of is not None:
        of = dataclasses.replace(of, whole=change(of.whole))
    return dataclasses.replace(cluster, levels=change(cluster.levels), members=of)


def _ratio(new: float | None, old: float) -> float:
    return 1.0 if new is None or not old else new / old


def groups_with_link(
    cluster: AnyCluster, level: str, bandwidth: float | None, latency: float | None
) -> tuple[tuple[AnyCluster, ...], LinkSpec]:
    """The groups and the link between them, after one link got other figures."""
    between = cluster.between
    assert between is not None
    if level == "between":
        faster = _ratio(bandwidth, between.bandwidth_bytes_per_s)
        return cluster.groups, at_rate(
            between, faster, _ratio(latency, between.latency_s)
        )
    group, _, name = level.partition("/")
    names = [members_of(part).group for part in cluster.groups]
    if group not in names or not name:
        raise ClusterError(
            f"no level {level!r} of links; write between, or a group and its level, "
            f"such as {names[0]}/{cluster.groups[0].levels[0].name}."
        )
    changed = [
        with_link(part, name, bandwidth, latency) if of == group else part
        for of, part in zip(names, cluster.groups, strict=True)
    ]
    return tuple(changed), between


def with_speeds(
    cluster: AnyCluster, speeds: Sequence[float]
) -> tuple[tuple[AnyCluster, ...], LinkSpec]:
    """The groups of parts with equal speeds, and the link between them; see
    `autopar.cluster.Cluster.with_speeds`.
    """
    if cluster.groups or cluster.members is not None:
        raise ClusterError(
            "with_speeds: the cluster must consist of equal devices, all in use."
        )
    outer = cluster.levels[0]
    each, rest = divmod(outer.size, len(speeds)) if speeds else (0, 1)
    if rest or not each:
        raise ClusterError(
            f"with_speeds: {len(speeds)} speeds for {outer.size} parts of level "
            f"{outer.name!r}: give a speed for each part, or for parts of equal size."
        )
    rest_sizes = tuple(level.size for level in cluster.levels[1:])
    groups = tuple(
        dataclasses.replace(
            cluster,
            device=cluster.device.at_speed(speed),
            levels=cut_all(
                cluster.device, cluster.levels, (each * len(list(run)), *rest_sizes)
            ),
        )
        for speed, run in itertools.groupby(speeds)
    )
    # The link between groups has no measured times (`check_groups`).
    return groups, dataclasses.replace(outer.link, topology="switch", measured=())


def _missing(of: Members) -> dict[str, set[int]]:
    """Host of the whole cluster -> positions of its missing devices, maybe none."""
    size, there = of.whole[-1].size, _there(of)
    return {
        name: set(range(i * size, (i + 1) * size)) - there
        for i, name in enumerate(of.host_names)
    }


def _names_for(of: Members, hosts: int) -> list[str]:
    """Names for a number of hosts that join: first those of hosts that left with all
    devices, then new names.
    """
    if hosts < 1:
        raise ClusterError(f"with_hosts: cannot add {hosts} hosts; give 1 or more.")
    size = of.whole[-1].size
    absent = [name for name, gone in _missing(of).items() if len(gone) == size]
    new = max(0, hosts - len(absent))
    prefix = f"{of.group}/" if of.group else ""
    grown = default_hosts(_longer(of.whole, new)) if new else ()
    fresh = [prefix + name for name in grown[num_hosts(of.whole) :]]
    return (absent + fresh)[:hosts]


def _longer(whole: tuple[Level, ...], hosts: int) -> tuple[Level, ...]:
    """The levels of the whole cluster after adding a number of hosts."""
    if len(whole) == 1 or is_torus(whole[0]):
        raise ClusterError(
            "with_hosts: no new host can join: the cluster describes no switch between "
            "hosts. Describe the larger cluster anew, such as "
            "Cluster.parse('2x8:h100')."
        )
    each = size_of(whole[1:-1])
    if hosts % each:
        raise ClusterError(
            f"with_hosts: a new {whole[0].name} has {each} hosts; add a multiple of "
            f"{each} hosts, not {hosts}."
        )
    outer = dataclasses.replace(whole[0], size=whole[0].size + hosts // each)
    return (outer, *whole[1:])


def _extend(of: Members, new: Sequence[str]) -> Members:
    """The same members in a larger whole cluster, whose new devices are not available
    yet.
    """
    if not new:
        return of
    prefix = f"{of.group}/" if of.group else ""
    plain = [name.removeprefix(prefix) for name in new]
    whole = _longer(of.whole, len(new))
    hosts = (*(of.hosts or default_hosts(of.whole)), *plain)
    if hosts == default_hosts(whole):
        hosts = ()
    return dataclasses.replace(of, whole=whole, hosts=hosts)


def _check_joining(
    of: Members, names: Sequence[str], missing: Mapping[str, set[int]]
) -> None:
    strays = [name for name in names if of.group and not _is_in(of.group, name)]
    if strays:
        raise ClusterError(
            f"with_hosts: {list_names(strays)} join no group; a name begins with "
            f"'{of.group}/'."
        )
    if len(set(names)) < len(names):
        raise ClusterError(
            f"with_hosts: a host is named twice: {list_names(list(names))}."
        )
    for name in names:
        if name in missing and not missing[name]:
            raise ClusterError(
                f"with_hosts: {name!r} and all its devices are there already; known "
                f"are {list_names(list(missing))}."
            )


def _grow(part: AnyCluster, names: Sequence[str], prefer: Prefer) -> AnyCluster:
    """A cluster of equal devices after these hosts joined."""
    of = members_of(part)
    missing = _missing(of)
    _check_joining(of, names, missing)
    larger = _extend(of, [name for name in names if name not in missing])
    joined = set[int]().union(*(_missing(larger)[name] for name in names))
    return regrid(part, larger, _there(of) | joined, prefer)


def with_hosts(
    cluster: AnyCluster, hosts: int | str | Sequence[str], prefer: Prefer
) -> list[AnyCluster]:
    """The groups (or the one cluster) after hosts joined; see
    `autopar.cluster.Cluster.with_hosts`.
    """
    check_prefer(prefer)
    if isinstance(hosts, int):
        if cluster.groups:
            raise ClusterError(
                "with_hosts: which group do they join? Name them, such as "
                f"cluster.with_hosts({_next_host(cluster.groups[0])!r})."
            )
        return [_grow(cluster, _names_for(members_of(cluster), hosts), prefer)]
    names = [hosts] if isinstance(hosts, str) else list(hosts)
    if not names:
        raise ClusterError("with_hosts: name at least one host, or say how many.")
    if not cluster.groups:
        return [_grow(cluster, names, prefer)]
    return _grown_groups(cluster, names, prefer)


def _is_in(group: str, name: str) -> bool:
    return name.startswith(f"{group}/")


def _next_host(group: ClusterFields) -> str:
    of = members_of(group)
    return f"{of.group}/host{num_hosts(of.whole)}"


def _grown_groups(
    cluster: AnyCluster, names: Sequence[str], prefer: Prefer
) -> list[AnyCluster]:
    """The groups after hosts joined; later groups get higher positions."""
    groups = {members_of(group).group: group for group in cluster.groups}
    mine = {name: [n for n in names if _is_in(name, n)] for name in groups}
    strays = [n for n in names if not any(_is_in(group, n) for group in groups)]
    if strays:
        raise ClusterError(
            f"with_hosts: {list_names(strays)} join no group; a name begins with one "
            f"of {list_names(list(groups))}, such as {_next_host(cluster.groups[0])!r}."
        )
    left: list[AnyCluster] = []
    moved = 0
    for name, group in groups.items():
        before = size_of(members_of(group).whole)
        grown = _grow(group, mine[name], prefer) if mine[name] else group
        of = members_of(grown)
        shifted = dataclasses.replace(of, start=of.start + moved)
        left.append(dataclasses.replace(grown, members=shifted))
        moved += math.prod(level.size for level in of.whole) - before
    return left
