"""Finds the known scheme, such as FSDP, that each mesh axis of a plan resembles.

The result does not depend on names that the user gave. The dimensions of matrix
products that an axis splits say how the axis divides the work. The layouts of
parameters and optimizer state say how the axis divides the memory. Work and memory
together give the name of the axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from autopar.cluster import MeshAxis, MeshShape
from autopar.cluster.slices import at_rate
from autopar.cost.collectives import collective_s
from autopar.cost.estimate import StepEstimate, Work, work_of
from autopar.cost.live import live
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment, unsplit
from autopar.layouts.layout import ReshardStep, axes_of
from autopar.plans.records import AxisUse, Worth
from autopar.steps.analysis import Analysis
from autopar.steps.attention import Attention
from autopar.steps.batch import BATCH, SEQUENCE, batch_tokens, samples
from autopar.steps.nodes import Node
from autopar.steps.work import OperatorWork
from autopar_passes.graph.operators import PRODUCTS, Operator
from autopar_passes.graph.roles import REPEATED, InputRole, Role
from autopar_passes.rules.factor_rule import CUDNN_EFFICIENCY, PALLAS_EFFICIENCY

DATA, CONTEXT, TENSOR, EXPERTS = "data", "sequence", "tensor", "experts"
_KINDS = {BATCH: DATA, SEQUENCE: CONTEXT}
# An axis is named after a kind of dimension only if it splits at least the first
# fraction of the work, or at least the second fraction of the bytes.
_NAMED, _MOST = 0.2, 0.5
_NAMES = {
    CONTEXT: "sequence parallel",
    TENSOR: "tensor parallel",
    EXPERTS: "expert parallel",
}
# Kind of dimension -> the name of an axis that splits mostly this kind; and the name of
# an axis that splits no work.
_AXES, _OTHER = {DATA: "data", CONTEXT: "sequence", TENSOR: "tensor"}, "x"
# What a scheme says of an axis along which attention kernels share keys and values:
# around a ring, by gathers, or some kernels in one way and some in the other.
RING, GATHERED = "with ring attention", "with gathered keys and values"
_BOTH = f"{RING} and gathered keys and values"
_EXPERT = "expert"


@dataclasses.dataclass(frozen=True, slots=True)
class AxisSplit:
    """What one mesh axis splits.

    Attributes:
      work: kind of dimension (batch, sequence, experts or other) -> the fraction of the
        FLOPs of matrix products in which the axis splits a dimension of this kind. If
        the axis splits no matrix product: the fraction of the bytes of the forward
        pass's other operators.
      columns: whether the axis splits a result's dimension of some forward product that
        has split parameters.
      rows: whether the axis splits a contracted dimension of some forward product that
        has split parameters.
      keys: how kernels whose sequence the axis splits share keys and values, in words;
        '' if there are none.
      between: the fraction of bytes for which the axis splits the sequence, among the
        forward operators between matrix products whose arrays have a sequence.
      parameters: fraction of the bytes of parameters that the axis splits.
      optimizer: fraction of the bytes of optimizer state that the axis splits.
    """

    work: Mapping[str, float]
    columns: bool
    rows: bool
    keys: str
    between: float
    parameters: float
    optimizer: float


def scheme_of(
    assignment: Assignment, works: Sequence[OperatorWork], names: Sequence[str]
) -> str:
    """Returns the schemes in words, such as ``FSDP (ZeRO-3) over data (8)``.

    Args:
      assignment: strategies as layouts.
      works: the work of the operators of a step.
      names: names of the mesh axes.
    """
    found: dict[str, list[str]] = {}
    for axis, (name, size) in enumerate(zip(names, assignment.sizes, strict=True)):
        if size > 1:
            text = name_of(split_of(assignment, works, axis))
            found.setdefault(text, []).append(f"{name} ({size})")
    parts = [f"{text} over {' and '.join(axes)}" for text, axes in found.items()]
    return ", ".join(parts) or "one device: nothing is split"


def with_axis_names(
    mesh: MeshShape, assignment: Assignment, works: Sequence[OperatorWork]
) -> MeshShape:
    """The mesh, each axis named after what the axis splits; names from the user stay.

    Args:
      mesh: the mesh of the assignment.
      assignment: strategies as layouts.
      works: the work of the operators of a step.
    """
    taken = {axis.name for axis in mesh.axes if axis.named}
    made = list(mesh.axes)
    for position, axis in enumerate(mesh.axes):
        if axis.named:
            continue
        name = axis.name  # an axis of size 1 splits nothing and keeps its name
        if axis.size > 1:
            name = axis_name_of(split_of(assignment, works, position))
        name = next(n for n in _numbered_names(name) if n not in taken)
        taken.add(name)
        made[position] = dataclasses.replace(axis, name=name, named=True)
    return MeshShape(axes=tuple(made))


def _numbered_names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def is_axis_name(name: str) -> bool:
    """Whether plans use this name for axes, such as ``data`` or ``data2``."""
    kind, _, number = name.partition("_")
    known = kind in {*_AXES.values(), _EXPERT, _OTHER}
    return known and (kind == name or number.isdecimal())


def axis_name_of(split: AxisSplit) -> str:
    """Returns the name of an axis, after the kind of dimension that it splits most.

    An axis that splits experts is named after the experts, whatever else it splits.
    """
    if split.work.get(EXPERTS, 0.0) >= _NAMED:
        return _EXPERT
    kind = max(split.work, key=lambda kind: split.work[kind], default="")
    return _EXPERT if kind == EXPERTS else _AXES.get(kind, _OTHER)


def name_of(split: AxisSplit) -> str:
    """Returns the name of the scheme of one axis."""
    ranked = sorted(split.work.items(), key=lambda item: -item[1])
    kinds = [kind for kind, part in ranked if part >= _NAMED]
    if kinds:
        return " and ".join(_name(kind, split) for kind in kinds)
    if ranked and ranked[0][1] > 0:
        return f"{_name(ranked[0][0], split)}, in little of the work,"
    if split.parameters or split.optimizer:
        return "state split, no work,"
    return "nothing"


def _name(kind: str, split: AxisSplit) -> str:
    if kind == DATA:
        if split.parameters >= _MOST:
            return "FSDP (ZeRO-3)"
        return "ZeRO-1" if split.optimizer >= _MOST else "data parallel"
    text = _NAMES[kind]
    if kind == CONTEXT and split.keys:
        text = f"{text} {split.keys}"
    if kind == CONTEXT and split.parameters >= _MOST:
        return f"{text} {'and' if split.keys else 'with'} split parameters"
    if kind == TENSOR:
        text = f"Megatron {text}" if split.columns and split.rows else text
        return f"{text} with sequence parallelism" if split.between >= _MOST else text
    return text


def split_of(
    assignment: Assignment, works: Sequence[OperatorWork], axis: int
) -> AxisSplit:
    """Computes what a mesh axis splits."""
    products = [work for work in works if work.is_matrix]
    # Only the forward pass is read, because a product of the backward pass may have no
    # parameter among its operands.
    forward = [work for work in products if work.op.role is Role.FORWARD]
    parts, sides = _of_products(assignment, forward, axis)
    if not parts:
        parts, _ = _of_products(assignment, products, axis)
    if not parts:
        parts = _of_others(assignment, works, axis)
    return AxisSplit(
        parts,
        False in sides,
        True in sides,
        _keys_text(assignment, products, axis),
        _between(assignment, works, axis),
        _split_share(assignment, InputRole.PARAMETER, axis),
        _split_share(assignment, InputRole.OPTIMIZER_STATE, axis),
    )


def _of_products(
    assignment: Assignment, products: Sequence[OperatorWork], axis: int
) -> tuple[dict[str, float], set[bool]]:
    """Fractions of the products' FLOPs, by the kind of dimension that an axis splits.

    The function also returns a set. It contains True if the axis splits a contracted
    dimension of a parameter's product, and False if the axis splits another dimension
    of such a product.
    """
    flops: dict[str, float] = defaultdict(float)
    total, sides = 0.0, set[bool]()
    for work in products:
        op, labels = work.op, _labels(assignment, work.op.index)
        done = op.flops * assignment.analysis.trips[op.index]
        total += done
        split = _split_factors(assignment, op.index, axis)
        kinds = {f: _kind(assignment, op, labels.get(f, ""), f) for f in split}
        for kind in set(kinds.values()):
            flops[kind] += done
        sides |= {f in op.rule.reduced_factors for f in split if kinds[f] == TENSOR}
    return {kind: done / total for kind, done in flops.items() if total}, sides


def _of_others(
    assignment: Assignment, works: Sequence[OperatorWork], axis: int
) -> dict[str, float]:
    """Like `_of_products`, for forward operators that are no products, by bytes."""
    total, parts = 0.0, defaultdict[str, float](float)
    for work in works:
        op = work.op
        if work.is_matrix or op.role is not Role.FORWARD:
            continue
        nbytes = work.nbytes * assignment.analysis.trips[op.index]
        total += nbytes
        labels = _labels(assignment, op.index)
        split = _split_factors(assignment, op.index, axis)
        for kind in {_KINDS.get(labels.get(f, ""), TENSOR) for f in split}:
            parts[kind] += nbytes
    return {kind: nbytes / total for kind, nbytes in parts.items() if total}


def _between(assignment: Assignment, works: Sequence[OperatorWork], axis: int) -> float:
    """Computes `AxisSplit.between`."""
    total = split = 0.0
    for work in works:
        op = work.op
        if work.is_matrix or op.role is not Role.FORWARD:
            continue
        labels = _labels(assignment, op.index)
        if SEQUENCE in labels.values():
            nbytes = work.nbytes * assignment.analysis.trips[op.index]
            total += nbytes
            factors = _split_factors(assignment, op.index, axis)
            split += nbytes * any(labels.get(f) == SEQUENCE for f in factors)
    return split / total if total else 0.0


def _split_factors(assignment: Assignment, member: int, axis: int) -> list[int]:
    """Returns the factors of a node's sharding rule that a mesh axis splits."""
    node, mapping = _place(assignment, member)
    strategy = assignment.strategies[node.index]
    return [f for f, own in enumerate(mapping) if own >= 0 and axis in strategy[own]]


def _keys_text(
    assignment: Assignment, products: Sequence[OperatorWork], axis: int
) -> str:
    """Returns `AxisSplit.keys`."""
    gathered: set[bool] = set()
    for op in (work.op for work in products):
        moved = {e.factor for e in op.rule.exchanges}
        if not moved.isdisjoint(_split_factors(assignment, op.index, axis)):
            gathered.add(assignment.gathers_keys(op))
    if len(gathered) > 1:
        return _BOTH
    if not gathered:
        return ""
    return GATHERED if True in gathered else RING


def _labels(assignment: Assignment, member: int) -> dict[int, str]:
    """The factors of a node's rule that belong to the batch or to the sequence."""
    node, mapping = _place(assignment, member)
    known = assignment.analysis.node_labels.get(node.index, {})
    own = assignment.analysis.dim_labels.factors.get(member, {})
    found = {f: known.get(k, "") or own.get(f, "") for f, k in enumerate(mapping)}
    return {f: name for f, name in found.items() if name}


def _place(assignment: Assignment, member: int) -> tuple[Node, tuple[int, ...]]:
    contraction = assignment.contraction
    node = contraction.nodes[contraction.node_of[member]]
    return node, node.members[member]


def _kind(assignment: Assignment, op: Operator, label: str, factor: int) -> str:
    """The kind of dimension (batch, sequence, experts, other) of a product's factor."""
    if label:
        return _KINDS[label]
    arrays = (*op.rule.operands[:2], op.rule.results[0])
    everywhere = all(factor in op.rule.factors_of(dims) for dims in arrays)
    if everywhere and any(_is_parameter(assignment, v) for v in op.inputs[:2]):
        return EXPERTS
    return TENSOR


def _is_parameter(assignment: Assignment, value: int | None) -> bool:
    """Whether a value has the layout of a parameter.

    A value with the layout of a parameter is a parameter, or computed from one
    parameter only.
    """
    home = None if value is None else assignment.contraction.homes.get(value)
    if home is None:
        return False
    made = assignment.graph.operators[assignment.contraction.nodes[home.node].root]
    roles = {i.value: i.role for i in assignment.graph.inputs}
    return made.kind == "input" and roles.get(made.outputs[0]) is InputRole.PARAMETER


def _split_share(assignment: Assignment, role: InputRole, axis: int) -> float:
    """Returns the fraction of the bytes of inputs with a role that an axis splits.

    The result is 0 if no input has this role.
    """
    total = split = 0.0
    for given in assignment.graph.inputs:
        if given.role is role:
            nbytes = assignment.graph.values[given.value].nbytes
            total += nbytes
            if axis in axes_of(assignment.home_layout(given.value)):
                split += nbytes
    return split / total if total else 0.0


# Measures how well a plan uses its cluster: speed-up, utilisation, idle axes.


# For each kind of device: the largest head dimension that its fused attention kernel
# supports, and the fraction of peak FLOPs that the kernel reaches (cuDNN's kernel and
# Splash attention).
_FUSED = {"gpu": (128, CUDNN_EFFICIENCY), "tpu": (256, PALLAS_EFFICIENCY)}
# The dtypes that such a kernel supports.
_HALF = frozenset({"bfloat16", "float16"})
# A fused attention kernel runs five matrix products in the backward pass, because it
# computes the scores again; without the kernel there are four. This is the ratio.
_AGAIN = 1.25


def worth_of(estimate: StepEstimate, step_s: float) -> Worth:
    """Computes how well a plan uses its cluster: speed-up, utilisation, idle axes.

    Args:
      estimate: work and messages of a step.
      step_s: seconds of a step, with codecs.
    """
    assignment, pricer = estimate.assignment, estimate.pricer
    analysis, cluster = assignment.analysis, pricer.cluster
    # One device alone has no padded rows, and padding is no work of the model.
    padded = analysis.row_multiple > 1
    plain = (analysis.whole if padded else None) or analysis
    whole = unsplit(plain, assignment.sizes)
    alone = work_of(whole, pricer)
    one_s = float(alone.planned_s.sum() + alone.kernel_s.sum())
    one_bytes = live(whole, cluster.device).peak_bytes()
    rows, tokens = samples(analysis.graph), batch_tokens(analysis.graph)
    work = model_work(plain)
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
    """Returns the work of the model in a step, without repeated work.

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
    """Returns the seconds of a step that a fused attention kernel would save.

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
    # Each entry stands for a class of operators, such as the same operator of all equal
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

    A product that only multiplies each row of one operand with a row of the other is
    not.
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
    """Returns how a plan uses each mesh axis, such as the work repeated along it.

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
        *(
            axes_of(assignment.home_layout(i.value))
            for i in assignment.graph.inputs
            if i.role is not InputRole.BATCH
        )
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
        _with_sums(use, axis, assignment, pricer, total) if use.is_unused else use
        for axis, use in enumerate(uses)
    )


def _with_sums(
    use: AxisUse, axis: int, assignment: Assignment, pricer: Pricer, work_s: float
) -> AxisUse:
    """What it takes to split the rows over an unused axis."""
    nbytes = _gradient_bytes(assignment, axis)
    step = ReshardStep("all_reduce", (axis,), 1.0, ())
    return msgspec.structs.replace(
        use,
        sums_s=pricer.collective_s(step, nbytes),
        pays_bytes_per_s=_paying_rate(
            pricer.mesh.axes[axis], nbytes, (1.0 - 1.0 / use.size) * work_s
        ),
    )


# The largest factor by which links are assumed to become faster, and the precision of
# the factor.
_FASTEST, _PRECISION = 2.0**20, 1.01


def _paying_rate(axis: MeshAxis, nbytes: float, saved_s: float) -> float:
    """The bandwidth from which an all-reduce takes fewer seconds than it saves.

    Args:
      axis: the mesh axis, with its link.
      nbytes: bytes of all gradients on one device.
      saved_s: seconds that splitting the rows over the axis saves.

    Returns:
      Bytes per second of the link; its own bandwidth if it is fast enough, and 0 if the
      latency alone takes longer.
    """

    def pays(factor: float) -> bool:
        link = at_rate(axis.link, factor, 1.0)
        faster = dataclasses.replace(axis, link=link)
        return collective_s("all_reduce", nbytes, (faster,)) <= saved_s

    low, high = 1.0, _FASTEST
    if pays(low):
        return axis.link.bandwidth_bytes_per_s
    if not pays(high):
        return 0.0
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return axis.link.bandwidth_bytes_per_s * high


def _gradient_bytes(assignment: Assignment, axis: int) -> float:
    """Bytes of all gradients on a device, if the axis splits the rows."""
    nbytes = 0.0
    for found in assignment.graph.inputs:
        if found.role is InputRole.PARAMETER:
            axes = axes_of(assignment.home_layout(found.value)) - {axis}
            parts = math.prod(assignment.sizes[k] for k in axes)
            nbytes += assignment.graph.values[found.value].nbytes / parts
    return nbytes


def _part_left(split: float, total: float) -> float:
    """Returns the fraction of the work that an axis does not split; 1 without work."""
    return min(1.0, max(0.0, 1.0 - split / total)) if total else 1.0


def _axes(assignment: Assignment, member: int) -> frozenset[int]:
    """Returns the mesh axes that split the work of a class of equal operators."""
    contraction = assignment.contraction
    node = contraction.nodes[contraction.node_of[member]]
    strategy, mapping = assignment.strategies[node.index], node.members[member]
    return frozenset(axis for own in mapping if own >= 0 for axis in strategy[own])
