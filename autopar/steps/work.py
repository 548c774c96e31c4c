"""The work of operators after fusion: trips, kinds, and what is written to memory."""

from __future__ import annotations

import dataclasses

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

# Boundary operators hand values over; they compute nothing.
BOUNDARY = frozenset({"input", "return", "enter", "carry", "merge"})


# Products on the matrix units; everything else runs on the vector units.
MATRIX = frozenset({"dot_general", "conv_general_dilated"})


def materialized(graph: OperatorGraph, contraction: Contraction) -> set[int]:
    """Returns the values that a fusing compiler writes to memory.

    An element-wise result is fused into its readers; it is written where a
    reader is no element-wise operator (a product, a reduction's result, a
    boundary), and so is every result of an operator that is none itself.
    """
    out: set[int] = set()
    for op in graph.operators:
        fuses = is_elementwise(op)
        if not fuses:
            out.update(op.outputs)
        if (
            op.kind in BOUNDARY
            or op.kind in MATRIX
            or op.kind in ("gather", "scatter-add")
        ):
            out.update(v for v in op.inputs if v is not None)
    return out - contraction.floating


def is_elementwise(op: Operator) -> bool:
    """Whether a compiler fuses the operator into its readers."""
    if op.kind in BOUNDARY or op.kind in ("slice_step", "stack_step", "random_bits"):
        return False
    if op.kind in ("gather", "scatter-add", "sort", "top_k") or op.kind in MATRIX:
        return False
    return all(k is not FactorKind.REDUCE for k in op.rule.kinds)


def class_trips(graph: OperatorGraph) -> dict[int, float]:
    """Returns how often the operators of each class run in a step, together."""
    out: dict[int, float] = {}
    for op in graph.operators:
        out[op.class_index] = out.get(op.class_index, 0.0) + op.trips
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWork:
    """What an operator does, whatever its layout.

    Attributes:
      op: the operator.
      dtype: of its first operand.
      itemsize: bytes of an element of it.
      nbytes: bytes of all its arrays that are in memory, whole.
      kernel: whether it writes a result, so that it starts a kernel of its own.
      sides: of a product, the factors of its sides M, N and K.
    """

    op: Operator
    dtype: str
    itemsize: float
    nbytes: float
    kernel: bool
    sides: tuple[tuple[int, ...], ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether the matrix units do it."""
        return self.op.kind in MATRIX

    @property
    def unfolds(self) -> bool:
        """Whether it is a convolution, which may unfold its patches."""
        return self.op.kind == "conv_general_dilated"


def operator_work(
    graph: OperatorGraph, op: Operator, written: set[int]
) -> OperatorWork:
    """Returns what an operator does.

    Args:
      graph: the operator graph.
      op: the operator.
      written: the values that are in memory.
    """
    arrays = [v for v in (*op.inputs, *op.outputs) if v is not None and v in written]
    first = op.inputs[0] if op.inputs and op.inputs[0] is not None else None
    value = graph.values[first if first is not None else op.outputs[0]]
    return OperatorWork(
        op,
        str(value.dtype),
        value.nbytes / max(1, value.size),
        sum(graph.values[v].nbytes for v in arrays),
        any(v in written for v in op.outputs),
        side_factors(op.rule) if op.kind in MATRIX else (),
    )


def side_factors(rule: FactorRule) -> tuple[tuple[int, ...], ...]:
    """The factors of the sides M, N and K of a product.

    M is only in the left operand and the result, N only in the right one and the
    result, K is reduced.
    """
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    result = rule.factors_of(rule.results[0])
    sides = ((left - right) & result, (right - left) & result, (left & right) - result)
    return tuple(tuple(sorted(side)) for side in sides)
