"""Finds the factors and dimensions of a program that grow with the batch.

The search follows the rows of the batch inputs (`autopar_passes.graph.build`) through
the sharding rules. In an integer batch input (tokens), the dimension next to the rows
is the sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.errors import PlanError
from autopar.steps.nodes import Contraction
from autopar_errors import TraceError
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator, OperatorGraph, readers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import struct_of
from autopar_passes.program.trace import trace_call

BATCH = "batch"
SEQUENCE = "sequence"


@dataclasses.dataclass(frozen=True, slots=True)
class DimLabels:
    """Labels of the dimensions of values and of the factors of operators.

    Attributes:
      operators: the operators of the graph.
      dims: value -> the label of each dimension, '' if it has none. Values that do not
        depend on the batch have no entry.
      factors: operator -> factor of its rule -> label. A factor that is missing here,
        or has the label '', has no label.
    """

    operators: tuple[Operator, ...]
    dims: dict[int, list[str]]
    factors: dict[int, dict[int, str]]

    def degree(self, value: int) -> int:
        """Returns the number of dimensions of a value that grow with the batch."""
        return sum(name == BATCH for name in self.dims.get(value, ()))

    def batch_factors(self, operator: int) -> frozenset[int]:
        """Returns the factors of an operator's rule that grow with the batch."""
        found = self.factors.get(operator, {})
        return frozenset(f for f, name in found.items() if name == BATCH)


def dim_labels(graph: OperatorGraph) -> DimLabels:
    """Labels every dimension and factor that comes from the batch or sequence."""
    out = DimLabels(graph.operators, {}, {})
    for given in graph.inputs:
        value = graph.values[given.value]
        if given.rows >= 0:
            names = [""] * len(value.shape)
            names[given.rows] = BATCH
            if len(names) > 1 and is_integer(value.dtype):
                beside = given.rows + 1 if given.rows + 1 < len(names) else 0
                names[beside] = names[beside] or SEQUENCE
            out.dims[given.value] = names
    for op in graph.operators:
        out.factors[op.index] = found = dict(_labels(op, out.dims))
        if op.kind == "input":
            continue
        for value, dims in zip(op.outputs, op.rule.results, strict=True):
            names = [found.get(d[0], "") if d else "" for d in dims]
            if op.kind in _CUTTING:
                kept = (BATCH, SEQUENCE) if op.kind in _LONGER else (SEQUENCE,)
                names = _keep_labels(names, _dims_of(out, op.inputs[0]), kept)
            if graph.values[value].shape:
                out.dims[value] = names
    return out


def _dims_of(labels: DimLabels, value: int | None) -> list[str]:
    return [] if value is None else labels.dims.get(value, [])


# Operators whose result is a part of an operand, or contains an operand as a part.
_CUTTING = ("slice", "dynamic_slice", "pad", "concatenate")
# Of them, the operators that make a dimension longer, as padding does with rows.
_LONGER = ("pad", "concatenate")


def _keep_labels(names: list[str], before: list[str], kept: Sequence[str]) -> list[str]:
    """Keeps labels of a dimension of another length, as in ``tokens[:, :-1]``."""
    if len(names) != len(before):
        return names
    return [
        old if old in kept and not name else name
        for name, old in zip(names, before, strict=True)
    ]


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is an integer type; the dtype of random keys is not."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


def batch_dims(graph: OperatorGraph, least: int = 2) -> dict[int, int]:
    """Flat input that holds rows of the batch -> the dimension of the rows.

    All these inputs have the same number of rows, which is at least ``least``. With one
    row, no operator's rule names the dimension.
    """
    return {
        k: given.rows
        for k, given in enumerate(graph.inputs)
        if given.rows >= 0
        and given.unit == 1
        and graph.values[given.value].shape[given.rows] >= least
    }


def batch_rows(graph: OperatorGraph) -> int:
    """The number of rows of the batch that the program takes; 0 without a batch."""
    shapes = (
        graph.values[given.value].shape[given.rows]
        for given in graph.inputs
        if given.rows >= 0 and given.unit == 1
    )
    return max(shapes, default=0)


def check_has_rows(step: Callable[..., Any], call: StepCall) -> None:
    """Checks that the batch of a call has rows.

    The rows of an empty batch are found by a trace with two rows in the place of none.

    Raises:
      PlanError: an array of the batch has no rows.
    """
    structs = [struct_of(x) for x in call.arrays]
    shapes = [tuple(x.shape) for x in structs]
    if not any(0 in shape for shape in shapes):
        return
    arrays = [x.update(shape=tuple(n or 2 for n in x.shape)) for x in structs]
    try:
        traced = trace_call(step, dataclasses.replace(call, arrays=arrays))
    except Exception:
        # The step needs its empty arrays to be empty; its code may raise any exception.
        return
    graph = step_graph(traced)
    for k, dim in batch_dims(graph).items():
        if shapes[k][dim] == 0:
            raise PlanError(
                f"{traced.name}: the batch has 0 rows: '{graph.inputs[k].path}' has "
                f"shape {shapes[k]}, and dimension {dim} is its rows. A step needs at "
                "least one row: leave empty batches out."
            )


def rows_axes(
    graph: OperatorGraph, specs: Mapping[str, Sequence[Sequence[str]]]
) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split the rows of each input of the batch.

    Args:
      graph: the graph of the step.
      specs: path of an input -> the axes of its first dimensions.
    """
    return [
        tuple(specs[i.path][i.rows]) if i.rows < len(specs[i.path]) else ()
        for i in graph.inputs
        if i.rows >= 0
    ]


def _labels(op: Operator, dims: dict[int, list[str]]) -> Iterator[tuple[int, str]]:
    """Yields labels of an operator's factors, taken from the first labelled operand."""
    pairs = list(zip(op.inputs, op.rule.operands, strict=True))
    if op.kind == "input":
        pairs = list(zip(op.outputs, op.rule.results, strict=True))
    seen: set[int] = set()
    for value, value_dims in pairs:
        if value is None:
            continue
        for name, factors in zip(dims.get(value, ()), value_dims, strict=False):
            if name and factors and factors[0] not in seen:
                seen.add(factors[0])
                yield factors[0], name


def fails_with(rows: str, error: Exception) -> str:
    """Returns an error text: a step that runs on the whole batch fails on fewer rows.


    Args:
      rows: a description of the fewer rows, such as ``a microbatch of 8 rows``.
      error: the exception that tracing or the code of the step raised.
    """
    first = (str(error).strip().splitlines() or [""])[0]
    if not isinstance(error, TraceError):
        first = f"the step's own code fails with {type(error).__name__}: {first}"
    return (
        f"on {rows} {first.rstrip('.')}. Where it states the number of rows of the "
        "whole batch, take it from an array, as in x.shape[0]."
    )


def samples(graph: OperatorGraph) -> int:
    """Returns the number of samples in one step; 0 without a batch.

    The samples are the rows of the batch. If a loop of the step runs over parts of a
    batch or over several batches, the rows of all of them count.
    """
    turns = [i.turns for i in graph.inputs if i.rows >= 0 and i.unit == 1]
    return batch_rows(graph) * max(turns, default=1)


def batch_tokens(graph: OperatorGraph) -> int:
    """Returns the number of tokens of the batch in one step; 0 if the batch has none.

    Tokens are integers of the batch with which the forward pass looks up rows of a
    table. There are several tokens in each row of the batch. Integers that the step
    removes before the look-up, such as the last token of a row, do not count.
    """
    rows = samples(graph)
    most = max(_looked_up(graph), default=0)
    return most if most > rows else 0


def _looked_up(graph: OperatorGraph) -> list[int]:
    """Returns, for each gather, the number of rows that integers of the batch look up.

    Only tables of a floating-point type count.
    """
    read_by = readers(graph.operators)
    waiting = [i.value for i in graph.inputs if i.role is InputRole.BATCH]
    waiting = [value for value in waiting if is_integer(graph.values[value].dtype)]
    seen, found = set(waiting), list[int]()
    while waiting:
        value = waiting.pop()
        for op, slot in read_by.get(value, ()):
            if op.kind == "gather" and slot == 1:
                found += _rows_of(graph, op.inputs[0], value, op.role, op.trips)
                continue
            after = [v for v in op.outputs if is_integer(graph.values[v].dtype)]
            waiting += [v for v in after if v not in seen]
            seen.update(after)
    return found


def _rows_of(
    graph: OperatorGraph, table: int | None, indices: int, role: Role, trips: float
) -> list[int]:
    shape = graph.values[indices].shape
    if role is not Role.FORWARD or table is None or not graph.values[table].floating:
        return []
    return [round(math.prod(shape[:-1]) * trips)]


__all__ = ["BATCH", "SEQUENCE", "Labels", "factor_labels"]

# Node -> node factor -> label.
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
    """Gives each node the labels of the values whose layout it decides."""
    for value, home in contraction.homes.items():
        for name, factors in zip(found.dims.get(value, ()), home.dims, strict=False):
            if name and factors:
                labels.setdefault(home.node, {}).setdefault(factors[0], name)
