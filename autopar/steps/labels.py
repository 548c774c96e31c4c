"""Which factors of a node are the batch's and which the sequence's."""

from __future__ import annotations

from autopar.steps.batch import BATCH, SEQUENCE, DimLabels
from autopar.steps.nodes import Contraction

__all__ = ["BATCH", "SEQUENCE", "Labels", "factor_labels"]

# node -> its factors with a label.
Labels = dict[int, dict[int, str]]


def factor_labels(found: DimLabels, contraction: Contraction) -> Labels:
    """Labels the factors of each node that come from the batch or sequence."""
    labels: Labels = {}
    for op in found.operators:
        node = contraction.node_of.get(op.class_index)
        if node is not None:
            mapping = contraction.nodes[node].members[op.class_index]
            for factor, name in found.factors[op.index].items():
                if mapping[factor] >= 0:
                    labels.setdefault(node, {}).setdefault(mapping[factor], name)
    _label_results(contraction, found, labels)
    return labels


def _label_results(contraction: Contraction, found: DimLabels, labels: Labels) -> None:
    """Result nodes take the labels of the values that live there."""
    for value, home in contraction.homes.items():
        for name, factors in zip(found.dims.get(value, ()), home.dims, strict=False):
            if name and factors:
                labels.setdefault(home.node, {}).setdefault(factors[0], name)
