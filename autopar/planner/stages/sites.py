"""The stages of a plan as clusters of their own."""

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
