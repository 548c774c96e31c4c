"""Builds the integer program of a field.

With ``x[k, a]`` binary (node ``k`` uses strategy ``a``) and ``y[e, a, b] >= 0``
continuous (edge ``e = (k, m)`` uses the pair)::

    minimise    sum costs[k, a] x[k, a] + sum tables[e][a, b] y[e, a, b]
    one_strategy_k    sum_a x[k, a] = 1
    source_e_a        sum_b y[e, a, b] = x[k, a]
    target_e_b        sum_a y[e, a, b] = x[m, b]
    memory_r          sum usage[r, k, a] x[k, a] <= room[r]

The edge variables are whole as soon as the node variables are. Memory rows are few of
many: the caller adds those that answers break.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar_solver.ilp.program import IntegerProgram
from autopar_solver.sharding.field import Field


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CutRow:
    """One row ``sum values x[columns] <= upper`` over flat strategies."""

    name: str
    columns: np.ndarray
    values: np.ndarray
    upper: float


def build_program(field: Field, scale: float, cuts: Sequence[CutRow]) -> IntegerProgram:
    """Builds the program with costs divided by ``scale`` and these cuts."""
    blocks = [_one_strategy(field), *_edges(field)]
    counts = [counts for counts, _, _, _ in blocks]
    columns = [columns for _, columns, _, _ in blocks]
    values = [values for _, _, values, _ in blocks]
    sides = [side for _, _, _, side in blocks]
    for cut in cuts:
        counts.append(np.array([len(cut.columns)]))
        columns.append(cut.columns)
        unit = cut.upper if cut.upper > 0 else 1.0
        values.append(cut.values / unit)
        sides.append(np.array([cut.upper / unit]))
    upper = np.concatenate(sides)
    lower = upper.copy()
    lower[len(upper) - len(cuts) :] = -np.inf
    costs = np.concatenate([field.costs, *(t.reshape(-1) for t in field.tables)])
    allowed = costs < np.inf
    return IntegerProgram(
        costs=np.where(allowed, costs, 0.0) / scale,
        most=allowed.astype(np.float64),
        num_binary=field.num_strategies,
        starts=np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        columns=np.concatenate(columns),
        values=np.concatenate(values),
        lower=lower,
        upper=upper,
        names=tuple(cut.name for cut in cuts),
    )


def memory_cut(field: Field, row: int) -> CutRow:
    """The memory row at one time."""
    memory = field.memory
    live = (memory.starts <= row) & (row < memory.ends)
    entries = live[memory.term] & (memory.usage > 0)
    total = np.bincount(
        memory.strategy[entries], memory.usage[entries], field.num_strategies
    )
    columns = np.flatnonzero(total)
    return CutRow(f"memory_{row}", columns, total[columns], float(memory.room[row]))


def exclusion_cut(field: Field, row: int, choices: np.ndarray) -> CutRow:
    """Not all of these choices at once: they are over the limit at a row.

    Needed only where a solver's tolerance lets a memory row be broken slightly.
    """
    columns = memory_cut(field, row).columns
    chosen = np.intersect1d(columns, field.offsets[:-1] + choices)
    return CutRow(
        f"exclusion_{row}", chosen, np.ones(len(chosen)), float(len(chosen) - 1)
    )


_Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Entries by row, columns, values, and the right-hand side of equalities."""


def _one_strategy(field: Field) -> _Block:
    return (
        field.sizes,
        np.arange(field.num_strategies),
        np.ones(field.num_strategies),
        np.ones(field.num_nodes),
    )


def _edges(field: Field) -> list[_Block]:
    first, blocks = field.num_strategies, list[_Block]()
    for (k, m), table in zip(field.edges, field.tables, strict=True):
        pairs = np.arange(first, first + table.size).reshape(table.shape)
        blocks.append(_marginal(pairs, int(field.offsets[k])))
        blocks.append(_marginal(pairs.T, int(field.offsets[m])))
        first += table.size
    return blocks


def _marginal(pairs: np.ndarray, offset: int) -> _Block:
    rows, width = pairs.shape
    own = np.arange(offset, offset + rows)[:, None]
    columns = np.concatenate([pairs, own], axis=1).reshape(-1)
    values = np.ones((rows, width + 1))
    values[:, -1] = -1.0
    return np.full(rows, width + 1), columns, values.reshape(-1), np.zeros(rows)
