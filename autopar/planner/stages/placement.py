"""Where the stages of a pipeline lie: slices next to each other, in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.errors import PlanError

Wanted = tuple[int, tuple[int, ...]]


def place(cluster: Cluster, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
    """The devices of each stage, as positions in the cluster.

    Stages are placed in their order, each behind the last where its slice may begin
    there. Where some then find no room, the largest are placed first.

    Args:
      cluster: the devices.
      wanted: by stage, its group of equal devices and the shape of its slice.

    Raises:
      PlanError: the slices do not fit beside each other.
    """
    parts = cluster.groups or (cluster,)
    begins = [sum(part.num_devices for part in parts[:k]) for k in range(len(parts))]
    out: dict[int, tuple[int, ...]] = {}
    for number, part in enumerate(parts):
        stages = [k for k, (group, _) in enumerate(wanted) if group == number]
        found = _in_order(part, [(k, wanted[k][1]) for k in stages])
        if found is None:
            by_size = sorted(stages, key=lambda k: -math.prod(wanted[k][1]))
            found = _in_order(part, [(k, wanted[k][1]) for k in by_size])
        if found is None:
            shapes = ", ".join("x".join(map(str, wanted[k][1])) for k in stages)
            raise PlanError(
                f"stages of {shapes} do not fit beside each other in {part}."
            )
        for stage, cells in found.items():
            out[stage] = tuple(begins[number] + cell for cell in cells)
    return [out[k] for k in range(len(wanted))]


def _in_order(
    cluster: Cluster, wanted: Sequence[tuple[int, tuple[int, ...]]]
) -> dict[int, tuple[int, ...]] | None:
    """Places slices one behind the other; None: the last ones find no room."""
    free = [True] * cluster.num_devices
    inside = {m: k for k, m in enumerate(cluster.ids)}
    out: dict[int, tuple[int, ...]] = {}
    last: dict[tuple[int, ...], int] = {}
    for stage, shape in wanted:
        step = _step(cluster, shape)
        cells = None
        for offset in range(last.get(shape, 0), cluster.num_devices, step):
            if not free[offset]:
                continue
            try:
                ids = cluster.slice(shape, offset).ids
            except ValueError:
                continue
            tried = tuple(inside[i] for i in ids)
            if all(free[c] for c in tried):
                cells, last[shape] = tried, offset
                break
        if cells is None:
            return None
        for cell in cells:
            free[cell] = False
        out[stage] = cells
    return out


def _step(cluster: Cluster, shape: Sequence[int]) -> int:
    """Devices between places where a slice may begin, at least."""
    levels = [level.size for level in cluster.levels]
    step = 1
    for size, whole in zip(reversed(shape), reversed(levels), strict=True):
        step *= size
        if size < whole:
            break
    first = next((k for k, s in enumerate(shape) if s > 1), len(shape) - 1)
    return min(
        step,
        math.prod(levels[first + 1 :])
        * (shape[first] if first == len(shape) - 1 else 1),
    )
