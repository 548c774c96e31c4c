"""Solves a codec selection with prices, rounding, labels and an integer program.

First the relaxed program is solved. Its solution gives a lower bound. Rounding and
local search turn the solution into a feasible choice of codecs, the incumbent. An
option is dropped if the prices of the relaxed program prove that every choice with it
costs more than the incumbent. A label search then improves the incumbent and the bound,
and solves small or repetitive problems completely. If cost and bound still differ, an
integer program decides between the remaining options.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.highs import Backend, IntegerProgram, StopCriteria
from autopar_solver.selection.problem import (
    BUDGET_TOLERANCE,
    CodecSelection,
    OptionTable,
    SelectionCost,
    SelectionResult,
    fits_budgets,
    options_of,
    recompute,
)
from autopar_solver.selection.program import (
    Relaxed,
    SelectionProgram,
    build_program,
    link_finishes,
    relax,
)
from autopar_solver.status import Status

# Label search: solves a codec selection gradient by gradient, and keeps only the
# partial choices that may still be best.
#
# A *label* describes a choice of codecs for the first gradients in the link's order. A
# label stores only the quantities that affect the remaining gradients: the time ``f``
# at which the link finishes these gradients, and the sums of their local time, error
# and memory. The method is label setting for shortest paths with resource constraints
# (Irnich and Desaulniers, "Shortest path problems with resource constraints", 2005).
#
# The value of ``f`` matters only between two times, ``early`` and ``late``. The two
# times are computed backwards from the end of the backward pass, where they are equal::
#
#     early[l - 1] = max(ready[l], early[l] - slowest wire of l)
#     late[l - 1]  = max(ready[l], late[l] - fastest wire of l)
#
# If ``f`` is at most ``early[l]``, the remaining transfers run as if the link were
# idle. If ``f`` is at least ``late[l]``, the link never pauses again and finishes after
# the backward pass. Each further second of ``f`` then adds one second to the cost, so
# the search adds it to the local time at once. A label is dropped if
#
# - the remaining gradients need more error or memory than it leaves of a budget,
# - the prices of the relaxed program prove that every choice that begins with it costs
#   more than the cutoff, or
# - another label has no more error, memory, ``local`` and ``f + local``.
#
# If more than ``width`` labels remain, those with the largest lower bounds are dropped
# too. The smallest of their lower bounds is a lower bound of the cost of all choices
# that were missed in this way.

BINS = 12
"""Number of intervals of ``f`` in which labels are compared, instead of all pairs."""

MEMORY_BINS = 4
"""Number of intervals of memory in which labels are compared, if memory is limited."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LabelAnswer:
    """The result of a label search.

    Attributes:
        chosen: by gradient in the link's order, an index into the options; None if no
            choice below the cutoff was found.
        bound_s: a lower bound of the cost of every choice below the cutoff. ``inf`` if
            no choice was found and no label was dropped because of ``width``.
    """

    chosen: np.ndarray | None
    bound_s: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Labels as columns of equal length.

    Each label extends a label for one gradient less; ``parent`` is the position of the
    shorter label.
    """

    finish: np.ndarray
    local: np.ndarray
    error: np.ndarray
    memory: np.ndarray
    parent: np.ndarray
    option: np.ndarray

    def keep(self, kept: np.ndarray) -> _Labels:
        return _Labels(
            finish=self.finish[kept],
            local=self.local[kept],
            error=self.error[kept],
            memory=self.memory[kept],
            parent=self.parent[kept],
            option=self.option[kept],
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Outlook:
    """Quantities of all gradients that follow a gradient in the link's order.

    Attributes:
        ready: by gradient, the second at which the gradient is ready.
        early: by gradient, the finish time ``early`` (see the comment on label search
          above).
        late: by gradient, the finish time ``late`` (see the comment on label search
          above).
        error: for each gradient, the least error that the later gradients add.
        memory: for each gradient, the least memory that the later gradients add.
        rest: a lower bound, in seconds, of the cost that the later gradients add,
            computed with the prices of the relaxed program.
    """

    ready: np.ndarray
    early: np.ndarray
    late: np.ndarray
    error: np.ndarray
    memory: np.ndarray
    rest: np.ndarray


def search_labels(
    problem: CodecSelection,
    options: OptionTable,
    relaxed: Relaxed,
    *,
    cutoff_s: float,
    width: int,
    clock: Clock,
) -> LabelAnswer | None:
    """Searches for a choice that costs less than the cutoff.

    Args:
        problem: the problem to solve.
        options: the options to choose from.
        relaxed: the solution of the relaxed program, with its prices. Any prices give a
            valid bound; the best prices give the highest bound.
        cutoff_s: only choices with a lower cost are searched.
        width: the number of labels that are kept for each gradient.
        clock: the time limit. The result is None if time runs out.
    """
    outlook = _outlook(problem, options, relaxed)
    labels = _Labels(*np.zeros((4, 1)), *np.zeros((2, 1), np.int64))
    stages, missed = list[_Labels](), math.inf
    for place in range(options.num_gradients):
        if clock.left_s <= 0:
            return None
        labels = _extend(labels, options, outlook, place)
        labels = labels.keep(_affordable(problem, labels, outlook, place))
        promise = _promise(labels, relaxed, outlook, place)
        labels, promise = labels.keep(promise < cutoff_s), promise[promise < cutoff_s]
        kept = np.sort(_drop_dominated_labels(problem, labels))
        labels, promise = labels.keep(kept), promise[kept]
        order = np.argsort(promise, kind="stable")
        missed = min([missed, *promise[order[width:]][:1].tolist()])
        labels = labels.keep(np.sort(order[:width]))
        stages.append(labels)
    if not len(labels.local):
        return LabelAnswer(None, missed)
    end = int(np.argmin(labels.local))
    bound = min(missed, float(labels.local[end]))
    return LabelAnswer(_backtrack(stages, end), bound)


def _outlook(
    problem: CodecSelection, options: OptionTable, relaxed: Relaxed
) -> _Outlook:
    count = options.num_gradients
    ready = np.array(sorted(problem.ready_s))
    fastest, slowest = options.least(options.wire), options.most(options.wire)
    early, late = np.empty(count), np.empty(count)
    early[-1] = late[-1] = problem.backward_s
    for place in reversed(range(1, count)):
        early[place - 1] = max(ready[place], early[place] - slowest[place])
        late[place - 1] = max(ready[place], late[place] - fastest[place])
    priced = options.prices_at(
        relaxed.weights, relaxed.error_price, relaxed.memory_price
    )
    starts = np.diff(relaxed.weights, prepend=0.0) * (ready - problem.backward_s)
    rest = _after(options.least(priced) + starts)
    rest = rest - relaxed.weights * problem.backward_s
    for price, budget in (
        (relaxed.error_price, problem.error_budget),
        (relaxed.memory_price, problem.memory_limit),
    ):
        rest = rest - (price * budget if price else 0.0)
    return _Outlook(
        ready=ready,
        early=early,
        late=late,
        error=_after(options.least(options.error)),
        memory=_after(options.least(options.memory)),
        rest=rest,
    )


def _after(values: np.ndarray) -> np.ndarray:
    """Returns, for each value, the sum of all values after it."""
    return np.append(np.cumsum(values[:0:-1])[::-1], 0.0)


def _extend(
    labels: _Labels, options: OptionTable, outlook: _Outlook, place: int
) -> _Labels:
    """Combines every label with every option of the next gradient."""
    own = np.arange(options.starts[place], options.starts[place + 1])
    parent = np.repeat(np.arange(len(labels.local)), len(own))
    option = np.tile(own, len(labels.local))
    start = np.maximum(labels.finish[parent], outlook.ready[place])
    finish = start + options.wire[option]
    late = outlook.late[place]
    exposed = np.maximum(finish - late, 0.0)
    return _Labels(
        finish=np.clip(finish, outlook.early[place], late),
        local=labels.local[parent] + options.local[option] + exposed,
        error=labels.error[parent] + options.error[option],
        memory=labels.memory[parent] + options.memory[option],
        parent=parent,
        option=option,
    )


def _affordable(
    problem: CodecSelection, labels: _Labels, outlook: _Outlook, place: int
) -> np.ndarray:
    allowed = 1 + BUDGET_TOLERANCE
    error = labels.error + outlook.error[place]
    memory = labels.memory + outlook.memory[place]
    return (error <= problem.error_budget * allowed) & (
        memory <= problem.memory_limit * allowed
    )


def _promise(
    labels: _Labels, relaxed: Relaxed, outlook: _Outlook, place: int
) -> np.ndarray:
    """Returns a lower bound of the cost of all choices that begin with each label.

    The bound follows from the prices of the relaxed program.

    A finish time below ``early`` is raised to ``early``. This changes no cost, so the
    bound still holds.
    """
    charged = labels.local + relaxed.weights[place] * labels.finish
    charged = charged + relaxed.error_price * labels.error
    charged = charged + relaxed.memory_price * labels.memory
    return charged + outlook.rest[place]


def _drop_dominated_labels(problem: CodecSelection, labels: _Labels) -> np.ndarray:
    """Returns the labels that no label with the same or a later finish time dominates.

    Suppose that a label has no larger ``f + local`` than a second label, and no smaller
    ``f``. Then its ``local`` is no larger either. The function therefore visits labels
    in ascending order of ``f + local``. It compares the error of each label with the
    least error of the labels visited before whose bin has the same or a later ``f``.
    """
    if not len(labels.local):
        return np.empty(0, np.int64)
    total = labels.finish + labels.local
    error = labels.error * (problem.error_budget < math.inf)
    memory = labels.memory * (problem.memory_limit < math.inf)
    order = np.lexsort((memory, error, -labels.finish, total))
    error = error[order]
    later, later_same = _bins(-labels.finish[order], BINS)
    less, less_same = _bins(memory[order], MEMORY_BINS)
    kept = np.ones(len(order), bool)
    for g in range(len(later_same)):
        for h in range(len(less_same)):
            own = (later == g) & (less == h)
            if not own.any():
                continue
            others = (later < g + later_same[g]) & (less < h + less_same[h])
            best = np.minimum.accumulate(np.where(others, error, np.inf))
            best = np.append(np.inf, best[:-1])
            kept[own] = best[own] > error[own]
    return order[kept]


def _bins(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bin of each value, and for each bin whether all its values are equal.

    Every value of a bin is below every value of the next bin.
    """
    edges = np.unique(np.quantile(values, np.linspace(0, 1, count + 1), method="lower"))
    # Each edge has a bin of its own for the values that equal it. The values between
    # two edges form another bin.
    bins = np.searchsorted(edges, values, side="left") + np.searchsorted(
        edges, values, side="right"
    )
    return bins - 1, np.arange(2 * len(edges)) % 2 == 0


def _backtrack(stages: list[_Labels], end: int) -> np.ndarray:
    chosen = np.empty(len(stages), np.int64)
    for place in reversed(range(len(stages))):
        chosen[place] = stages[place].option[end]
        end = int(stages[place].parent[end])
    return chosen


# The best choice of codecs so far, and a lower bound of the cost of all choices.


@dataclasses.dataclass(frozen=True, slots=True)
class SelectionIncumbent:
    """The best choice so far, if any, and a lower bound of every choice's cost."""

    choices: tuple[int, ...] | None
    cost_s: float
    bound_s: float

    def offer(
        self, problem: CodecSelection, choices: tuple[int, ...]
    ) -> SelectionIncumbent:
        """Returns an incumbent with these choices if they are better, else itself."""
        cost = recompute(problem, choices)
        if cost.cost_s >= self.cost_s or not fits_budgets(problem, cost):
            return self
        return SelectionIncumbent(choices, cost.cost_s, self.bound_s)

    def prove(self, bound: float) -> SelectionIncumbent:
        """Raises the lower bound, but never above the incumbent's cost."""
        return SelectionIncumbent(
            self.choices, self.cost_s, min(max(self.bound_s, bound), self.cost_s)
        )


# Local search for a codec selection. A move changes the codecs of one gradient, or of
# two gradients together.
#
# Let ``end[j] = ready[j] + sum_(m >= j) wire[m]`` over the link's order. The exposed
# time is the largest ``end`` minus the end of the backward pass, if positive. Changing
# the wire time of gradient ``l`` by ``d`` seconds moves ``end[0], ..., end[l]`` by
# ``d`` and no other ``end``. The running maxima of ``end`` from the left and from the
# right therefore give the cost of all single changes at once.

MOVES_PER_GRADIENT = 4
"""Limit of changes per gradient in one descent; few gradients need more than one."""

PAIRED = 24
"""Number of over-budget changes that are tried with a second, budget-saving change."""


def descend(
    problem: CodecSelection, options: OptionTable, chosen: np.ndarray
) -> np.ndarray:
    """Makes the change or pair of changes that saves most time, until none saves any.

    Args:
        problem: the problem of the options.
        options: the options to choose from.
        chosen: by gradient in the link's order, an index into the options. The choice
            must be within the budgets.
    """
    ready = np.array(sorted(problem.ready_s))
    chosen = chosen.copy()
    for _ in range(MOVES_PER_GRADIENT * options.num_gradients):
        saved, fitting = _changes(problem, options, ready, chosen)
        least = np.where(fitting, saved, np.inf)
        move = int(np.argmin(least))
        if not least[move] < 0:
            pair = _pair(problem, options, ready, chosen, saved, fitting)
            if pair is None:
                return chosen
            chosen = pair
        else:
            chosen[options.gradient[move]] = move
    return chosen


def _changes(
    problem: CodecSelection, options: OptionTable, ready: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each option, the cost that it adds, and whether it fits the budgets."""
    wire = options.wire[chosen]
    end = ready + np.cumsum(wire[::-1])[::-1]
    until = np.maximum.accumulate(end)
    behind = np.append(np.maximum.accumulate(end[::-1])[::-1][1:], 0.0)
    old = chosen[options.gradient]
    longer = options.wire - options.wire[old]
    last = np.maximum(until[options.gradient] + longer, behind[options.gradient])
    exposed = np.maximum(last, problem.backward_s)
    now = max(float(until[-1]), problem.backward_s)
    added = exposed - now + options.local - options.local[old]
    fitting = np.ones(len(added), bool)
    for values, budget in (
        (options.error, problem.error_budget),
        (options.memory, problem.memory_limit),
    ):
        fitting &= values[chosen].sum() + values - values[old] <= budget
    # A saving below the rounding error counts as zero: otherwise a descent might not
    # end.
    added[np.abs(added) <= 1e-12 * now] = 0.0
    return added, fitting


def _pair(
    problem: CodecSelection,
    options: OptionTable,
    ready: np.ndarray,
    chosen: np.ndarray,
    added: np.ndarray,
    fitting: np.ndarray,
) -> np.ndarray | None:
    """The best pair of changes: one exceeds a budget, the other compensates for it."""
    tempting = np.flatnonzero(~fitting & (added < 0))
    tempting = tempting[np.argsort(added[tempting], kind="stable")[:PAIRED]]
    best, least = None, 0.0
    for first in tempting:
        trial = chosen.copy()
        trial[options.gradient[first]] = first
        second_added, second_fitting = _changes(problem, options, ready, trial)
        second_fitting &= options.gradient != options.gradient[first]
        total = added[first] + np.where(second_fitting, second_added, np.inf)
        second = int(np.argmin(total))
        if total[second] < least and not np.isclose(total[second], 0.0, atol=0.0):
            trial[options.gradient[second]] = second
            best, least = trial, float(total[second])
    return best


ROUNDING_UNITS = 1e-5
"""Difference of cost and bound, in units of the program, that rounding may cause."""

LABEL_WIDTHS = (64,)
"""Numbers of labels to keep. Wider searches took longer than the integer program."""


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
        problem: the problem to solve. Its times may have any scale.
        seconds: wall-clock limit; None to stop only when the gap is closed.
        gap: the largest difference of cost and bound at which a result counts as
            optimal, divided by the sum of the backward pass and the cost. A difference
            of 1e-9 of the amount by which choices can change the cost always counts as
            optimal.
        backend: the solver of the integer program: "highs", or "cbc" through PuLP.
        widths: the numbers of labels to keep, one label search for each; () to use the
            integer program only.

    Raises:
        InputError: there is no backend of this name.

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
        return _result(problem, clock, SelectionIncumbent((), 0.0, 0.0), True)
    options = options_of(problem)
    built = None if options is None else build_program(problem, options)
    relaxed = None if built is None else relax(problem, built)
    if built is None or relaxed is None:
        return _result(
            problem, clock, SelectionIncumbent(None, math.inf, math.inf), True
        )
    incumbent = _round(problem, built.options, relaxed)
    for width in (*widths, None):
        allowed = _allowance_s(problem, built, gap, incumbent)
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


def _round(
    problem: CodecSelection, options: OptionTable, relaxed: Relaxed
) -> SelectionIncumbent:
    """Rounds the relaxed solution, and improves the result by local search.

    Each gradient takes, among the options with a positive share in the relaxed
    solution, the option with the least error. The option of least error never has more
    error than the mixture of options in the relaxed solution. Without a memory budget
    the rounded choice is therefore within the budget.
    """
    shared = relaxed.shares > 1e-9
    error = np.where(shared, options.error, np.inf)
    chosen = options.first(error == options.least(error)[options.gradient])
    incumbent = SelectionIncumbent(None, math.inf, relaxed.bound_s)
    incumbent = incumbent.offer(problem, _choices(problem, options, chosen))
    if incumbent.choices is None:
        return incumbent
    better = descend(problem, options, chosen)
    return incumbent.offer(problem, _choices(problem, options, better))


def _allowance_s(
    problem: CodecSelection,
    built: SelectionProgram,
    gap: float,
    incumbent: SelectionIncumbent,
) -> float:
    """The seconds by which a cost that counts as optimal may exceed the bound."""
    step = problem.backward_s + max(0.0, incumbent.bound_s)
    return max(gap * step, ROUNDING_UNITS * built.unit_s)


def _worthwhile(
    problem: CodecSelection,
    built: SelectionProgram,
    relaxed: Relaxed,
    incumbent: SelectionIncumbent,
) -> np.ndarray:
    """Marks the options of the incumbent and of all choices that may be better."""
    room = incumbent.cost_s - relaxed.bound_s + ROUNDING_UNITS * built.unit_s
    kept = relaxed.rises <= room
    if incumbent.choices is not None:
        codecs = np.array([incumbent.choices[index] for index in problem.order])
        kept |= built.options.codec == codecs[built.options.gradient]
    return kept


def _search(
    problem: CodecSelection,
    clock: Clock,
    options: OptionTable,
    relaxed: Relaxed,
    incumbent: SelectionIncumbent,
    allowed: float,
    width: int,
) -> SelectionIncumbent:
    """Searches with labels for choices that save more than ``allowed`` seconds."""
    # The cutoff is 10 % closer to the incumbent than `allowed`. Without this margin,
    # rounding could leave a gap just above `allowed`.
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
    problem: CodecSelection, options: OptionTable, chosen: np.ndarray
) -> tuple[int, ...]:
    """Converts options in the link's order to codecs in the problem's numbering."""
    choices = np.empty(len(chosen), np.int64)
    choices[list(problem.order)] = options.codec[chosen]
    return tuple(int(choice) for choice in choices)


def _solve_program(
    problem: CodecSelection,
    clock: Clock,
    solver: Backend,
    options: OptionTable,
    incumbent: SelectionIncumbent,
    gap: float,
) -> SelectionResult:
    """Solves the integer program, starting from the incumbent if there is one."""
    built = build_program(problem, options)
    program = built.program
    start = (
        None
        if incumbent.choices is None
        else _values(problem, built, incumbent.choices)
    )
    while True:
        stop = StopCriteria(
            seconds=None if clock.counted else clock.left_s,
            gap=_allowance_s(problem, built, gap, incumbent) / built.unit_s,
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
    """The values of all variables of the program for a given choice of codecs."""
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
    """Adds a row that excludes a choice which exceeds a budget within the tolerance."""
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
    problem: CodecSelection, clock: Clock, incumbent: SelectionIncumbent, proved: bool
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
        seconds=clock.spent_s,
        **dataclasses.asdict(cost),
    )
