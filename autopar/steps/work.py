"""The work of operators after fusion: trips, kinds, and what is written to memory."""

from __future__ import annotations

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import FactorKind

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
