"""What a cluster is called in one line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.cluster import groups as groups_of
from autopar.cluster import text
from autopar.cluster.fields import ClusterFields
from autopar.cluster.members import Members, listed, size_of


def _runs(positions: Sequence[int]) -> Iterator[str]:
    """Yields runs of consecutive positions: 0-3, 5."""
    pairs = enumerate(positions)
    for _, run in itertools.groupby(pairs, key=lambda pair: pair[1] - pair[0]):
        ends = [position for _, position in run]
        yield f"{ends[0]}-{ends[-1]}" if len(ends) > 1 else str(ends[0])


def _place(of: Members) -> list[str]:
    """The group, the positions that are not all, and how many devices are idle."""
    said = [of.group] if of.group else []
    if of.positions != tuple(range(size_of(of.whole))):
        shape = "x".join(str(level.size) for level in of.whole)
        said.append(f"devices {listed(list(_runs(of.positions)))} of {shape}")
    return said + ([f"{len(of.idle)} idle"] if of.idle else [])


def _of_groups(cluster: ClusterFields) -> str:
    """The groups' texts, which `parse` reads back if they say everything."""
    bare = groups_of.unplaced(cluster.groups)
    said = "+".join(map(str, bare))
    if groups_of.is_default(bare, cluster.between) and "(" not in said:
        return said
    return f"{said} (custom {cluster.fingerprint()[:8]})"


def cluster_text(cluster: ClusterFields) -> str:
    """The short form if there is one; otherwise the shape, the name and what differs.

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
