"""Measures how well a plan uses its cluster: speed-up, utilisation, idle axes."""

from __future__ import annotations

import dataclasses
import math

import msgspec

from autopar.cost.estimate import StepEstimate, Work, work_of
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment, unsplit
from autopar.layouts.layout import ReshardStep, axes_of
from autopar.planner.scheme import scheme_of
from autopar.plans.records import AxisUse, Worth
from autopar.steps.analysis import Analysis
from autopar.steps.attention import Attention
from autopar.steps.batch import batch_tokens, samples
from autopar_passes.graph.operators import PRODUCTS, Operator
from autopar_passes.graph.roles import REPEATED, InputRole, Role
from autopar_passes.rules.factor_rule import CUDNN_EFFICIENCY, PALLAS_EFFICIENCY

# For each kind of device: the largest head dimension that its fused attention kernel
# supports, and the fraction of peak FLOPs that the kernel reaches (cuDNN's kernel and
# Splash attention).
_FUSED = {"gpu": (128, CUDNN_EFFICIENCY), "tpu": (256, PALLAS_EFFICIENCY)}
# The dtypes that such a kernel supports.
_HALF = frozenset({"bfloat16", "float16"})
# A fused attention kernel runs five matrix products in the backward pass, because it
# computes the scores again. Without the kernel there are four. This is their ratio.
_AGAIN = 1.25


def worth_of(estimate: StepEstimate, step_s: float) -> Worth:
    """Computes how well a plan uses its cluster: speed-up, utilisation, idle axes.

    Args:
      estimate: work and messages of a step.
      step_s: seconds of a step, with codecs.
    """
    assignment, pricer = estimate.assignment, estimate.pricer
    analysis, cluster = assignment.analysis, pricer.cluster
    whole = unsplit(analysis, assignment.sizes)
    alone = work_of(whole, pricer)
    one_s = float(alone.planned_s.sum() + alone.kernel_s.sum())
    one_bytes = live(whole, cluster.device).peak_bytes()
    rows, tokens = samples(analysis.graph), batch_tokens(analysis.graph)
    work = model_work(analysis)
    most = step_s * pricer.mesh.num_devices * cluster.device.peak(work.dtype)
    return Worth(
        one_device_s=one_s,
        one_device_bytes=one_bytes,
        one_device_fits=one_bytes <= cluster.memory_bytes,
        speed_up=one_s / step_s if step_s else 1.0,
        model_flops=work.flops,
        mfu=work.flops / most if most else 0.0,
        causal_mfu=(work.flops - 0.5 * work.causal_flops) / most if most else 0.0,
        fused_saves_s=fused_saves_s(analysis, estimate.work),
        rows=rows,
        tokens=tokens,
        rows_per_s=rows / step_s if step_s else 0.0,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        axes=axis_uses(assignment, estimate.work, pricer),
        scheme=scheme_of(assignment, estimate.work.table.works, pricer.mesh.names),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWork:
    """The matrix products and the attention of a step, on the whole batch.

    Work that rematerialisation or kernels repeat is left out. Attention counts in full,
    whatever its mask (Chowdhery et al., "PaLM", 2022, appendix B).

    Attributes:
      flops: floating point operations.
      causal_flops: the part of ``flops`` that is attention with a causal mask.
      dtype: the dtype in which most FLOPs of the forward pass are done.
    """

    flops: float
    causal_flops: float
    dtype: str


def model_work(analysis: Analysis) -> ModelWork:
    """The work of the model in a step, without repeated work.

    Args:
      analysis: the step.
    """
    graph, written = analysis.graph, analysis.attention
    masked = frozenset[int]().union(*(x.products for x in written if x.causal))
    flops = causal = 0.0
    forward: dict[str, float] = {}
    for op in graph.operators:
        if is_repeated(op) or not (op.kind in PRODUCTS or op.kernel is not None):
            continue
        if op.kernel is not None:
            own, half = op.kernel.model_flops, op.kernel.causal_flops
            dtype = op.kernel.dtype
        else:
            own = op.flops if _is_matrix(op) else 0.0
            half = own if op.index in masked else 0.0
            of = (graph.values[v].dtype for v in op.inputs if v is not None)
            dtype = str(min(of, key=lambda x: x.itemsize, default="float32"))
        flops += own * op.trips
        causal += half * op.trips
        if op.role is Role.FORWARD:
            forward[dtype] = forward.get(dtype, 0.0) + own * op.trips
    most = max(forward, key=lambda x: forward[x], default="float32")
    return ModelWork(flops, causal, most)


def fused_saves_s(analysis: Analysis, work: Work) -> float:
    """Seconds of a step that a fused attention kernel would save.

    The result is 0 if no kernel supports the step.

    The kernel reads queries, keys and values and keeps the scores in on-chip memory.
    The kernel skips the work that a causal mask hides, and computes the scores again in
    the backward pass.

    Args:
      analysis: the step.
      work: the work of a device.
    """
    device, seconds = work.device, work.planned_s + work.kernel_s
    most, efficiency = _FUSED.get(device.kind, (0, 0.0))
    operators = analysis.graph.operators
    # Each entry represents a class of operators, such as the same operator of all equal
    # layers.
    read = dict[int, Attention]()
    products = set[int]()
    for found in analysis.attention:
        if found.dtype in _HALF and found.head_dim <= most:
            inside = found.products | found.between
            read.update((operators[k].class_index, found) for k in inside)
            products.update(operators[k].class_index for k in found.products)
    saved = 0.0
    for row, done in enumerate(work.table.works):
        op = done.op
        found = read.get(op.index)
        if found is None:
            continue
        saved += float(seconds[row])
        if op.index in products:
            again = _AGAIN if op.role is Role.BACKWARD else 1.0
            each = op.flops * float(work.table.trips[row] / work.parts[row])
            kernel = each * again * (0.5 if found.causal else 1.0)
            saved -= kernel / (efficiency * device.peak(found.dtype))
    return max(0.0, saved)


def _is_matrix(op: Operator) -> bool:
    """Whether a product is a matrix product.

    It is not if it only multiplies each row of one operand with a row of the other.
    """
    rule = op.rule
    sides = rule.factors_of(rule.results[0]) - frozenset.intersection(
        *map(rule.factors_of, rule.operands)
    )
    return any(rule.sizes[f] > 1 for f in sides)


def is_repeated(op: Operator) -> bool:
    """Whether an operator repeats work because of rematerialisation."""
    return REPEATED in op.module.split("/")


def axis_uses(
    assignment: Assignment, work: Work, pricer: Pricer
) -> tuple[AxisUse, ...]:
    """How the plan uses each mesh axis, such as the work that its devices repeat.

    Args:
      assignment: strategies as layouts.
      work: the work of a device. Splitting it shortens all seconds but those of kernel
        launches.
      pricer: prices on the mesh.
    """
    total = float(work.planned_s.sum())
    split = [0.0] * len(assignment.sizes)
    for done, seconds in zip(work.table.works, work.planned_s.tolist(), strict=True):
        for axis in _axes(assignment, done.op.index):
            split[axis] += seconds
    held = frozenset[int]().union(
        *(axes_of(assignment.home_layout(i.value)) for i in assignment.graph.inputs)
    )
    uses = (
        AxisUse(
            name=name,
            size=size,
            repeated=_part_left(split[axis], total),
            holds=axis in held,
        )
        for axis, (name, size) in enumerate(
            zip(pricer.mesh.names, assignment.sizes, strict=True)
        )
    )
    return tuple(
        msgspec.structs.replace(use, sums_s=_sums_s(assignment, axis, pricer))
        if use.is_unused
        else use
        for axis, use in enumerate(uses)
    )


def _sums_s(assignment: Assignment, axis: int, pricer: Pricer) -> float:
    """Seconds of all gradients' sums over an axis, if the axis split the rows."""
    nbytes = 0.0
    for found in assignment.graph.inputs:
        if found.role is InputRole.PARAMETER:
            axes = axes_of(assignment.home_layout(found.value)) - {axis}
            parts = math.prod(assignment.sizes[k] for k in axes)
            nbytes += assignment.graph.values[found.value].nbytes / parts
    return pricer.collective_s(ReshardStep("all_reduce", (axis,), 1.0, ()), nbytes)


def _part_left(split: float, total: float) -> float:
    """The fraction of the work that an axis does not split; 1 if there is no work."""
    return min(1.0, max(0.0, 1.0 - split / total)) if total else 1.0


def _axes(assignment: Assignment, member: int) -> frozenset[int]:
    """The mesh axes that split the work of a class of equal operators."""
    contraction = assignment.contraction
    node = contraction.nodes[contraction.node_of[member]]
    strategy, mapping = assignment.strategies[node.index], node.members[member]
    return frozenset(axis for own in mapping if own >= 0 for axis in strategy[own])
