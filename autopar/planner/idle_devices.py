"""Plans for a number of devices that does not divide the batch.

A mesh axis splits rows only if its size divides their number. For example, 5 devices
cannot split a batch of 32 rows. But 4 of them can, and then run a step about four
times as fast as one device. And all 5 can split 35 rows, of which 3 are padding. So
the planner also plans for the largest part of the cluster that divides the batch, and
for padded rows, and takes the fastest plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.deadline import OutOfTimeError
from autopar.planner.edited import with_status
from autopar.planner.options import PlanOptions
from autopar.planner.recipes import has_context
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_dims, batch_rows
from autopar.steps.for_devices import alternatives
from autopar.steps.padding import padded_rows, with_row_multiple
from autopar.units import number_of


class UnsplitBatchError(PlanError):
    """No mesh axis divides the rows of the batch."""

    def because(self, reason: str) -> UnsplitBatchError:
        """The error with one more reason, before the line that says what to try."""
        head, *tail = str(self).rpartition("\n  try:")
        return UnsplitBatchError("".join((head, f"\n  {reason}", *tail)))


def dividing_part(cluster: Cluster, rows: int) -> Cluster | None:
    """The largest part of a cluster that divides a batch; None if the whole divides it.

    The devices outside of the part, which are the last devices, stay idle.

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


def rows_by_path(analysis: Analysis) -> dict[str, int]:
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
    rows = math.gcd(*rows_by_path(analysis).values())
    if isinstance(options.microbatches, int):
        rows //= math.gcd(rows, options.microbatches)
    if not rows or has_context(rewrites(analysis, cluster)[-1]):
        return None
    part = dividing_part(cluster, rows)
    # A program runs on the cluster's first devices, so the part consists of them.
    first = part is not None and part.ids == cluster.ids[: part.num_devices]
    return part if first else None


def rewrites(
    analysis: Analysis, cluster: Cluster, *, names_codecs: bool = False
) -> list[Analysis]:
    """The rewrites of a step that a plan may choose from, the boldest one last."""
    devices, device = cluster.num_devices, cluster.device
    return alternatives(analysis, devices, device, names_codecs=names_codecs)


def padded_part(
    analysis: Analysis, cluster: Cluster, part: Cluster, options: PlanOptions
) -> Cluster | None:
    """The devices that a plan with padded rows may use; None if it cannot pay.

    Padding is worth a search if the devices then work on fewer rows each than those of
    ``part``. Of all numbers of devices with this share of the rows, the number is taken
    that splits the carried state into the smallest shards.

    Args:
      analysis: the step.
      cluster: the devices to plan for.
      part: the part of these devices whose number divides the batch (`part_to_try`).
      options: options of the plan.
    """
    devices, rows = cluster.num_devices, batch_rows(analysis.graph) // options.count
    each = -(-rows // devices)
    if not options.may_pad or each * part.num_devices >= rows:
        return None
    counts = [n for n in range(-(-rows // each), devices + 1) if each * n < 2 * rows]
    if not counts:
        return None
    count = min(counts, key=lambda n: (_state_share_bytes(analysis, n), n))
    if count < devices:
        few = cluster.without(devices=cluster.ids[count:])
        if few.ids == cluster.ids[:count]:
            return few
    return cluster if counts[-1] == devices else None


def _state_share_bytes(analysis: Analysis, count: int) -> float:
    """Bytes of carried state on a device, if each array has as many shards as it can.

    Args:
      analysis: the step.
      count: the number of devices.
    """
    out = 0.0
    for given in analysis.graph.inputs:
        if given.output >= 0:
            value, left = analysis.graph.values[given.value], count
            for size in value.shape:
                left //= math.gcd(left, size)
            out += value.nbytes * left / count
    return out


def plan_with_padding(
    analysis: Analysis, multiple: int, search: Callable[[Analysis], Plan]
) -> Plan:
    """Plans a step with padded rows, and records the number of rows.

    Args:
      analysis: the step.
      multiple: the number that has to divide the padded rows of a microbatch.
      search: finds a plan.

    Raises:
      PlanError: padding would change the results of the step, or no plan fits.
    """
    found = search(with_row_multiple(analysis, multiple))
    rows, count = batch_rows(analysis.graph), found.microbatches
    padded = padded_rows(rows, multiple, count)
    parts = f" in {count} microbatches" if count > 1 else ""
    said = f"rows: {rows} padded to {padded}{parts}, which {multiple} devices divide"
    return msgspec.structs.replace(found, decided=(said, *found.decided))


def plan_best(
    cluster: Cluster,
    part: Cluster,
    search: Callable[[Cluster], Plan],
    few: Cluster | None,
    search_padded: Callable[[Cluster], Plan],
) -> Plan:
    """Returns the fastest of the plans for a cluster, a part of it and padded rows.

    Args:
      cluster: the devices to plan for.
      part: a part of these devices (`part_to_try`).
      search: finds a plan.
      few: the devices of a plan with padded rows (`padded_part`); None: no such plan.
      search_padded: finds a plan with padded rows.

    Raises:
      UnsplitBatchError: no mesh axis divides the batch, it cannot be padded, and the
        part has less than half of the devices.
      InfeasibleError: no plan for the cluster fits the memory of a device.
    """
    plans = list[Plan]()
    failed: PlanError | None = None
    refused = ""
    try:
        plans.append(search(cluster))
    except (UnsplitBatchError, InfeasibleError) as error:
        failed = error
    if few is not None:
        try:
            why = f"{few.num_devices} devices work on as few rows each"
            plans.append(_with_idle(search_padded(few), cluster, few, why))
        except PlanError as error:
            refused = str(error).splitlines()[0]
        except OutOfTimeError:
            pass
    small = 2 * part.num_devices < cluster.num_devices
    if (
        failed is not None
        and not plans
        and (small or isinstance(failed, InfeasibleError))
    ):
        if refused and isinstance(failed, UnsplitBatchError):
            raise failed.because(refused)
        raise failed
    try:
        why = f"{part.num_devices} devices divide the batch"
        why += f"; {refused}" if refused else ""
        plans.append(_with_idle(search(part), cluster, part, why))
    # The part may have no plan: for example, with fewer devices, each needs more
    # memory.
    except (PlanError, OutOfTimeError):
        if not plans:
            raise
    return min(plans, key=lambda plan: plan.predicted.step_s)


def _with_idle(plan: Plan, cluster: Cluster, part: Cluster, why: str) -> Plan:
    """A plan for a part of a cluster that says why the other devices are idle."""
    idle = cluster.num_devices - part.num_devices
    if not idle:
        return plan
    text = f"{number_of(idle, 'device')} idle, because {why}"
    return with_status(plan, f"{plan.solver.status}; {text}")
