"""Clusters of unequal devices: groups of equal ones, and a link between the groups.

What plans for equal devices reads `device` or `levels`, which a cluster of groups
refuses: it has neither, and must not pass for a cluster that has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, final

from autopar.cluster.errors import ClusterError
from autopar.cluster.fields import AnyCluster, ClusterFields
from autopar.cluster.members import Members, everything, list_names, size_of
from autopar.cluster.presets import PRESETS
from autopar.cluster.specs import DeviceSpec, Level, LinkSpec


def refuse(cluster: ClusterFields, what: str) -> ClusterError:
    """The error of what only a cluster of equal devices has."""
    return ClusterError(
        f"{what} needs equal devices, and {cluster} has groups of unequal ones: plan "
        f"one group at a time, cluster.groups[0] to "
        f"cluster.groups[{len(cluster.groups) - 1}]."
    )


@final
class _EqualOnly:
    """The value of a field that a cluster of groups lacks: reading it is an error.

    It defines no `__set__`, so that a cluster of equal devices holds plain values,
    which are read before this.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cluster: ClusterFields | None, owner: type) -> None:
        if cluster is not None:
            raise refuse(cluster, f"cluster.{self._name}")
        # `dataclasses` asks the class for the default.


def equal_only() -> Any:
    """The default of a field that only clusters of equal devices have."""
    return _EqualOnly()


def split_text(description: str) -> list[str]:
    """The texts of the groups: what stands between plus signs.

    A plus sign may also be that of an exponent, in the value of an option.

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
    """The links beyond a group, or None if nothing tells."""
    base = PRESETS.get(device.name)
    if any(level.link.topology != "switch" for level in levels):
        return None
    if len(levels) > 1:
        return levels[0].link
    return base.outer if base and not base.is_torus else None


def default_between(groups: Sequence[ClusterFields]) -> LinkSpec:
    """A link as slow as the slowest of the groups' outermost networks."""
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


def place(groups: Sequence[AnyCluster]) -> tuple[AnyCluster, ...]:
    """The groups with names, and with positions one group after the other.

    Groups that have been in a cluster of groups keep both.
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
    """The groups less the names and positions that `place` gives them again."""
    bare = tuple(_bare(group) for group in groups)
    return bare if place(bare) == tuple(groups) else tuple(groups)


def _bare(group: AnyCluster) -> AnyCluster:
    of: Members | None = group.members
    if of is not None:
        of = dataclasses.replace(of, group="", start=0)
    return dataclasses.replace(group, members=of)


def check(groups: Sequence[ClusterFields], between: LinkSpec) -> None:
    """Raises `ClusterError` where these make no cluster of groups."""
    if len(groups) < 2:
        raise ClusterError("Cluster: one group of equal devices needs no groups=.")
    if between.topology != "switch" or between.measured:
        raise ClusterError(
            "Cluster: the link between groups is a switch, without measured times."
        )


def is_default(groups: Sequence[ClusterFields], between: LinkSpec | None) -> bool:
    """Whether the link between the groups is what it would be if not given."""
    if any(outer_network(group.device, group.levels) is None for group in groups):
        return False
    return between == default_between(groups)


def slice_of(cluster: AnyCluster, shape: Sequence[int], offset: int) -> AnyCluster:
    """The slice that begins at `offset`, counted through all groups."""
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
