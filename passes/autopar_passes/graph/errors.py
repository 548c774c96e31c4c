"""The error of an invalid graph, with the operators around the culprit."""

from __future__ import annotations

from autopar_errors import InternalError
from autopar_passes.graph.operators import Operator, OperatorGraph

# How many operators are printed before the culprit, and after it.
_AROUND = 3


class GraphError(InternalError):
    """An operator graph breaks an invariant: an error of autopar, not of its user."""


def failure(graph: OperatorGraph, position: int | None, what: str) -> GraphError:
    """Returns the error of a broken invariant.

    Args:
      graph: the graph.
      position: the culprit among the operators; None where it is no operator.
      what: what is wrong, with the values.
    """
    if position is None:
        return GraphError(what)
    first = max(0, position - _AROUND)
    around = graph.operators[first : position + _AROUND + 1]
    lines = [
        f"{'>' if k == position else ' '} {k:5} {_line(op)}"
        for k, op in enumerate(around, first)
    ]
    kind = graph.operators[position].kind
    return GraphError("\n".join((f"operator {position} '{kind}': {what}", *lines)))


def _line(op: Operator) -> str:
    read = ", ".join("constant" if v is None else f"%{v}" for v in op.inputs)
    made = ", ".join(f"%{v}" for v in op.outputs)
    where = " ".join(x for x in (op.role.value, op.module, op.source) if x)
    return f"{made} = {op.kind}({read})  # x{op.trips:g} {where}"
