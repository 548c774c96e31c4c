"""The work of operators: how often they run, and what one run does."""

from __future__ import annotations

import dataclasses

from autopar.steps.fusion import is_product, side_factors
from autopar_passes.graph.operators import Operator, OperatorGraph


def class_trips(graph: OperatorGraph) -> dict[int, float]:
    """Returns how often the operators of each class run in a step, together."""
    out: dict[int, float] = {}
    for op in graph.operators:
        out[op.class_index] = out.get(op.class_index, 0.0) + op.trips
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of an operator, in any layout.

    Attributes:
      op: the operator.
      dtype: of its first operand, or what a kernel works on.
      itemsize: bytes of an element of it.
      nbytes: bytes of all its arrays that are in memory, whole.
      kernel: whether it writes a result, so that it starts a kernel of its own.
      sides: of a product, the factors of its sides M, N and K; empty for others.
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
        kernel = self.op.kernel
        return bool(self.sides) if kernel is None else kernel.matrix

    @property
    def unfolds(self) -> bool:
        """Whether it is a convolution, which may unfold its patches."""
        return self.op.kind == "conv_general_dilated"


def operator_work(
    graph: OperatorGraph, op: Operator, written: frozenset[int]
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
    dtype = str(value.dtype) if op.kernel is None else op.kernel.dtype
    return OperatorWork(
        op,
        dtype,
        value.nbytes / max(1, value.size),
        sum(graph.values[v].nbytes for v in arrays),
        any(v in written for v in op.outputs),
        side_factors(op.rule) if is_product(op) else (),
    )
