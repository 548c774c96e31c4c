"""Two fingerprints of a step: one with all shapes, one without the batch size."""

from __future__ import annotations

import hashlib

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole

_DIGITS = 16


def fingerprint(graph: OperatorGraph, contraction: Contraction) -> str:
    """Returns 16 hex digits that identify operators, shapes and arguments of a step."""
    digest = hashlib.sha256()
    for given in graph.inputs:
        value = graph.values[given.value]
        digest.update(f"{given.path}{value.shape}{value.dtype}{given.output}".encode())
    for op in graph.operators:
        digest.update(f"{_kind(op)}{op.inputs}{op.outputs}{op.trips}".encode())
    for node in contraction.nodes:
        digest.update(f"{node.kind}{node.root}{node.factors}".encode())
    return digest.hexdigest()[:_DIGITS]


def structure(graph: OperatorGraph, contraction: Contraction) -> str:
    """Returns 16 hex digits that stay the same when only the batch of a step changes.

    The digits depend on the operators and their connections, the arguments with their
    dtypes, the shapes of carried state, and the nodes for which a plan can choose a
    sharding. They do not depend on other sizes: a plan can be used with any batch size
    of the same structure, as long as its mesh axes divide the new sizes.
    """
    digest = hashlib.sha256()
    for given in graph.inputs:
        value = graph.values[given.value]
        fixed = given.output >= 0 or given.role is not InputRole.BATCH
        shape = value.shape if fixed else len(value.shape)
        digest.update(f"{given.path}{shape}{value.dtype}{given.output}".encode())
    for op in graph.operators:
        digest.update(f"{_kind(op)}{op.inputs}{op.outputs}{op.class_index}".encode())
    for node in contraction.nodes:
        digest.update(f"{node.kind}{node.root}{len(node.factors)}".encode())
    return digest.hexdigest()[:_DIGITS]


def _kind(op: Operator) -> str:
    """The kind of an operator, with the name of its kernel."""
    return op.kind if op.kernel is None else f"{op.kind} {op.kernel.name}"
