"""Arrays of 16 bits that XLA's CPU compiler keeps in 32 bits, or keeps at all.

It computes such types in float32 (``xla/service/cpu/cpu_float_support.cc`` and
``float_normalization.cc`` in openxla/xla). Read from its optimised programs (jaxlib
0.10.2, a CPU without products of 16 bits):

* a product's operands lie in memory in 32 bits; what reads them besides reads them in
  their own type;
* what a reduction reads stays in 32 bits for all its readers, because the compiler
  leaves out a rounding that is undone at once (``xla_allow_excess_precision``);
* what has been rounded and both passes read is kept for the backward pass. In 32 bits
  it would be made again where one array suffices.
"""

from __future__ import annotations

import dataclasses

from autopar.steps.fusion import BOUNDARY, is_elementwise
from autopar_passes.graph.operators import PRODUCTS, OperatorGraph, readers
from autopar_passes.graph.roles import Role

# Bytes of the types that are widened, and the factor on them.
NARROW_BYTES, WIDER = 2, 2
_HANDING = BOUNDARY | {"slice_step", "optimization_barrier"}


@dataclasses.dataclass(frozen=True, slots=True)
class Widened:
    """Values of 16 bits.

    Attributes:
      operands: those that products read, in 32 bits.
      held: those that are in memory in 32 bits alone.
    """

    operands: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()


NOT_WIDENED = Widened()


def find_widened(graph: OperatorGraph) -> Widened:
    """The values of a program that are widened in memory."""
    read = readers(graph.operators)

    def reduces(value: int) -> bool:
        return any(r.kind.startswith("reduce_") for r, _ in read.get(value, []))

    products = [op for op in graph.operators if op.kind in PRODUCTS]
    operands = {v for op in products for v in op.inputs}
    held = {
        op.inputs[0]
        for op in graph.operators
        if op.kind == "convert_element_type" and any(map(reduces, op.outputs))
    }
    return Widened(_narrow(graph, operands - held), _narrow(graph, held))


def rounded_results(graph: OperatorGraph, floating: frozenset[int]) -> frozenset[int]:
    """Element-wise results of 16 bits that both passes read.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
    """
    read = readers(graph.operators)
    both = {Role.FORWARD, Role.BACKWARD}
    found = {
        value
        for op in graph.operators
        if is_elementwise(op) and op.kind not in _HANDING
        for value in op.outputs
        if both <= {r.role for r, _ in read.get(value, [])}
    }
    return _narrow(graph, found - floating)


def is_narrow(graph: OperatorGraph, value: int) -> bool:
    """Whether an array has 16 bits an element."""
    return graph.values[value].dtype.itemsize == NARROW_BYTES


def _narrow(graph: OperatorGraph, values: set[int | None] | set[int]) -> frozenset[int]:
    return frozenset(v for v in values if v is not None and is_narrow(graph, v))
