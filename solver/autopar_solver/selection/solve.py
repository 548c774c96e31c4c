"""Solves a codec selection by prices, a rounded choice, labels and an integer program.

The relaxed program gives a bound and, rounded and improved, choices: the incumbent.
Options whose price puts them above its cost are dropped. Labels improve choices and
bound, and solve what is small or repeats itself. If cost and bound do not meet, the
integer program decides between the options that are left.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.program import Backend, IntegerProgram, StopCriteria
from autopar_solver.selection.check import fits_budgets, recompute
from autopar_solver.selection.descent import descend
from autopar_solver.selection.incumbent import Incumbent
from autopar_solver.selection.labels import search_labels
from autopar_solver.selection.options import Options, options_of
from autopar_solver.selection.problem import CodecSelection
from autopar_solver.selection.program import (
    SelectionProgram,
    build_program,
    link_finishes,
)
from autopar_solver.selection.relaxation import Relaxed, relax
from autopar_solver.selection.solution import SelectionCost, SelectionResult
from autopar_solver.status import Status

ROUNDING_UNITS = 1e-5
"""Units of the program in which cost and bound may differ for rounding's sake."""

LABEL_WIDTHS = (64,)
"""How many labels are kept; wider searches took longer than the program they spare."""


def solve_selection(
    problem: CodecSelection,
    *,
    seconds: float | None = None,
    gap: float = 1e-4,
    backend: BackendName = "highs",
    widths: Sequence[int] = LABEL_WIDTHS,
) -> SelectionResult:
    """Finds the options that make the step shortest within the budgets.

    Without a time limit the same problem always gives the same result.

    Args:
        problem: what to solve; times of any scale.
        seconds: wall-clock limit; None to stop only when the gap is closed.
        gap: difference of cost and bound at which a result is called optimal, as a
            share of the backward pass and the cost together; 1e-9 of what the choices
            can change is always allowed.
        backend: who solves the integer program: "highs", or "cbc" through PuLP.
        widths: how many labels to keep, in turns; () for the integer program alone.

    Raises:
        InputError: there is no such backend.

    >>> import numpy as np
    >>> problem = CodecSelection(
    ...     wire_s=(np.array([4.0, 1.0]), np.array([4.0, 1.0])),
    ...     local_s=(np.array([0.0, 0.5]), np.array([0.0, 0.5])),
    ...     error=(np.array([0.0, 0.1]), np.array([0.0, 0.1])),
    ...     ready_s=(4.0, 0.0),
    ...     backward_s=5.0,
    ... )
    >>> solve_selection(problem).choices  # The second one's wire time is hidden.
    (1, 0)
    """
    clock = Clock(time.monotonic(), seconds)
    solver = backend_of(backend)
    if not problem.wire_s:
        return _result(problem, clock, Incumbent((), 0.0, 0.0), True)
    options = options_of(problem)
    built = None if options is None else build_program(problem, options)
    relaxed = None if built is None else relax(problem, built)
    if built is None or relaxed is None:
        return _result(problem, clock, Incumbent(None, math.inf, math.inf), True)
    incumbent = _rounded(problem, built.options, relaxed)
    for width in (*widths, None):
        allowed = _allowed(problem, built, gap, incumbent)
        if (
            incumbent.cost_s - incumbent.bound_s <= allowed
            or incumbent.bound_s == math.inf
        ):
            break
        left = built.options.keep(_worthwhile(problem, built, relaxed, incumbent))
        if width is None:
            return _solve_program(problem, clock, solver, left, incumbent, gap)
        incumbent = _search(problem, clock, left, relaxed, incumbent, allowed, width)
    return _result(problem, clock, incumbent, True)


def _rounded(problem: CodecSelection, options: Options, relaxed: Relaxed) -> Incumbent:
    """The option of least error that has a share of each gradient, if that fits.

    Without a memory budget it always does: no share has a smaller error. Changes that
    save time while they fit follow.
    """
    shared = relaxed.shares > 1e-9
    error = np.where(shared, options.error, np.inf)
    chosen = options.first(error == options.least(error)[options.gradient])
    incumbent = Incumbent(None, math.inf, relaxed.bound_s)
    incumbent = incumbent.offer(problem, _choices(problem, options, chosen))
    if incumbent.choices is None:
        return incumbent
    better = descend(problem, options, chosen)
    return incumbent.offer(problem, _choices(problem, options, better))


def _allowed(
    problem: CodecSelection, built: SelectionProgram, gap: float, incumbent: Incumbent
) -> float:
    """By how many seconds an optimal cost may be above the bound."""
    step = problem.backward_s + max(0.0, incumbent.bound_s)
    return max(gap * step, ROUNDING_UNITS * built.unit_s)


def _worthwhile(
    problem: CodecSelection,
    built: SelectionProgram,
    relaxed: Relaxed,
    incumbent: Incumbent,
) -> np.ndarray:
    """Marks the options of the incumbent, and those that better ones could have."""
    room = incumbent.cost_s - relaxed.bound_s + ROUNDING_UNITS * built.unit_s
    kept = relaxed.rises <= room
    if incumbent.choices is not None:
        codecs = np.array([incumbent.choices[index] for index in problem.order])
        kept |= built.options.codec == codecs[built.options.gradient]
    return kept


def _search(
    problem: CodecSelection,
    clock: Clock,
    options: Options,
    relaxed: Relaxed,
    incumbent: Incumbent,
    allowed: float,
    width: int,
) -> Incumbent:
    """Searches with labels for what is better by more than is allowed."""
    # Less than is allowed, so that rounding cannot leave the gap open.
    cutoff = incumbent.cost_s - 0.9 * allowed
    answer = search_labels(
        problem, options, relaxed, cutoff_s=cutoff, width=width, clock=clock
    )
    if answer is None:
        return incumbent
    if answer.chosen is not None:
        incumbent = incumbent.offer(problem, _choices(problem, options, answer.chosen))
    return incumbent.prove(min(answer.bound_s, cutoff))


def _choices(
    problem: CodecSelection, options: Options, chosen: np.ndarray
) -> tuple[int, ...]:
    """From options by the link's order to the problem's numbering."""
    choices = np.empty(len(chosen), np.int64)
    choices[list(problem.order)] = options.codec[chosen]
    return tuple(int(choice) for choice in choices)


def _solve_program(
    problem: CodecSelection,
    clock: Clock,
    solver: Backend,
    options: Options,
    incumbent: Incumbent,
    gap: float,
) -> SelectionResult:
    """Solves the integer program, from the incumbent if there is one."""
    built = build_program(problem, options)
    program = built.program
    start = (
        None
        if incumbent.choices is None
        else _values(problem, built, incumbent.choices)
    )
    while True:
        stop = StopCriteria(
            seconds=None if clock.counted else clock.left,
            gap=_allowed(problem, built, gap, incumbent) / built.unit_s,
        )
        answer = solver(program, stop, start)
        incumbent = incumbent.prove(answer.bound * built.unit_s + built.constant_s)
        if answer.values is None:
            return _result(problem, clock, incumbent, answer.finished)
        shares = answer.values[: len(options.gradient)]
        chosen = options.first(shares == options.most(shares)[options.gradient])
        choices = _choices(problem, options, chosen)
        if fits_budgets(problem, recompute(problem, choices)):
            incumbent = incumbent.offer(problem, choices).prove(incumbent.bound_s)
            return _result(problem, clock, incumbent, answer.finished)
        program = _without(program, chosen)


def _values(
    problem: CodecSelection, built: SelectionProgram, choices: tuple[int, ...]
) -> np.ndarray:
    """Values of all variables at choices that are among the options."""
    options, blocks = built.options, built.blocks
    codecs = np.array([choices[index] for index in problem.order])
    chosen = (options.codec == codecs[options.gradient]).astype(np.float64)
    wire = np.bincount(blocks.block[options.gradient], chosen * options.wire)
    finishes = link_finishes(blocks.ready, wire)
    above = (finishes - blocks.earliest).clip(0.0)
    earliest = max(0.0, float(blocks.earliest[-1]) - problem.backward_s)
    exposed = max(0.0, float(finishes[-1]) - problem.backward_s) - earliest
    return np.concatenate([chosen, np.append(above, exposed) / built.unit_s])


def _without(program: IntegerProgram, chosen: np.ndarray) -> IntegerProgram:
    """Excludes one choice that a backend's tolerance let over a budget."""
    return dataclasses.replace(
        program,
        starts=np.append(program.starts, program.starts[-1] + len(chosen)),
        columns=np.concatenate([program.columns, chosen]),
        values=np.concatenate([program.values, np.ones(len(chosen))]),
        lower=np.append(program.lower, -np.inf),
        upper=np.append(program.upper, len(chosen) - 1.0),
        names=(*program.names, f"exclusion_{program.num_rows}"),
    )


def _result(
    problem: CodecSelection, clock: Clock, incumbent: Incumbent, proved: bool
) -> SelectionResult:
    if incumbent.choices is None:
        cost = SelectionCost(
            cost_s=math.inf,
            exposed_s=0.0,
            local_s=0.0,
            wire_s=0.0,
            error=0.0,
            memory_bytes=0.0,
        )
        status = Status.INFEASIBLE if proved else Status.UNKNOWN
    else:
        cost = recompute(problem, incumbent.choices)
        status = Status.OPTIMAL if proved else Status.FEASIBLE
    return SelectionResult(
        choices=incumbent.choices or (),
        bound_s=min(max(incumbent.bound_s, 0.0), cost.cost_s),
        status=status,
        seconds=clock.spent,
        **dataclasses.asdict(cost),
    )
