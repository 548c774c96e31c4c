"""Finds the known scheme, such as FSDP, that each mesh axis of a plan resembles.

The result does not depend on names that the user gave. The dimensions of matrix
products that an axis splits say how the axis divides the work. The layouts of
parameters and optimizer state say how the axis divides the memory. Work and memory
together give the name of the axis.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autopar.cluster import MeshShape
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import axes_of
from autopar.steps.batch import BATCH, SEQUENCE
from autopar.steps.nodes import Node
from autopar.steps.work import OperatorWork
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import InputRole, Role

DATA, CONTEXT, TENSOR, EXPERTS = "data", "sequence", "tensor", "experts"
_KINDS = {BATCH: DATA, SEQUENCE: CONTEXT}
# A scheme is named after an axis that splits at least the first fraction of the work,
# or at least the second fraction of the bytes.
_NAMED, _MOST = 0.2, 0.5
_NAMES = {
    CONTEXT: "sequence parallel",
    TENSOR: "tensor parallel",
    EXPERTS: "expert parallel",
}
# Kind of dimension -> the name of an axis that splits mostly this kind; and the name of
# an axis that splits no work.
_AXES, _OTHER = {DATA: "data", CONTEXT: "sequence", TENSOR: "tensor"}, "x"
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
      ring: whether the axis splits the sequence of a kernel whose shards exchange
        arrays.
      between: among forward operators between matrix products, whose arrays have a
        sequence: the fraction of their bytes for which the axis splits the sequence.
      parameters: fraction of the bytes of parameters that the axis splits.
      optimizer: fraction of the bytes of optimizer state that the axis splits.
    """

    work: Mapping[str, float]
    columns: bool
    rows: bool
    ring: bool
    between: float
    parameters: float
    optimizer: float


def scheme_of(
    assignment: Assignment, works: Sequence[OperatorWork], names: Sequence[str]
) -> str:
    """The schemes in words, such as ``FSDP (ZeRO-3) over data (8)``.

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
    """The name of an axis: the kind of dimension that it splits most, experts first."""
    if split.work.get(EXPERTS, 0.0) >= _NAMED:
        return _EXPERT
    kind = max(split.work, key=lambda kind: split.work[kind], default="")
    return _EXPERT if kind == EXPERTS else _AXES.get(kind, _OTHER)


def name_of(split: AxisSplit) -> str:
    """The name of the scheme of one axis."""
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
    if kind == CONTEXT and split.ring:
        text = f"{text} with ring attention"
    if kind == CONTEXT and split.parameters >= _MOST:
        return f"{text} {'and' if split.ring else 'with'} split parameters"
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
        any(_goes_around(assignment, work.op, axis) for work in products),
        _between(assignment, works, axis),
        _split_share(assignment, InputRole.PARAMETER, axis),
        _split_share(assignment, InputRole.OPTIMIZER_STATE, axis),
    )


def _of_products(
    assignment: Assignment, products: Sequence[OperatorWork], axis: int
) -> tuple[dict[str, float], set[bool]]:
    """Fractions of the products' FLOPs, by the kind of dimension that an axis splits.

    The second result is a set with True if the axis splits a contracted dimension of a
    parameter's product, and with False if it splits another one.
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
    """As `_of_products` for forward operators that are no products, in bytes."""
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
    """The factors of a node's sharding rule that a mesh axis splits."""
    node, mapping = _place(assignment, member)
    strategy = assignment.strategies[node.index]
    return [f for f, own in enumerate(mapping) if own >= 0 and axis in strategy[own]]


def _goes_around(assignment: Assignment, op: Operator, axis: int) -> bool:
    """Whether an axis splits a factor along which an operator's shards exchange
    arrays.
    """
    moved = {e.factor for e in op.rule.exchanges}
    return not moved.isdisjoint(_split_factors(assignment, op.index, axis))


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

    It is then a parameter, or made of one parameter only.
    """
    home = None if value is None else assignment.contraction.homes.get(value)
    if home is None:
        return False
    made = assignment.graph.operators[assignment.contraction.nodes[home.node].root]
    roles = {i.value: i.role for i in assignment.graph.inputs}
    return made.kind == "input" and roles.get(made.outputs[0]) is InputRole.PARAMETER


def _split_share(assignment: Assignment, role: InputRole, axis: int) -> float:
    """The fraction of the bytes of inputs with a role that an axis splits.

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
