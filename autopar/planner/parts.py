"""Plans for a part of a cluster, if the number of devices does not divide the batch.

A mesh axis splits rows only if it divides their number. For example, 5 devices cannot
split a batch of 32 rows, but 4 of them can, and then run a step about four times as
fast as one device. So the planner also plans for the largest part of the cluster that
divides the batch, and takes the faster plan. The other devices stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.edited import with_status
from autopar.planner.options import PlanOptions
from autopar.planner.recipes import has_context
from autopar.plans import Plan
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_dims
from autopar.units import number_of


class UnsplitBatchError(PlanError):
    """No mesh axis divides the rows of the batch."""


def dividing_part(cluster: Cluster, rows: int) -> Cluster | None:
    """The largest part of a cluster that divides a batch; None if the whole divides it.

    The last devices stay idle.

    >>> str(dividing_part(Cluster.parse("6:cpu"), 32))
    '4:cpu (devices 0-3 of 6)'
    >>> dividing_part(Cluster.parse("8:cpu"), 32)
    """
    if rows % cluster.num_devices == 0:
        return None
    for count in range(cluster.num_devices - 1, 0, -1):
        if rows % count == 0:
            part = cluster.without(devices=cluster.ids[count:])
            if rows % part.num_devices == 0:
                return part
    return None


def batch_rows(analysis: Analysis) -> dict[str, int]:
    """The number of rows of each batch array in a microbatch, by the array's path."""
    graph, parts = analysis.graph, analysis.microbatches
    return {
        graph.inputs[k].path: graph.values[graph.inputs[k].value].shape[dim] // parts
        for k, dim in batch_dims(graph).items()
    }


def part_to_try(
    analysis: Analysis, cluster: Cluster, options: PlanOptions
) -> Cluster | None:
    """The part of a cluster whose plan may be faster than a plan for all devices.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      options: options of the plan.

    Returns:
      The part; None: all devices divide the batch, or the options are about all
      devices.
    """
    mine = options.pins or options.axis_names or options.stages not in (None, 1, "auto")
    if not (options.may_idle and options.split_batch) or mine or cluster.groups:
        return None
    rows = math.gcd(*batch_rows(analysis).values())
    if isinstance(options.microbatches, int):
        rows //= math.gcd(rows, options.microbatches)
    if not rows or has_context(analysis):
        return None
    part = dividing_part(cluster, rows)
    # A program runs on the cluster's first devices, so the part consists of them.
    first = part is not None and part.ids == cluster.ids[: part.num_devices]
    return part if first else None


def plan_best_part(
    cluster: Cluster, part: Cluster, search: Callable[[Cluster], Plan]
) -> Plan:
    """Returns the faster one of the plans for a cluster and for a part of it.

    Args:
      cluster: the devices to plan for.
      part: a part of these devices (`part_to_try`).
      search: finds a plan.

    Raises:
      UnsplitBatchError: no mesh axis divides the batch, and the part has less than half
        of the devices.
      InfeasibleError: no plan for the cluster fits the memory of a device.
    """
    try:
        whole = search(cluster)
    except UnsplitBatchError:
        if 2 * part.num_devices < cluster.num_devices:
            raise
        whole = None
    try:
        smaller = search(part)
    except PlanError:  # for example, one device needs more memory
        if whole is None:
            raise
        return whole
    if whole is not None and whole.predicted.step_s <= smaller.predicted.step_s:
        return whole
    idle = number_of(cluster.num_devices - part.num_devices, "device")
    why = f"{idle} idle, because {part.num_devices} devices divide the batch"
    say(why)
    return with_status(smaller, f"{smaller.solver.status}; {why}")
