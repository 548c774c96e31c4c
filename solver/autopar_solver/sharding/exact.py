"""Solves a field as an integer program with few memory rows, and adds rows as needed.

A *field* is the problem left after reductions (`autopar_solver.sharding.field`). A
*memory row* limits the memory at one time.

Let ``x[k, a]`` be binary (node ``k`` uses strategy ``a``), and ``y[e, a, b] >= 0``
continuous (edge ``e = (k, m)`` uses the pair). The integer program is::

    minimise    sum costs[k, a] x[k, a] + sum tables[e][a, b] y[e, a, b]
    one_strategy_k    sum_a x[k, a] = 1
    source_e_a        sum_b y[e, a, b] = x[k, a]
    target_e_b        sum_a y[e, a, b] = x[m, b]
    memory_r          sum usage[r, k, a] x[k, a] <= room[r]

The edge variables are integral whenever the node variables are. The program first
contains only a few of the memory rows. If an answer exceeds other rows, `solve_field`
adds these rows and solves the program again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.ilp.highs import Backend, IntegerProgram, StopCriteria
from autopar_solver.sharding.field import Field


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CutRow:
    """One row ``sum values x[columns] <= upper`` over all nodes' strategies."""

    name: str
    columns: np.ndarray
    values: np.ndarray
    upper: float


def build_program(field: Field, scale: float, cuts: Sequence[CutRow]) -> IntegerProgram:
    """Builds the program with costs divided by ``scale``, and with the given cuts."""
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
    """Returns the memory constraint at one row."""
    memory = field.memory
    live = (memory.starts <= row) & (row < memory.ends)
    entries = live[memory.term] & (memory.usage > 0)
    total = np.bincount(
        memory.strategy[entries], memory.usage[entries], field.num_strategies
    )
    columns = np.flatnonzero(total)
    return CutRow(f"memory_{row}", columns, total[columns], float(memory.room[row]))


def exclusion_cut(field: Field, row: int, choices: np.ndarray) -> CutRow:
    """Forbids the combination of these choices, which exceeds the limit at a row.

    The cut is needed only if the solver, within its tolerance, returns choices that
    slightly exceed a memory row of the program.
    """
    columns = memory_cut(field, row).columns
    chosen = np.intersect1d(columns, field.offsets[:-1] + choices)
    return CutRow(
        f"exclusion_{row}", chosen, np.ones(len(chosen)), float(len(chosen) - 1)
    )


_Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Entries per row, columns, values, and the right-hand side of equalities."""


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


ROWS_PER_ROUND = 8
"""Number of exceeded memory rows that are added at once, far apart in time."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FieldAnswer:
    """Choices of a field's nodes that fit in memory, or None, and a proven lower bound.

    Attributes:
        choices: the choices; None if none below the cutoff were found.
        cost: the cost of the choices, including the field's constant.
        bound: the bound, including the field's constant; at least the cutoff if nothing
            better exists.
        finished: whether cost and bound differ by at most the gap, or the bound has
            reached the cutoff.
        rows: the memory rows that answers exceeded so far, to begin the next solve
          with.
    """

    choices: np.ndarray | None
    cost: float
    bound: float
    finished: bool
    rows: tuple[int, ...]


def solve_field(
    field: Field,
    backend: Backend,
    stop: StopCriteria,
    rows: tuple[int, ...] = (),
    start: np.ndarray | None = None,
) -> FieldAnswer:
    """Solves a field; ``stop`` is in units of the field's costs, constant included.

    Args:
        field: the field to solve.
        backend: the solver of each program.
        stop: time, gap and cutoff; the gap is absolute.
        rows: the first memory rows of the program.
        start: choices that fit, as a first solution.
    """
    deadline = _deadline(stop)
    scale = _scale(field)
    cuts = {row: memory_cut(field, row) for row in rows}
    extra: list[CutRow] = []
    bound = -np.inf
    while True:
        program = build_program(field, scale, [*cuts.values(), *extra])
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < 0.02:
            return FieldAnswer(None, np.inf, bound, False, tuple(cuts))
        cutoff = _scaled_cutoff(stop.cutoff, field, scale)
        inner = StopCriteria(left, stop.gap / scale, cutoff, stop.branches)
        answer = backend(program, inner, _values(field, program, start))
        bound = max(bound, min(answer.bound * scale + field.constant, stop.cutoff))
        if answer.values is None:
            return FieldAnswer(None, np.inf, bound, answer.finished, tuple(cuts))
        choices = field.least(-answer.values[: field.num_strategies])
        broken = broken_rows(field, choices)
        if not len(broken):
            cost = field.cost(choices)
            return FieldAnswer(choices, cost, bound, answer.finished, tuple(cuts))
        extra += [exclusion_cut(field, row, choices) for row in broken if row in cuts]
        cuts |= {row: memory_cut(field, row) for row in broken if row not in cuts}


def broken_rows(field: Field, choices: np.ndarray) -> tuple[int, ...]:
    """The memory rows that choices exceed most: one for each run of exceeded rows.

    The rows with the largest excess come first.
    """
    over = field.memory.usage_of(choices) - field.memory.room
    at = np.flatnonzero(over > field.memory.slack)
    if not len(at):
        return ()
    stretches = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    worst = [int(part[np.argmax(over[part])]) for part in stretches]
    return tuple(sorted(worst, key=lambda row: -over[row])[:ROWS_PER_ROUND])


def _deadline(stop: StopCriteria) -> float | None:
    return None if stop.seconds is None else time.monotonic() + stop.seconds


def _scale(field: Field) -> float:
    """A divisor that brings costs near 1, because backends have absolute tolerances."""
    parts = [*field.tables, *np.split(field.costs, field.offsets[1:-1])]
    finite = (part[part < np.inf] for part in parts)
    total = sum(float(np.ptp(part)) for part in finite if part.size)
    return total / 1e4 if total > 0 else 1.0


def _scaled_cutoff(cutoff: float, field: Field, scale: float) -> float:
    return (cutoff - field.constant) / scale


def _values(
    field: Field, program: IntegerProgram, choices: np.ndarray | None
) -> np.ndarray | None:
    if choices is None:
        return None
    values = np.zeros(len(program.costs))
    values[field.offsets[:-1] + choices] = 1.0
    first = field.num_strategies
    for (k, m), table in zip(field.edges, field.tables, strict=True):
        values[first + choices[k] * table.shape[1] + choices[m]] = 1.0
        first += table.size
    return values
