"""Which dimensions are the batch's and which the sequence's.

Found by following the leading dimensions of the batch inputs through the
sharding rules; nothing is read from names.
"""

from __future__ import annotations

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole

BATCH = "batch"
SEQUENCE = "sequence"

# node -> its factors with a label.
Labels = dict[int, dict[int, str]]


def factor_labels(graph: OperatorGraph, contraction: Contraction) -> Labels:
    """Labels the factors of each node that come from the batch or sequence.

    Dimension 0 of a batch input is the batch; dimension 1 of an integer batch
    input (tokens) is the sequence.
    """
    dims: dict[int, list[str]] = {}
    for given in graph.inputs:
        value = graph.values[given.value]
        if given.role is InputRole.BATCH and value.shape:
            names = [""] * len(value.shape)
            names[0] = BATCH
            if len(names) > 1 and value.dtype.kind in "iu":
                names[1] = SEQUENCE
            dims[given.value] = names
    labels: Labels = {}
    for op in graph.operators:
        found = _operator_labels(graph, op, dims)
        node = contraction.node_of.get(op.class_index)
        if node is not None:
            mapping = contraction.nodes[node].members[op.class_index]
            for factor, name in found.items():
                if mapping[factor] >= 0:
                    labels.setdefault(node, {}).setdefault(mapping[factor], name)
    _label_results(graph, contraction, dims, labels)
    return labels


def _operator_labels(
    graph: OperatorGraph, op: Operator, dims: dict[int, list[str]]
) -> dict[int, str]:
    """Labels an operator's factors from its operands, and its results from them."""
    found: dict[int, str] = {}
    pairs = list(zip(op.inputs, op.rule.operands, strict=True))
    if op.kind == "input":
        pairs = list(zip(op.outputs, op.rule.results, strict=True))
    for value, value_dims in pairs:
        for name, factors in zip(dims.get(value or 0, ()), value_dims, strict=False):
            if value is not None and name and factors:
                found.setdefault(factors[0], name)
    for value, value_dims in zip(op.outputs, op.rule.results, strict=True):
        if op.kind != "input" and graph.values[value].shape:
            dims[value] = [found.get(d[0], "") if d else "" for d in value_dims]
    return found


def _label_results(
    graph: OperatorGraph,
    contraction: Contraction,
    dims: dict[int, list[str]],
    labels: Labels,
) -> None:
    """Result nodes take the labels of the values that live there."""
    del graph
    for value, home in contraction.homes.items():
        for name, factors in zip(dims.get(value, ()), home.dims, strict=False):
            if name and factors:
                labels.setdefault(home.node, {}).setdefault(factors[0], name)
