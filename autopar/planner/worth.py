"""What a plan makes of its cluster: speed-up, utilisation, axes that lie idle."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster import DeviceSpec
from autopar.cost.items import CostItem, work_items
from autopar.cost.memory import habits_of, peak_memory_bytes
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import axes_of
from autopar.planner.scheme import scheme_of
from autopar.plans.worth import AxisUse, Worth
from autopar.steps.analysis import Analysis
from autopar.steps.fusion import MATRIX
from autopar.steps.samples import batch_tokens, samples
from autopar_passes.graph.operators import Operator

# What JAX calls the part of a backward pass that repeats a forward pass.
_REPEATED = "rematted_computation"


def worth_of(
    assignment: Assignment, pricer: Pricer, items: Sequence[CostItem], step_s: float
) -> Worth:
    """Says what a plan makes of its cluster.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      items: what a step costs.
      step_s: seconds of it.
    """
    analysis, cluster = assignment.analysis, pricer.cluster
    whole = assignment.undivided
    one_s = sum(item.cost.work_s for item in work_items(whole, pricer))
    overhead = cluster.device.calibrated.memory_overhead
    life = analysis.life(habits_of(cluster.device))
    one_bytes = peak_memory_bytes(whole, life, overhead)
    rows, tokens = samples(analysis.graph), batch_tokens(analysis.graph)
    done = [item for item in items if item.work is not None]
    flops, ideal_s = model_work(analysis, cluster.device)
    every_s = step_s * pricer.mesh.num_devices
    return Worth(
        one_device_s=one_s,
        one_device_bytes=float(one_bytes),
        one_device_fits=bool(one_bytes <= cluster.memory_bytes),
        speed_up=one_s / step_s if step_s else 1.0,
        model_flops=flops,
        mfu=ideal_s / every_s if every_s else 0.0,
        rows=rows,
        tokens=tokens,
        rows_per_s=rows / step_s if step_s else 0.0,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        axes=axis_uses(assignment, done, pricer.mesh.names),
        scheme=scheme_of(assignment, done, pricer.mesh.names),
    )


def model_work(analysis: Analysis, device: DeviceSpec) -> tuple[float, float]:
    """The matrix products of a step, without what rematerialisation repeats.

    Returns:
      Floating point operations on the whole batch, and seconds in which one device
      would do them at the peak of their dtypes.
    """
    flops = seconds = 0.0
    for op in analysis.graph.operators:
        if op.kind in MATRIX and not is_repeated(op):
            done = op.flops * op.trips
            first = op.inputs[0] if op.inputs[0] is not None else op.outputs[0]
            flops += done
            seconds += done / device.peak(str(analysis.graph.values[first].dtype))
    return flops, seconds


def is_repeated(op: Operator) -> bool:
    """Whether rematerialisation does the work of an operator for a second time."""
    return _REPEATED in op.module.split("/")


def axis_uses(
    assignment: Assignment, work: Sequence[CostItem], names: Sequence[str]
) -> tuple[AxisUse, ...]:
    """The use of each mesh axis.

    Args:
      assignment: strategies as layouts.
      work: the items of the work of a step.
      names: of the mesh axes.
    """
    total = sum(_divisible_s(item) for item in work)
    split = [0.0] * len(names)
    for item in work:
        for axis in _axes(assignment, item.operator):
            split[axis] += _divisible_s(item)
    held = frozenset[int]().union(
        *(axes_of(assignment.home_layout(i.value)) for i in assignment.graph.inputs)
    )
    return tuple(
        AxisUse(
            name=name,
            size=size,
            repeated=_part_left(split[axis], total),
            holds=axis in held,
        )
        for axis, (name, size) in enumerate(zip(names, assignment.sizes, strict=True))
    )


def _part_left(split: float, total: float) -> float:
    """The part that is not split; of no work, everything."""
    return min(1.0, max(0.0, 1.0 - split / total)) if total else 1.0


def _divisible_s(item: CostItem) -> float:
    """Seconds of work that splitting it would shorten: not the start of its kernel."""
    return item.cost.matrix_s + item.cost.vector_s


def _axes(assignment: Assignment, member: int) -> frozenset[int]:
    """The mesh axes over which the work of a class of operators is split."""
    contraction = assignment.contraction
    node = contraction.nodes[contraction.node_of[member]]
    strategy, mapping = assignment.strategies[node.index], node.members[member]
    return frozenset(axis for own in mapping if own >= 0 for axis in strategy[own])
