"""The text of a step's program, with which processes find where programs differ."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator
from autopar_passes.program.equations import Equation, Program, Scalar, walk


def identity(analysis: Analysis) -> str:
    """Returns a digest of the operators, shapes and constants of a step."""
    digest = hashlib.sha256(analysis.fingerprint.encode())
    for eqn in walk(analysis.program.body):
        digest.update(f"{eqn.primitive}{_scalars(eqn)}".encode())
    for text in _constants(analysis.program):
        digest.update(text.encode())
    return digest.hexdigest()


def lines(analysis: Analysis) -> list[str]:
    """One line for each input, closed-over array and operator of a step, in order."""
    program, graph = analysis.program, analysis.graph
    inputs = [f"input '{i.path}': {_value(program, i.value)}" for i in graph.inputs]
    constants = [f"closed-over array {text}" for text in _constants(program)]
    operators = [_operator(program, eqn) for eqn in walk(program.body)]
    return [*inputs, *constants, *operators]


def first_difference(one: list[str], other: list[str]) -> tuple[str, str] | None:
    """The first pair of lines that differ; 'nothing' stands for a missing line."""
    for k in range(max(len(one), len(other))):
        pair = tuple(text[k] if k < len(text) else "nothing" for text in (one, other))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return None


def _operator(program: Program, eqn: Equation) -> str:
    line = jax_compat.source_line(eqn.source)
    made = ", ".join(_value(program, v) for v in eqn.outputs)
    scalars = _scalars(eqn)
    with_ = f" with {scalars}" if scalars else ""
    return f"operator '{eqn.primitive}'{f' ({line})' if line else ''}{with_} -> {made}"


def _value(program: Program, number: int) -> str:
    value = program.values[number]
    return f"{value.dtype}{list(value.shape)}"


def _scalars(eqn: Equation) -> str:
    return ", ".join(str(a.value) for a in eqn.inputs if isinstance(a, Scalar))


def _constants(program: Program) -> list[str]:
    """Type and digest of each closed-over array; only the type of a global array."""
    return [_constant(x) for x in program.constants]


def _constant(array: Any) -> str:
    aval = jax.typeof(array)
    text = f"{aval.dtype}{list(aval.shape)}"
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return text
    if jax_compat.is_extended(aval.dtype):
        array = jax.random.key_data(array)
    data = np.ascontiguousarray(np.asarray(array)).tobytes()
    return f"{text} with digest {hashlib.sha256(data).hexdigest()[:8]}"


# Readable names of operators, inputs and arrays.


def node_name(analysis: Analysis, node: Node) -> str:
    """Returns the name of the first operator of a node."""
    return operator_name(analysis, node.root)


def operator_name(analysis: Analysis, index: int) -> str:
    """Returns the path of an input, or module path and primitive of an operator.

    A step may close over an array, such as a table made by numpy. Such an array is an
    input of the program without a path. Its name is ``constant``.
    """
    op = analysis.graph.operators[index]
    if op.kind == "input":
        return analysis.input_paths.get(op.outputs[0], "constant")
    return f"{op.module}/{op.kind}" if op.module else op.kind


def array_name(analysis: Analysis, value: int) -> str:
    """Returns an input's path, or the module and primitive that compute a value."""
    return operator_name(analysis, analysis.contraction.producer[value].index)


def operator_place(op: Operator) -> str:
    """Module path and primitive in quotes, and the line of the user's code."""
    where = f" ({op.source})" if op.source else ""
    return f"'{op.module}/{op.kind}'{where}" if op.module else f"'{op.kind}'{where}"
