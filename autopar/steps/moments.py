"""Finds the second moments of gradients in the state of an optimizer.

A second moment is carried state whose next value is a sum of itself and of the square
of the gradient, each scaled: that of Adam, AdamW, NAdam, LAMB, RMSProp and Adagrad, of
whichever library. Nothing goes by names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import Operator, OperatorGraph, readers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.equations import Equation

# Value -> the operators that read it, each with the operand that it is.
Readers = Mapping[int, Sequence[tuple[Operator, int]]]

# What keeps a gradient a gradient, and a square a square: scaled, clipped, decayed.
_KEEPING = frozenset(
    {"add", "add_any", "convert_element_type", "copy", "div", "mul", "neg",
     "select_n", "sub"}
)  # fmt: skip


def second_moments(analysis: Analysis, gradients: Sequence[int]) -> dict[int, int]:
    """Returns gradient -> flat input that holds its second moment, where there is one.

    Args:
      analysis: the step.
      gradients: values that the update reads.
    """
    graph, known = analysis.graph, readers(analysis.graph.operators)
    sources = analysis.program.by_index()
    state = {
        graph.outputs[given.output]: k
        for k, given in enumerate(graph.inputs)
        if given.output >= 0 and given.role is InputRole.OPTIMIZER_STATE
    }
    found: dict[int, int] = {}
    for gradient in gradients:
        squares = [
            value
            for like in _reached_values(graph, known, gradient)
            for value in _squares(known, sources, like)
        ]
        for square in squares:
            moments = [
                state[v] for v in _reached_values(graph, known, square) if v in state
            ]
            if moments:
                found[gradient] = moments[0]
                break
    return found


def _reached_values(graph: OperatorGraph, known: Readers, start: int) -> list[int]:
    """The values of the same shape that the update makes of one, the nearest first."""
    shape, seen, left = graph.values[start].shape, [start], [start]
    while left:
        for op, _ in known.get(left.pop(0), []):
            if op.role is not Role.UPDATE or op.kind not in _KEEPING:
                continue
            for value in op.outputs:
                if value not in seen and graph.values[value].shape == shape:
                    seen.append(value)
                    left.append(value)
    return seen


def _squares(known: Readers, sources: Mapping[int, Equation], value: int) -> list[int]:
    """The squares of a value."""
    out: list[int] = []
    for op, _ in known.get(value, []):
        params = sources[op.equation].params if op.equation in sources else {}
        twice = op.kind == "mul" and list(op.inputs) == [value, value]
        if (
            op.kind == "square"
            or (op.kind == "integer_pow" and params.get("y") == 2)
            or twice
        ):
            out.extend(op.outputs)
    return out
