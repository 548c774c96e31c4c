"""Converts clusters to plain data (dictionaries, lists, texts, numbers) and back.

TOML files and plan files hold clusters in this form. Unknown keys are errors. A cluster
that is written and read again is equal to the original.

A cluster of unequal devices consists of groups of equal devices and a link between the
groups.

Code that supports only equal devices reads the fields `device` or `levels`. A cluster
of groups has neither, so reading them raises an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import msgspec

from autopar.cluster.members import (
    AnyCluster,
    ClusterFields,
    Members,
    everything,
    list_names,
    size_of,
)
from autopar.cluster.presets import PRESETS, preset
from autopar.cluster.specs import (
    CALIBRATIONS,
    HOST_BYTES_PER_S,
    Calibration,
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Kind,
    Level,
    LinkSpec,
    show,
)


def unequal_error(cluster: ClusterFields, what: str) -> ClusterError:
    """The error to raise if a feature supports only clusters of equal devices."""
    return ClusterError(
        f"{what} needs equal devices, and {cluster} has groups of unequal ones: plan "
        f"one group at a time, cluster.groups[0] to "
        f"cluster.groups[{len(cluster.groups) - 1}]."
    )


@final
class _EqualOnly:
    """The descriptor of a field that a cluster of groups lacks; reading it raises an
    error.

    The class defines no `__set__`. So in a cluster of equal devices the field is a
    plain attribute, which takes precedence over the descriptor.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cluster: ClusterFields | None, owner: type) -> None:
        if cluster is not None:
            raise unequal_error(cluster, f"cluster.{self._name}")
        # `dataclasses` reads the default value of the field from the class. For a class
        # this method returns None, so the default is None.


def equal_only() -> Any:
    """The default value of a field that only clusters of equal devices have."""
    return _EqualOnly()


def split_text(description: str) -> list[str]:
    """Splits the text of a cluster at plus signs into the texts of its groups.

    A plus sign in the exponent of a number does not separate groups.

    >>> split_text("4x8:h100,network=1e+11B/s+2x4:v5e+1x4:t4")
    ['4x8:h100,network=1e+11B/s', '2x4:v5e', '1x4:t4']
    """
    found = [""]
    for piece in re.split(r"(\+)", description):
        if piece == "+" and not re.search(r"=\s*[0-9.]+e$", found[-1]):
            found.append("")
        else:
            found[-1] += piece
    return found


def outer_network(device: DeviceSpec, levels: Sequence[Level]) -> LinkSpec | None:
    """The network that leads out of a group; None if it is not known."""
    base = PRESETS.get(device.name)
    if any(level.link.topology != "switch" for level in levels):
        return None
    if len(levels) > 1:
        return levels[0].link
    return base.outer if base and not base.is_torus else None


def default_between(groups: Sequence[ClusterFields]) -> LinkSpec:
    """The default link between groups: as fast as the slowest of their outermost
    networks.
    """
    links = [outer_network(group.device, group.levels) for group in groups]
    for i, link in enumerate(links):
        if link is None:
            raise ClusterError(
                f"no network leads out of group {i} ({groups[i]}): describe the link "
                "between the groups in a TOML file, as the table [between]."
            )
    known = [link for link in links if link is not None]
    return LinkSpec(
        latency_s=max(link.latency_s for link in known),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in known),
    )


def place_groups(groups: Sequence[AnyCluster]) -> tuple[AnyCluster, ...]:
    """Gives groups names and consecutive positions.

    Groups that were already part of a cluster of groups keep their names and positions.
    """
    placed: list[AnyCluster] = []
    start = 0
    for i, group in enumerate(groups):
        if group.groups:
            raise ClusterError(f"group {i} is itself of groups: {group}.")
        of = group.members or everything(group.levels)
        if not of.group:
            of = dataclasses.replace(of, group=f"group{i}", start=start)
        placed.append(dataclasses.replace(group, members=of))
        start = of.start + size_of(of.whole)
    _check_places(placed)
    return tuple(placed)


def _check_places(groups: Sequence[ClusterFields]) -> None:
    ids = [i for group in groups for i in group.ids]
    names = [group.members.group for group in groups if group.members]
    if len(set(ids)) < len(ids) or len(set(names)) < len(names):
        raise ClusterError(
            f"groups must have different names and devices: {list_names(names)}."
        )


def without_places(groups: Sequence[AnyCluster]) -> tuple[AnyCluster, ...]:
    """Removes names and positions from groups, if `place_groups` would give them the
    same again.
    """
    bare = tuple(_bare(group) for group in groups)
    return bare if place_groups(bare) == tuple(groups) else tuple(groups)


def _bare(group: AnyCluster) -> AnyCluster:
    of: Members | None = group.members
    if of is not None:
        of = dataclasses.replace(of, group="", start=0)
    return dataclasses.replace(group, members=of)


def check_groups(groups: Sequence[ClusterFields], between: LinkSpec) -> None:
    """Raises `ClusterError` unless these groups can form a cluster."""
    if len(groups) < 2:
        raise ClusterError("Cluster: one group of equal devices needs no groups=.")
    if between.topology != "switch" or between.measured:
        raise ClusterError(
            "Cluster: the link between groups is a switch, without measured times."
        )


def is_default(groups: Sequence[ClusterFields], between: LinkSpec | None) -> bool:
    """Whether the link between the groups is the default link."""
    if any(outer_network(group.device, group.levels) is None for group in groups):
        return False
    return between == default_between(groups)


def slice_of(cluster: AnyCluster, shape: Sequence[int], offset: int) -> AnyCluster:
    """The slice of a shape that begins at device ``offset``, counted through all
    groups.
    """
    before = 0
    for group in cluster.groups:
        if before <= offset < before + group.num_devices:
            try:
                return group.slice(shape, offset - before)
            except ClusterError as error:
                name = group.members.group if group.members else ""
                raise ClusterError(
                    f"{error} Offsets here count from device {before}, the first of "
                    f"{name}."
                ) from error
        before += group.num_devices
    raise ClusterError(f"no device {offset}: the groups have {before}.")


Data = dict[str, Any]
C = TypeVar("C")


class _Calibration(msgspec.Struct, forbid_unknown_fields=True):
    """The table [device.calibration]; a missing value is that of the device's kind."""

    skew: float | None = None
    half_rate_side: float | None = None
    vector_slowdown: float | None = None
    patch_passes: float | None = None
    memory_overhead: float | None = None
    combined_kinds: list[Kind] | None = None
    combined_bytes: float | None = None
    combined_arrays: int | None = None
    arrays_apart: bool | None = None
    forms_reduce_scatter: bool | None = None
    copies_pieces: bool | None = None
    reassociates: bool | None = None
    overlap: float | None = None
    contention: float | None = None
    whole_messages: bool | None = None
    makes_room: bool | None = None


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    """The table [device]; missing values are taken from its ``preset``."""

    preset: str | None = None
    name: str | None = None
    kind: str | None = None
    peak_flops_per_s: dict[str, float] | None = None
    memory_bytes: int | float | None = None  # so that 80e9 will do
    memory_bandwidth_bytes_per_s: float | None = None
    matmul_efficiency: float | None = None
    kernel_latency_s: float | None = None
    vector_flops_per_s: float | None = None
    sustained: float | None = None
    power_part: float | None = None
    rates: str | None = None
    workspace_bytes: int | float | None = None
    on_chip_bytes: int | float | None = None
    host_bytes_per_s: float | None = None
    codec_s_per_element: dict[str, float] | None = None
    calibration: _Calibration | None = None


class _Measured(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of [[level.measured]]."""

    kind: str
    group_size: int
    latency_s: float
    s_per_byte: float
    large_s_per_byte: float = 0.0
    relative_error: float = 0.0


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of [[level]]; the outermost level comes first."""

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    topology: str = "switch"
    rates: str = ""
    measured: list[_Measured] = []


class _Members(msgspec.Struct, forbid_unknown_fields=True):
    """The table [members]: positions of devices in a whole cluster with the levels
    ``level``.
    """

    positions: list[int]
    idle: list[int] = []
    group: str = ""
    start: int = 0
    level: list[_Level] | None = None


class _Between(msgspec.Struct, forbid_unknown_fields=True):
    """The table [between]: the link between groups."""

    latency_s: float
    bandwidth_bytes_per_s: float


class _Equal(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster of equal devices: a whole file, or one entry of [[group]]."""

    device: _Device
    level: list[_Level]
    hosts: list[str] = []
    members: _Members | None = None


class _Unequal(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster of groups."""

    group: list[_Equal]
    between: _Between | None = None


# The decoder is made when this module is imported, because msgspec crashes if two
# threads analyse a type at the same time. To make the decoder, msgspec analyses all
# types that `msgspec.convert` needs later, including _Equal.
_DECODER = msgspec.json.Decoder(_Unequal)


def _whole(name: str, value: float) -> int:
    if not abs(value) < 1e99:  # also infinity, or a number with too many digits
        raise ClusterError(f"{name} must be positive and finite, got {show(value)}.")
    return round(value)


def _device(given: _Device) -> DeviceSpec:
    values: dict[str, Any] = {}
    if given.preset is not None:
        base = preset(given.preset).device
        values = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    own = msgspec.structs.asdict(given)
    del own["preset"]
    values.update({key: value for key, value in own.items() if value is not None})
    for name in ("memory_bytes", "workspace_bytes", "on_chip_bytes"):
        if own[name] is not None:
            values[name] = _whole(name, own[name])
    if given.peak_flops_per_s is not None:
        values["peak_flops_per_s"] = tuple(given.peak_flops_per_s.items())
    if given.codec_s_per_element is not None:
        values["codec_s_per_element"] = tuple(given.codec_s_per_element.items())
    if given.calibration is not None and values.get("kind") in CALIBRATIONS:
        values["calibration"] = _calibration(given.calibration, values["kind"])
    values.setdefault("host_bytes_per_s", _usual_host_rate(values.get("name", "")))
    required = [
        f.name
        for f in dataclasses.fields(DeviceSpec)
        if f.default is dataclasses.MISSING and f.name not in values
    ]
    if required:
        raise ClusterError(
            f"[device] lacks {', '.join(required)}: give them, or preset = 'h100'."
        )
    return DeviceSpec(**values)


def _calibration(given: _Calibration, kind: str) -> Calibration:
    own = {k: v for k, v in msgspec.structs.asdict(given).items() if v is not None}
    if given.combined_kinds is not None:
        own["combined_kinds"] = tuple(given.combined_kinds)
    return dataclasses.replace(CALIBRATIONS[kind], **own)


def _level(given: _Level) -> Level:
    measured = [CollectiveFit(**msgspec.structs.asdict(fit)) for fit in given.measured]
    link = LinkSpec(
        latency_s=given.latency_s,
        bandwidth_bytes_per_s=given.bandwidth_bytes_per_s,
        topology=given.topology,
        rates=given.rates,
        measured=tuple(measured),
    )
    return Level(name=given.name, size=given.size, link=link)


def _members(given: _Equal, levels: tuple[Level, ...]) -> Members | None:
    """The members that a file lists, or else members with the host names in the
    file.
    """
    hosts = tuple(given.hosts)
    if given.members is None:
        return dataclasses.replace(everything(levels), hosts=hosts) if hosts else None
    own = given.members
    whole = levels if own.level is None else tuple(_level(x) for x in own.level)
    return Members(
        whole=whole,
        positions=tuple(own.positions),
        idle=tuple(own.idle),
        hosts=hosts,
        group=own.group,
        start=own.start,
    )


def _equal(make: Callable[..., C], given: _Equal) -> C:
    levels = tuple(_level(level) for level in given.level)
    return make(
        device=_device(given.device), levels=levels, members=_members(given, levels)
    )


def read_equal(data: object) -> tuple[DeviceSpec, tuple[Level, ...]]:
    """Reads the device and the levels from the data of a profile."""
    given = msgspec.convert(data, _Equal)
    if given.hosts or given.members:
        raise ClusterError("a profile has no hosts and no [members].")
    return _device(given.device), tuple(_level(level) for level in given.level)


def read(make: Callable[..., C], data: object) -> C:
    """Reads a cluster from data; ``make`` creates it.

    Raises:
      ValueError: msgspec's error for a wrong type or name, or a `ClusterError`.
    """
    if not (isinstance(data, Mapping) and "group" in data):
        return _equal(make, msgspec.convert(data, _Equal))
    given = msgspec.convert(data, _Unequal)
    between = given.between and LinkSpec(**msgspec.structs.asdict(given.between))
    return make(
        groups=tuple(_equal(make, group) for group in given.group), between=between
    )


def _fields(values: Any, *leave_out: str) -> Data:
    names = [f.name for f in dataclasses.fields(values) if f.name not in leave_out]
    return {name: getattr(values, name) for name in names}


def _usual_host_rate(name: str) -> float:
    """`DeviceSpec.host_bytes_per_s` of a device whose data does not state it."""
    known = PRESETS.get(name)
    return HOST_BYTES_PER_S if known is None else known.device.host_bytes_per_s


def _device_data(device: DeviceSpec) -> Data:
    tables = ("peak_flops_per_s", "codec_s_per_element")
    own = ("rates", "workspace_bytes", "on_chip_bytes", "power_part")
    numbers = _fields(device, *tables, *own, "host_bytes_per_s", "calibration")
    given = {name: getattr(device, name) for name in own}
    given.update(on_chip_bytes=device.on_chip_bytes or None)
    # The field is written only for a device with a power limit, because earlier
    # versions of the format lack it.
    given.update(power_part=device.power_part if device.power_part < 1 else None)
    if device.host_bytes_per_s != _usual_host_rate(device.name):
        given.update(host_bytes_per_s=device.host_bytes_per_s)
    numbers |= {name: value for name, value in given.items() if value not in ("", None)}
    for name in tables:
        pairs = dict(getattr(device, name))
        numbers |= {name: pairs} if pairs else {}
    return numbers | _calibration_data(device)


def _calibration_data(device: DeviceSpec) -> Data:
    """The fields of a device's calibration that differ from its kind's calibration."""
    if device.calibration is None:
        return {}
    usual = _fields(CALIBRATIONS[device.kind])
    own = _fields(device.calibration)
    changed = {name: own[name] for name in own if own[name] != usual[name]}
    if "combined_kinds" in changed:
        changed["combined_kinds"] = list(changed["combined_kinds"])
    return {"calibration": changed}


def _level_data(level: Level) -> Data:
    fits = [_fields(fit) for fit in level.link.measured]
    numbers = _fields(level, "link") | _fields(level.link, "rates", "measured")
    numbers |= {"rates": level.link.rates} if level.link.rates else {}
    return numbers | ({"measured": fits} if fits else {})


def _members_data(members: Members | None, levels: Sequence[Level]) -> Data:
    if members is None:
        return {}
    hosts: Data = {"hosts": list(members.hosts)} if members.hosts else {}
    whole = tuple(levels)
    if members == dataclasses.replace(everything(whole), hosts=members.hosts):
        return hosts
    own: Data = {"positions": list(members.positions)}
    own |= {"idle": list(members.idle)} if members.idle else {}
    own |= {"group": members.group} if members.group else {}
    own |= {"start": members.start} if members.start else {}
    if members.whole != whole:
        own["level"] = [_level_data(level) for level in members.whole]
    return hosts | {"members": own}


def _equal_data(cluster: ClusterFields) -> Data:
    extra = _members_data(cluster.members, cluster.levels)
    return {
        **({"hosts": extra["hosts"]} if "hosts" in extra else {}),
        "device": _device_data(cluster.device),
        "level": [_level_data(level) for level in cluster.levels],
        **({"members": extra["members"]} if "members" in extra else {}),
    }


def write(cluster: ClusterFields) -> Data:
    """Converts a cluster to data from which `read` makes an equal cluster."""
    if cluster.between is None:
        return _equal_data(cluster)
    return {
        "group": [_equal_data(group) for group in without_places(cluster.groups)],
        "between": _fields(cluster.between, "topology", "rates", "measured"),
    }
