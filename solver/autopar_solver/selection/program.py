"""Builds the integer program of a codec selection.

Gradients are numbered in the link's order. Those that cannot find the link idle, even
if every earlier one is sent with its fastest option, follow the one before without a
pause; each such run is one *block*. With ``x[l, k]`` binary (gradient ``l`` uses option
``k``), ``W[b]`` the wire time of block ``b``, ``f[b]`` when the link is done with it::

    minimise    t + sum local[l, k] x[l, k]
    one_codec_l    sum_k x[l, k] = 1
    start_b        ready[b] + W[b] <= f[b]
    queue_b        f[b - 1] + W[b] <= f[b]
    exposed        f[last] - backward <= t
    error          sum error[l, k] x[l, k]  <= error_budget
    memory         sum memory[l, k] x[l, k] <= memory_budget

``queue_b`` is left out where block ``b - 1`` is always done in time, a budget where it
cannot be broken. Everything is stored as what it has above its least, in units that
bring the numbers near one: the backends' tolerances are absolute.
"""

import dataclasses
import math

import numpy as np

from autopar_solver.ilp.program import IntegerProgram
from autopar_solver.selection.options import OptionTable
from autopar_solver.selection.problem import CodecSelection

ROUNDING = 1e-12
"""By what share of a budget a sum of hundreds of terms may be off."""

RANGE_UNITS = 1e4
"""How many of the program's units of time all choices together can make."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Runs of gradients that the link takes without a pause.

    Attributes:
        block: by gradient.
        ready: when each block's first gradient is ready, in seconds.
        earliest, latest: when the link is done with each block if every gradient is
            sent with its fastest, or its slowest option.
        least: wire seconds of each block if every gradient has its fastest option.
    """

    block: np.ndarray
    ready: np.ndarray
    earliest: np.ndarray
    latest: np.ndarray
    least: np.ndarray


def blocks_of(problem: CodecSelection, options: OptionTable) -> Blocks:
    """Finds the blocks."""
    ready = np.array(sorted(problem.ready_s))
    fastest, slowest = options.least(options.wire), options.most(options.wire)
    earliest, latest = link_finishes(ready, fastest), link_finishes(ready, slowest)
    first = np.concatenate([[True], earliest[:-1] < ready[1:]])
    block = np.cumsum(first) - 1
    last = np.concatenate([first[1:], [True]])
    return Blocks(
        block=block,
        ready=ready[first],
        earliest=earliest[last],
        latest=latest[last],
        least=np.bincount(block, fastest),
    )


def link_finishes(ready: np.ndarray, wire: np.ndarray) -> np.ndarray:
    """When the link is done with each gradient."""
    finishes = np.empty(len(ready))
    finish = 0.0
    for place in range(len(ready)):
        finish = max(finish, float(ready[place])) + float(wire[place])
        finishes[place] = finish
    return finishes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SelectionProgram:
    """A program and what its numbers mean.

    Variables are the options, then ``f`` by block above ``blocks.earliest``, then ``t``
    above ``constant``'s share of it.

    Attributes:
        program: the integer program.
        options: its first columns.
        blocks: the runs of gradients behind ``f``.
        unit_s: seconds of one unit of cost and time.
        constant_s: what every choice costs.
        scales: by budget row, what one unit of it is.
    """

    program: IntegerProgram
    options: OptionTable
    blocks: Blocks
    unit_s: float
    constant_s: float
    scales: dict[str, float]


class _Rows:
    """Rows ``sum values v[columns] <= upper``, collected by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.upper: list[float] = []

    def add(
        self, name: str, upper: float, *parts: tuple[np.ndarray, np.ndarray]
    ) -> None:
        self.names.append(name)
        self.columns.append(np.concatenate([columns for columns, _ in parts]))
        self.values.append(np.concatenate([values for _, values in parts]))
        self.upper.append(upper)


def build_program(problem: CodecSelection, options: OptionTable) -> SelectionProgram:
    """Builds the program of a selection over these options."""
    blocks = blocks_of(problem, options)
    span = options.above(options.wire).sum() + options.above(options.local).sum()
    unit = float(span) / RANGE_UNITS or 1.0
    base = max(0.0, float(blocks.earliest[-1]) - problem.backward_s)
    rows = _Rows()
    _link_rows(rows, problem, options, blocks, unit)
    scales = _budget_rows(rows, problem, options)
    size, count = len(options.gradient), len(blocks.ready)
    costs = np.concatenate(
        [options.above(options.local) / unit, np.zeros(count), [1.0]]
    )
    late = max(0.0, float(blocks.latest[-1]) - problem.backward_s)
    # Rounding may put the latest a bit before the earliest.
    spans = np.append(blocks.latest - blocks.earliest, late - base).clip(0.0)
    return SelectionProgram(
        program=_program(options, costs, np.append(np.ones(size), spans / unit), rows),
        options=options,
        blocks=blocks,
        unit_s=unit,
        constant_s=base + math.fsum(options.least(options.local)),
        scales=scales,
    )


def _link_rows(
    rows: _Rows,
    problem: CodecSelection,
    options: OptionTable,
    blocks: Blocks,
    unit: float,
) -> None:
    """``start_b``, ``queue_b`` and ``exposed``."""
    size, count = len(options.gradient), len(blocks.ready)
    wire = options.above(options.wire) / unit
    own = np.split(
        np.arange(size),
        np.searchsorted(blocks.block[options.gradient], np.arange(1, count)),
    )
    for b in range(count):
        finish = float(blocks.earliest[b] - blocks.least[b])
        parts = (own[b], wire[own[b]]), _entry(size + b, -1.0)
        rows.add(f"start_{b}", (finish - float(blocks.ready[b])) / unit, *parts)
        if b and blocks.latest[b - 1] > blocks.ready[b]:
            slack = finish - float(blocks.earliest[b - 1])
            rows.add(f"queue_{b}", slack / unit, *parts, _entry(size + b - 1, 1.0))
    late = float(blocks.earliest[-1]) - problem.backward_s
    last = _entry(size + count - 1, 1.0), _entry(size + count, -1.0)
    rows.add("exposed", max(0.0, -late) / unit, *last)


def _entry(column: int, value: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([column]), np.array([value])


def _budget_rows(
    rows: _Rows, problem: CodecSelection, options: OptionTable
) -> dict[str, float]:
    """``error`` and ``memory``, each in units of the room above its least."""
    scales: dict[str, float] = {}
    for name, values, budget in (
        ("error", options.error, problem.error_budget),
        ("memory", options.memory, problem.memory_limit),
    ):
        above = options.above(values)
        least = math.fsum(options.least(values))
        room = max(budget - least, 0.0) + ROUNDING * budget
        if math.fsum(options.most(above)) > room:
            columns = np.flatnonzero(above)
            rows.add(name, 1.0, (columns, above[columns] / room))
            scales[name] = room
    return scales


def _program(
    options: OptionTable, costs: np.ndarray, most: np.ndarray, rows: _Rows
) -> IntegerProgram:
    """``one_codec_l`` first, then the rows."""
    size, count = len(options.gradient), options.num_gradients
    lengths = np.concatenate(
        [np.diff(options.starts), [len(columns) for columns in rows.columns]]
    )
    return IntegerProgram(
        costs=costs,
        most=most,
        num_binary=size,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        columns=np.concatenate([np.arange(size), *rows.columns]),
        values=np.concatenate([np.ones(size), *rows.values]),
        lower=np.concatenate([np.ones(count), np.full(len(rows.upper), -np.inf)]),
        upper=np.concatenate([np.ones(count), rows.upper]),
        names=tuple(rows.names),
    )
