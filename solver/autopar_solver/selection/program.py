"""Builds the integer program of a codec selection.

Gradients are numbered in the link's order. A *block* is a list of successive gradients
that the link sends without a pause, whatever options are chosen: the link is still busy
when the next gradient of the block is ready, even if all gradients use their fastest
options. Let ``x[l, k]`` be binary (gradient ``l`` uses option ``k``), ``W[b]`` the wire
time of block ``b``, and ``f[b]`` the time at which the link finishes block ``b``::

    minimise    t + sum local[l, k] x[l, k]
    one_codec_l    sum_k x[l, k] = 1
    start_b        ready[b] + W[b] <= f[b]
    queue_b        f[b - 1] + W[b] <= f[b]
    exposed        f[last] - backward <= t
    error          sum error[l, k] x[l, k]  <= error_budget
    memory         sum memory[l, k] x[l, k] <= memory_budget

``queue_b`` is left out if block ``b - 1`` always finishes before block ``b`` is ready.
A budget is left out if no choice can exceed it. Every quantity is stored as its
difference from its least value, in units that bring the numbers near 1, because the
backends' tolerances are absolute.

The module also computes three kinds of prices, in seconds of the step: of one second on
the link (one price, called weight, for each gradient), of one unit of error, and of one
byte of memory.

Suppose the weights do not decrease along the link's order and lie between 0 and 1, and
the prices are not negative. Then every choice within the budgets costs at least

    sum_l min_k (weight[l] wire[l][k] + local[l][k]
                 + error_price error[l][k] + memory_price memory[l][k])
    + sum_l (weight[l] - weight[l - 1]) (ready[l] - backward)
    - error_price error_budget - memory_price memory_budget

The reason is that the exposed time is at least 0, and at least
``ready[l] + sum_(m >= l) wire[m] - backward`` for every ``l``. The best weights and
prices are the dual solution of the program without integrality.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_solver.ilp.highs import IntegerProgram, solve_without_integrality
from autopar_solver.selection.problem import CodecSelection, OptionTable, options_of
from autopar_solver.status import Status

ROUNDING = 1e-12
"""The rounding error of a sum of hundreds of terms, as a share of a budget."""

RANGE_UNITS = 1e4
"""The range of time of all choices together, in the program's units of time."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Lists of successive gradients that the link sends without a pause.

    Attributes:
        block: the block of each gradient.
        ready: for each block, the second at which its first gradient is ready.
        earliest: for each block, the second at which the link finishes the block, if
            every gradient uses its fastest option.
        latest: the same, if every gradient uses its slowest option.
        least: for each block, its seconds on the link if every gradient uses its
            fastest option.
    """

    block: np.ndarray
    ready: np.ndarray
    earliest: np.ndarray
    latest: np.ndarray
    least: np.ndarray


def blocks_of(problem: CodecSelection, options: OptionTable) -> Blocks:
    """Divides the gradients into blocks."""
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
    """Returns the times at which the link finishes each gradient."""
    finishes = np.empty(len(ready))
    finish = 0.0
    for place in range(len(ready)):
        finish = max(finish, float(ready[place])) + float(wire[place])
        finishes[place] = finish
    return finishes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SelectionProgram:
    """An integer program, with the meaning of its variables.

    The variables are the options, then ``f`` of each block minus ``blocks.earliest``,
    then ``t`` minus its least value.

    Attributes:
        program: the integer program.
        options: the options that the first variables choose.
        blocks: the blocks that the variables ``f`` belong to.
        unit_s: seconds per unit of cost and time.
        constant_s: the least cost that every choice has; the program's objective leaves
          it out.
        scales: name of a budget's row -> the amount of error or memory that is one unit
            of the row.
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
    """Builds the program of a selection from a table of options."""
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
    # Rounding may put the latest finish slightly before the earliest.
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
    """Adds the rows ``start_b``, ``queue_b`` and ``exposed`` of the program."""
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
    """Adds the rows ``error`` and ``memory`` of the module's program.

    The unit of a row is its budget minus the least sum that any choice has.
    """
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
    """Puts the rows ``one_codec_l`` first, then the collected rows."""
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRelaxation:
    """The prices for a selection, and the lower bound of the cost that they prove.

    Attributes:
        wire_weights: for each gradient, in the problem's numbering, the price of one
            second on the link: 0 to 1 seconds of the step.
        seconds_per_error: the price of one unit of squared error, in seconds of the
            step.
        seconds_per_byte: the price of one byte of memory, in seconds of the step.
        bound_s: a lower bound of the cost of all choices within the budgets; ``inf`` if
            there are none.
        status: ``OPTIMAL``, or ``INFEASIBLE`` without prices.
    """

    wire_weights: tuple[float, ...]
    seconds_per_error: float
    seconds_per_byte: float
    bound_s: float
    status: Status

    def option_prices(self, problem: CodecSelection) -> tuple[np.ndarray, ...]:
        """Returns the cost of each gradient's options at these prices, in seconds."""
        rows = zip(
            self.wire_weights,
            problem.wire_s,
            problem.local_s,
            problem.error,
            problem.memory,
            strict=True,
        )
        return tuple(
            _times(weight, wire)
            + local
            + _times(self.seconds_per_error, error)
            + _times(self.seconds_per_byte, memory)
            for weight, wire, local, error, memory in rows
        )


def solve_relaxation(problem: CodecSelection) -> SelectionRelaxation:
    """Finds the prices that prove the highest lower bound of the cost.

    >>> problem = CodecSelection(
    ...     wire_s=(np.array([4.0, 1.0]), np.array([4.0, 1.0])),
    ...     local_s=(np.array([0.0, 0.5]), np.array([0.0, 0.5])),
    ...     error=(np.array([0.0, 0.25]), np.array([0.0, 0.25])),
    ...     ready_s=(3.0, 3.0),
    ...     backward_s=3.0,
    ...     error_budget=0.3,
    ... )
    >>> round(solve_relaxation(problem).seconds_per_error, 6)  # 2.5 seconds for 0.25
    10.0
    """
    if not problem.wire_s:
        return _relaxation((), 0.0, 0.0, 0.0, Status.OPTIMAL)
    options = options_of(problem)
    relaxed = (
        None if options is None else relax(problem, build_program(problem, options))
    )
    if relaxed is None:
        return _relaxation((), math.inf, math.inf, math.inf, Status.INFEASIBLE)
    weights = np.empty(len(relaxed.weights))
    weights[list(problem.order)] = relaxed.weights
    return _relaxation(
        tuple(float(weight) for weight in weights),
        relaxed.error_price,
        relaxed.memory_price,
        max(0.0, relaxed.bound_s),
        Status.OPTIMAL,
    )


def _relaxation(
    weights: tuple[float, ...],
    error_price: float,
    memory_price: float,
    bound: float,
    status: Status,
) -> SelectionRelaxation:
    return SelectionRelaxation(
        wire_weights=weights,
        seconds_per_error=error_price,
        seconds_per_byte=memory_price,
        bound_s=bound,
        status=status,
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """The relaxed program's solution and prices.

    Attributes:
        shares: for each option, the value of its variable in the relaxed solution, 0 to
            1.
        weights: by gradient in the link's order, the price of a second on the link.
        error_price, memory_price: seconds per unit.
        bound_s: the bound that the prices prove; it may be negative.
        rises: for each option, the seconds above ``bound_s`` that every choice with the
            option costs at least.
    """

    shares: np.ndarray
    weights: np.ndarray
    error_price: float
    memory_price: float
    bound_s: float
    rises: np.ndarray


def relax(problem: CodecSelection, built: SelectionProgram) -> Relaxed | None:
    """Solves the relaxed program; None if even the relaxed program is infeasible."""
    solved = solve_without_integrality(built.program)
    if solved is None:
        return None
    values, duals = solved
    named = dict(zip(built.program.names, duals, strict=True))
    count = len(built.blocks.ready)
    weights = np.array(
        [named[f"start_{b}"] + named.get(f"queue_{b}", 0.0) for b in range(count)]
    )
    # Every sequence of weights that never decreases proves a lower bound. The solver's
    # duals may decrease slightly from rounding, and the running maximum corrects that,
    # so the bound stays valid.
    weights = np.maximum.accumulate(weights.clip(0.0, 1.0))[built.blocks.block]
    prices = {
        name: max(0.0, float(named[name])) * built.unit_s / scale
        for name, scale in built.scales.items()
    }
    error_price, memory_price = prices.get("error", 0.0), prices.get("memory", 0.0)
    options = built.options
    priced = options.prices_at(weights, error_price, memory_price)
    return Relaxed(
        shares=values[: len(priced)],
        weights=weights,
        error_price=error_price,
        memory_price=memory_price,
        bound_s=_lower_bound(
            problem, options, priced, weights, error_price, memory_price
        ),
        rises=options.above(priced),
    )


def _lower_bound(
    problem: CodecSelection,
    options: OptionTable,
    priced: np.ndarray,
    weights: np.ndarray,
    error_price: float,
    memory_price: float,
) -> float:
    """Computes the lower bound that the module's docstring states."""
    ready = np.array(sorted(problem.ready_s)) - problem.backward_s
    terms = [*options.least(priced), *(np.diff(weights, prepend=0.0) * ready)]
    for price, budget in (
        (error_price, problem.error_budget),
        (memory_price, problem.memory_limit),
    ):
        if price:
            terms.append(-price * budget)
    return math.fsum(terms)


def _times(price: float, values: np.ndarray) -> np.ndarray:
    """Multiplies; an infinite value stays infinite even at a price of 0."""
    return np.where(np.isfinite(values), values * price if price else 0.0, np.inf)
