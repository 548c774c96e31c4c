"""Readable names of operators, inputs and arrays."""

from __future__ import annotations

from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar_passes.graph.operators import Operator


def node_name(analysis: Analysis, node: Node) -> str:
    """The name of the first operator of a node."""
    return operator_name(analysis, node.root)


def operator_name(analysis: Analysis, index: int) -> str:
    """The path of an input, or module path and primitive of an operator.

    A step may close over an array, such as a table made by numpy. Such an array is an
    input of the program without a path. Its name is ``constant``.
    """
    op = analysis.graph.operators[index]
    if op.kind == "input":
        return analysis.input_paths.get(op.outputs[0], "constant")
    return f"{op.module}/{op.kind}" if op.module else op.kind


def array_name(analysis: Analysis, value: int) -> str:
    """The path of an input, or the module and primitive that make a value."""
    return operator_name(analysis, analysis.contraction.producer[value].index)


def operator_place(op: Operator) -> str:
    """Module path and primitive in quotes, and the line of the user's code."""
    where = f" ({op.source})" if op.source else ""
    return f"'{op.module}/{op.kind}'{where}" if op.module else f"'{op.kind}'{where}"
