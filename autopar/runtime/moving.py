"""What moving the state to another plan costs, before it is moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.plans import Plan
from autopar.runtime.creation import plan_shardings
from autopar.runtime.meshes import stage_meshes

# Of each dimension, the range of elements that a device holds.
_Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What a move brings to devices that lack it.

    Attributes:
      nbytes: over all devices.
      most_bytes: of the device that lacks most.
    """

    nbytes: float
    most_bytes: float


def move_of(
    shardings: Sequence[Any], structs: Sequence[Any], plan: Plan, devices: Sequence[Any]
) -> Move:
    """What a state must move to lie as a plan wants it.

    A device keeps what it holds: of each array, only the elements that it lacks are
    counted.

    Args:
      shardings: of the arrays now.
      structs: their shapes and dtypes.
      plan: how they will lie.
      devices: of the plan's cluster.
    """
    wanted = plan_shardings(plan, stage_meshes(plan, devices), len(structs))
    lacking: dict[Any, float] = {}
    known: dict[Any, Mapping[Any, int]] = {}
    for old, new, struct in zip(shardings, wanted, structs, strict=True):
        key = (old, new, struct.shape)
        if key not in known:
            known[key] = _lacking(old, new, struct.shape)
        for device, count in known[key].items():
            more = count * struct.dtype.itemsize
            lacking[device] = lacking.get(device, 0.0) + more
    counts = list(lacking.values())
    return Move(nbytes=math.fsum(counts), most_bytes=max(counts, default=0.0))


def _lacking(old: Any, new: Any, shape: tuple[int, ...]) -> dict[Any, int]:
    """Of each device of the new sharding, the elements that it must be sent."""
    held = {d: _box(x, shape) for d, x in old.devices_indices_map(shape).items()}
    found: dict[Any, int] = {}
    for device, index in new.devices_indices_map(shape).items():
        box = _box(index, shape)
        found[device] = _size(box) - _common(box, held.get(device))
    return found


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> _Box:
    return tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))


def _size(box: _Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _common(box: _Box, other: _Box | None) -> int:
    """The elements that two boxes share."""
    if other is None:
        return 0
    pairs = zip(box, other, strict=True)
    return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def slowest_bytes_per_s(cluster: Cluster) -> float:
    """The rate of the slowest links of a cluster, for each device."""
    links = [
        level.link
        for part in cluster.groups or (cluster,)
        for level in part.levels
        if level.size > 1
    ]
    links += [cluster.between] if cluster.between is not None else []
    return min((x.bandwidth_bytes_per_s for x in links), default=math.inf)
