"""Solves a field as an integer program, adding the memory rows that answers break."""

import dataclasses
import time

import numpy as np

from autopar_solver.ilp.program import Backend, IntegerProgram, StopCriteria
from autopar_solver.sharding.field import Field
from autopar_solver.sharding.program import (
    CutRow,
    build_program,
    exclusion_cut,
    memory_cut,
)

ROWS_PER_ROUND = 8
"""Broken memory rows added at once, far apart in time."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FieldAnswer:
    """Choices of a field's nodes that fit, or None, and a proven bound.

    Attributes:
        choices: None if nothing under the cutoff was found.
        cost: of the choices, the field's constant included.
        bound: the same; at least the cutoff if nothing better exists.
        finished: whether the bound is within the gap or at the cutoff.
        rows: memory rows that answers broke, for the next solve.
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
    """Solves a field; ``stop`` is in the field's costs, its constant included.

    Args:
        field: what to solve.
        backend: who solves each program.
        stop: time, gap and cutoff; the gap is absolute.
        rows: memory rows to begin with.
        start: choices that fit, where the search may begin.
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
    """Rows over their room: the worst of each stretch, the worst stretches first."""
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
    """Brings costs near one: the backends' tolerances are absolute."""
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
