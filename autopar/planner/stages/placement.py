"""Where the stages of a pipeline lie: slices next to each other, in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from autopar.cluster import Cluster
from autopar.cluster.slices import block, shapes
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.search import plan_mesh
from autopar.plans import NO_SCHEDULE, Plan

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


def stage_cluster(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The devices of a stage as a cluster.

    Args:
      cluster: all devices.
      devices: positions of those of the stage.

    Raises:
      PlanError: the cluster has no such slice.
    """
    wanted, begin = set(devices), 0
    for part in cluster.groups or (cluster,):
        first = min(wanted) - begin
        if 0 <= first < part.num_devices:
            for shape in shapes(part.levels):
                if math.prod(shape) != len(wanted):
                    continue
                cells = block(part.levels, shape, first)
                if {cell + begin for cell in cells} == wanted:
                    return cluster.slice(shape, min(wanted))
        begin += part.num_devices
    raise PlanError(
        f"devices {', '.join(map(str, sorted(wanted)))} are no slice of {cluster}: "
        "plan again for this cluster."
    )


def stage_pricers(plan: Plan, cluster: Cluster | None = None) -> tuple[Pricer, ...]:
    """The pricer of each stage of a plan, also of a plan's only stage.

    Args:
      plan: the plan.
      cluster: all devices; None: those that the plan was made for.

    Raises:
      PlanError: the cluster has not the stages' meshes.
    """
    whole = plan.cluster.read() if cluster is None else cluster
    if len(plan.stages) == 1:
        parts = (whole,)
    else:
        parts = tuple(stage_cluster(whole, stage.devices) for stage in plan.stages)
    return tuple(
        Pricer(part, plan_mesh(part, stage.axis_names, stage.axis_sizes))
        for part, stage in zip(parts, plan.stages, strict=True)
    )


def one_stage(plan: Plan, number: int) -> Plan:
    """A stage of a plan as a plan of its own.

    Args:
      plan: the plan.
      number: of the stage, from 0.
    """
    return msgspec.structs.replace(
        plan, stages=(plan.stages[number],), schedule=NO_SCHEDULE, pipeline=None
    )
