"""Names of operators, inputs and arrays, as people read them."""

from __future__ import annotations

from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node


def node_name(analysis: Analysis, node: Node) -> str:
    """A readable name: the input's path, or module path and operator."""
    return operator_name(analysis, node.root)


def operator_name(analysis: Analysis, index: int) -> str:
    """The path of an input, or module path and primitive of an operator."""
    op = analysis.graph.operators[index]
    for given in analysis.graph.inputs:
        if op.kind == "input" and op.outputs[0] == given.value:
            return given.path
    return f"{op.module}/{op.kind}" if op.module else op.kind
