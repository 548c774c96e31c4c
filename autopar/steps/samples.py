"""The number of rows and tokens that a step learns from."""

from __future__ import annotations

import math

from autopar.steps.batch import batch_rows, is_integer
from autopar_passes.graph.operators import OperatorGraph, readers
from autopar_passes.graph.roles import InputRole, Role


def samples(graph: OperatorGraph) -> int:
    """Samples in one step, 0 without a batch.

    They are the rows of the batch. What a loop cuts off, the parts of the batch or
    several batches, counts with them.
    """
    turns = [i.turns for i in graph.inputs if i.rows >= 0 and i.unit == 1]
    return batch_rows(graph) * max(turns, default=1)


def batch_tokens(graph: OperatorGraph) -> int:
    """Tokens of the batch in one step, 0 where it holds none.

    Tokens are the whole numbers of the batch by which the forward pass looks up rows
    of a table, several for each row of the batch. Numbers that the step cuts off
    before, such as the last token of a row, do not count.
    """
    rows = samples(graph)
    most = max(_looked_up(graph), default=0)
    return most if most > rows else 0


def _looked_up(graph: OperatorGraph) -> list[int]:
    """Rows of floating tables that numbers of the batch look up, by operator."""
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
