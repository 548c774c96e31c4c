"""The selection of codecs: one option for each gradient.

Gradients are synchronised one after another on one link, in the order in which the
backward pass completes them. Number the gradients in this order, and let ``x[l]`` be
the option of gradient ``l``. The link finishes gradient ``l`` at

    finish[l] = max(finish[l - 1], ready[l]) + wire[l][x[l]]

The step waits for ``exposed = max(0, finish[last] - backward)``. With all finish times
inserted, and as a program::

    exposed = max(0, max_l (ready[l] + sum_(m >= l) wire[m][x[m]]) - backward)

    minimise    exposed + sum_l local[l][x[l]]
    subject to  sum_l error[l][x[l]]  <= error_budget
                sum_l memory[l][x[l]] <= memory_budget

Encoding and decoding (``local``) run on the device, so the step takes all of their
time. Sending (``wire``) overlaps the rest of the backward pass.

The module also builds the table of the options that can be part of a best choice. The
table lists gradients in the link's order. Options that fit in no choice within the
budgets are removed. Options that another option of the same gradient dominates are
removed too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.status import Status

BUDGET_TOLERANCE = 1e-8
"""Tolerated excess over a budget, as a share: ten times the backends' tolerance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecSelection:
    """Gradients with options, the times at which they are ready, and the budgets.

    Args:
        name: the name of the problem in messages.
        wire_s: for gradient ``l``: float64 ``[K_l]``, for each option the seconds on
            the link. In this and the next arguments, ``inf`` forbids an option.
        local_s: for each gradient and option, seconds of encoding and decoding on the
            device.
        error: for each gradient and option, the squared error that the codec causes,
            weighted by gradient; its sum is limited by ``error_budget``.
        ready_s: when each gradient is complete, in seconds from the start of the
            backward pass.
        backward_s: when the backward pass ends, in seconds from its start.
        error_budget: the limit of the sum of the errors; ``inf`` for no limit.
        memory_bytes: for each gradient and option, the bytes that the codec keeps
            between steps; None for no bytes.
        memory_budget_bytes: the limit of the sum of these bytes; None for no limit.

    Raises:
        InputError: an array has the wrong shape or values, or a gradient has only
            forbidden options; the message names it.

    >>> CodecSelection(
    ...     wire_s=(np.array([4.0, 1.0]),),
    ...     local_s=(np.array([0.0, 0.5]),),
    ...     error=(np.array([0.0, 0.1]),),
    ...     ready_s=(2.0,),
    ...     backward_s=3.0,
    ... ).num_options
    (2,)
    """

    name: str = "codec selection"
    wire_s: tuple[np.ndarray, ...]
    local_s: tuple[np.ndarray, ...]
    error: tuple[np.ndarray, ...]
    ready_s: tuple[float, ...]
    backward_s: float
    error_budget: float = math.inf
    memory_bytes: tuple[np.ndarray, ...] | None = None
    memory_budget_bytes: float | None = None

    def __post_init__(self) -> None:
        """Checks shapes and values."""
        _check_options(self)
        _check_times(self)
        for field, budget in (
            ("error_budget", self.error_budget),
            ("memory_budget_bytes", self.memory_budget_bytes),
        ):
            if budget is not None and not budget >= 0:
                raise InputError(
                    f"{self.name}: {field} must not be negative, got {budget}."
                )

    @property
    def num_options(self) -> tuple[int, ...]:
        """The number of options of each gradient."""
        return tuple(len(seconds) for seconds in self.wire_s)

    @property
    def order(self) -> tuple[int, ...]:
        """Gradients in the order of the link: by readiness, ties by index."""
        return tuple(sorted(range(len(self.ready_s)), key=self.ready_s.__getitem__))

    @property
    def memory(self) -> tuple[np.ndarray, ...]:
        """``memory_bytes``, or zeros if it is None."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return tuple(np.zeros(size) for size in self.num_options)

    @property
    def memory_limit(self) -> float:
        """``memory_budget_bytes``, or ``inf`` if it is None."""
        limit = self.memory_budget_bytes
        return math.inf if limit is None else limit


def _check_options(problem: CodecSelection) -> None:
    fields = {
        "wire_s": problem.wire_s,
        "local_s": problem.local_s,
        "error": problem.error,
        "memory_bytes": problem.memory,
    }
    size = len(problem.wire_s)
    for field, rows in fields.items():
        if len(rows) != size:
            raise InputError(
                f"{problem.name}: {field} has {len(rows)} gradients, wire_s {size}."
            )
    for index, expected in enumerate(problem.num_options):
        where = f"{problem.name}: gradient {index}"
        possible = np.ones(expected, bool)
        for field, rows in fields.items():
            row = rows[index]
            if row.shape != (expected,) or not expected:
                raise InputError(
                    f"{where}: {field} must be one non-empty row as long as wire_s, "
                    f"got shape {row.shape}."
                )
            if not (row >= 0).all():
                raise InputError(
                    f"{where}: {field} must be numbers from 0 to inf, got {row}."
                )
            possible &= np.isfinite(row)
        if not possible.any():
            raise InputError(f"{where}: no option is possible: each has an inf.")


def _check_times(problem: CodecSelection) -> None:
    if len(problem.ready_s) != len(problem.wire_s):
        raise InputError(
            f"{problem.name}: ready_s has {len(problem.ready_s)} gradients, wire_s "
            f"{len(problem.wire_s)}."
        )
    for seconds in (*problem.ready_s, problem.backward_s):
        if not 0 <= seconds < math.inf:
            raise InputError(
                f"{problem.name}: ready_s and backward_s must be finite and not "
                f"negative, got {seconds}."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCost:
    """The cost of given choices.

    Attributes:
        cost_s: the objective, ``exposed_s + local_s``.
        exposed_s: seconds for which the step waits for the link after the backward
            pass.
        local_s: seconds of encoding and decoding, for all gradients together.
        wire_s: seconds for which the link is busy, hidden or not.
        error: the sum of the chosen options' weighted squared errors.
        memory_bytes: the bytes that all codecs keep between steps.
    """

    cost_s: float
    exposed_s: float
    local_s: float
    wire_s: float
    error: float
    memory_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """One option per gradient, its cost, and a proven lower bound of every cost.

    ``choices`` is empty when the status is ``INFEASIBLE`` or ``UNKNOWN``. In that case
    the cost is infinite, and all other quantities except the bound are zero.

    Attributes:
        choices: by gradient, in the problem's numbering.
        cost_s, exposed_s, local_s, wire_s, error, memory_bytes: as in `SelectionCost`.
        bound_s: a lower bound of the cost of all choices within the budgets.
        status: how the solve ended. The texts of `Status` speak of a memory limit; here
            it stands for the error budget and the memory budget.
        seconds: the wall-clock seconds that the solve took.
    """

    choices: tuple[int, ...]
    cost_s: float
    exposed_s: float
    local_s: float
    wire_s: float
    error: float
    memory_bytes: float
    bound_s: float
    status: Status
    seconds: float

    @property
    def gap(self) -> float:
        """The cost minus the bound, divided by the cost."""
        if self.bound_s >= self.cost_s:
            return 0.0
        return (self.cost_s - self.bound_s) / max(abs(self.cost_s), 1e-300)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OptionTable:
    """All options that may be chosen, in flat arrays.

    The options of one gradient are neighbours. Gradients are in the link's order.

    Attributes:
        starts: gradient ``l`` has the options ``starts[l]:starts[l + 1]``.
        gradient: for each option, the position of its gradient in the link's order.
        codec: for each option, its number among the gradient's options in the problem.
        wire, local, error, memory: seconds, error and bytes as in the problem.
    """

    starts: np.ndarray
    gradient: np.ndarray
    codec: np.ndarray
    wire: np.ndarray
    local: np.ndarray
    error: np.ndarray
    memory: np.ndarray

    @property
    def num_gradients(self) -> int:
        """The number of gradients."""
        return len(self.starts) - 1

    def least(self, values: np.ndarray) -> np.ndarray:
        """Returns the least value of each gradient's options."""
        return np.minimum.reduceat(values, self.starts[:-1])

    def most(self, values: np.ndarray) -> np.ndarray:
        """Returns the greatest value of each gradient's options."""
        return np.maximum.reduceat(values, self.starts[:-1])

    def above(self, values: np.ndarray) -> np.ndarray:
        """The value of each option minus the least value of its gradient's options."""
        return values - self.least(values)[self.gradient]

    def first(self, marked: np.ndarray) -> np.ndarray:
        """Returns the index of the first marked option of each gradient."""
        at = np.where(marked, np.arange(len(marked)), len(marked))
        return self.least(at)

    def prices_at(
        self, weights: np.ndarray, error_price: float, memory_price: float
    ) -> np.ndarray:
        """The cost of each option at prices of the link, of error and of memory."""
        priced = weights[self.gradient] * self.wire + self.local
        return priced + error_price * self.error + memory_price * self.memory

    def keep(self, kept: np.ndarray) -> OptionTable:
        """Returns the table with only the marked options."""
        counts = np.bincount(self.gradient[kept], minlength=self.num_gradients)
        return OptionTable(
            starts=np.concatenate([[0], np.cumsum(counts)]),
            gradient=self.gradient[kept],
            codec=self.codec[kept],
            wire=self.wire[kept],
            local=self.local[kept],
            error=self.error[kept],
            memory=self.memory[kept],
        )


def options_of(problem: CodecSelection) -> OptionTable | None:
    """Builds the table of useful options; None if no choice is within the budgets."""
    order = problem.order
    sizes = [problem.num_options[index] for index in order]
    columns = {
        "wire": problem.wire_s,
        "local": problem.local_s,
        "error": problem.error,
        "memory": problem.memory,
    }
    flat = {name: np.concatenate([c[i] for i in order]) for name, c in columns.items()}
    options = OptionTable(
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        gradient=np.repeat(np.arange(len(order)), sizes),
        codec=np.concatenate([np.arange(size) for size in sizes]),
        **flat,
    )
    options = options.keep(np.isfinite(sum(flat.values())))
    for name, budget in (
        ("error", problem.error_budget),
        ("memory", problem.memory_limit),
    ):
        possible = _affordable(options, getattr(options, name), budget)
        if (np.bincount(options.gradient[possible], minlength=len(order)) == 0).any():
            return None
        options = options.keep(possible)
    return options.keep(_drop_dominated(problem, options))


def _affordable(options: OptionTable, values: np.ndarray, budget: float) -> np.ndarray:
    """Marks the options that fit if the other gradients take their least values."""
    if budget == math.inf:
        return np.ones(len(values), bool)
    room = budget - math.fsum(options.least(values))
    return options.above(values) <= room + BUDGET_TOLERANCE * budget


def _drop_dominated(problem: CodecSelection, options: OptionTable) -> np.ndarray:
    """Marks the options that no other option of the same gradient dominates.

    A further second on the link adds at most one second of exposed time. Option ``a``
    therefore dominates option ``b`` if neither its error nor its memory is larger and::

        local[a] + max(0, wire[a] - wire[b]) <= local[b]

    Of equal options the first is kept. Error or memory without a budget is ignored.
    """
    limited = [
        values
        for values, budget in (
            (options.error, problem.error_budget),
            (options.memory, problem.memory_limit),
        )
        if budget < math.inf
    ]
    kept = np.ones(len(options.gradient), bool)
    for start, end in zip(options.starts[:-1], options.starts[1:], strict=True):
        own = slice(start, end)
        wire, local = options.wire[own], options.local[own]
        extra = np.maximum(wire[:, None] - wire[None, :], 0.0)
        better = local[:, None] + extra <= local[None, :]
        for values in limited:
            better &= values[own, None] <= values[None, own]
        index = np.arange(end - start)
        replaces = better & (~better.T | (index[:, None] < index[None, :]))
        for k in index:
            # Only an option that is kept may dominate another. Otherwise two options
            # that rounding makes equal could remove each other.
            kept[start + k] = not (replaces[:, k] & kept[own]).any()
    return kept


# Computes the cost of choices by simulating the link that sends gradients.


def recompute(problem: CodecSelection, choices: Sequence[int]) -> SelectionCost:
    """Computes the cost of choices by simulating the link, without any solver.

    Raises:
        InputError: the choices do not name one existing option per gradient.
    """
    _check_choices(problem, choices)
    local = math.fsum(entries_of(problem.local_s, choices))
    exposed = max(0.0, _finishes(problem, choices)[-1] - problem.backward_s)
    return SelectionCost(
        cost_s=exposed + local,
        exposed_s=exposed,
        local_s=local,
        wire_s=math.fsum(entries_of(problem.wire_s, choices)),
        error=math.fsum(entries_of(problem.error, choices)),
        memory_bytes=math.fsum(entries_of(problem.memory, choices)),
    )


def fits_budgets(problem: CodecSelection, cost: SelectionCost) -> bool:
    """Whether error and memory are within the budgets, or above by rounding only.

    >>> import dataclasses
    >>> zeros = (np.zeros(1),)
    >>> problem = CodecSelection(
    ...     wire_s=zeros, local_s=zeros, error=(np.ones(1),), ready_s=(0.0,),
    ...     backward_s=0.0, error_budget=0.9,
    ... )
    >>> fits_budgets(problem, recompute(problem, (0,)))
    False
    """
    allowed = 1 + BUDGET_TOLERANCE
    return (
        cost.error <= problem.error_budget * allowed
        and cost.memory_bytes <= problem.memory_limit * allowed
    )


def wire_weights(problem: CodecSelection, choices: Sequence[int]) -> tuple[float, ...]:
    """Returns by how much a step grows per added second of a gradient on the link.

    The result has one weight, in seconds per second, for each gradient.

    The weights are the right-hand derivatives of ``exposed``, the seconds for which the
    step waits for the link. If the link finishes before the backward pass, all weights
    are 0. Otherwise, consider the last period in which the link is busy without a
    pause. The weight is 1 for the gradients of this period, and 0 for all gradients
    before it. If the link starts a gradient exactly when the previous gradient ends,
    both gradients belong to the same period, because more time for either delays the
    end.
    """
    _check_choices(problem, choices)
    finishes = _finishes(problem, choices)
    weights = [0.0] * len(choices)
    if finishes[-1] < problem.backward_s:
        return tuple(weights)
    order = problem.order
    for place in reversed(range(len(order))):
        weights[order[place]] = 1.0
        if place and finishes[place - 1] < problem.ready_s[order[place]]:
            break
    return tuple(weights)


def check_selection(problem: CodecSelection, result: SelectionResult) -> None:
    """Raises `InputError` unless the result is consistent with the problem."""
    if result.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if result.choices:
            raise InputError(f"{problem.name}: {result.status} but has choices.")
        return
    cost = recompute(problem, result.choices)
    for field in dataclasses.fields(cost):
        found, said = getattr(cost, field.name), getattr(result, field.name)
        if not math.isclose(found, said, rel_tol=1e-9, abs_tol=1e-300):
            raise InputError(f"{problem.name}: {field.name} is {found}, not {said}.")
    if not math.isfinite(cost.cost_s + cost.error + cost.memory_bytes):
        raise InputError(f"{problem.name}: the result uses a forbidden option.")
    if not fits_budgets(problem, cost):
        raise InputError(
            f"{problem.name}: error {cost.error} of {problem.error_budget}, memory "
            f"{cost.memory_bytes} of {problem.memory_limit}: over a budget."
        )
    if result.bound_s > result.cost_s + 1e-9 * abs(result.cost_s):
        raise InputError(
            f"{problem.name}: bound {result.bound_s} above cost {result.cost_s}."
        )


def _finishes(problem: CodecSelection, choices: Sequence[int]) -> list[float]:
    """Returns the time at which the link has sent each gradient, in the link's order.

    Returns:
      Seconds; [0.0] if there are no gradients.
    """
    finish, finishes = 0.0, list[float]()
    for index in problem.order:
        wire = float(problem.wire_s[index][choices[index]])
        finish = max(finish, problem.ready_s[index]) + wire
        finishes.append(finish)
    return finishes or [0.0]


def entries_of(rows: Sequence[np.ndarray], choices: Sequence[int]) -> list[float]:
    """Returns the chosen entry of each row, as a list."""
    return [float(row[choice]) for row, choice in zip(rows, choices, strict=True)]


def _check_choices(problem: CodecSelection, choices: Sequence[int]) -> None:
    sizes = problem.num_options
    if len(choices) != len(sizes):
        raise InputError(
            f"{problem.name}: {len(choices)} choices for {len(sizes)} gradients."
        )
    for index, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not 0 <= choice < size:
            raise InputError(
                f"{problem.name}: gradient {index} has no option {choice}."
            )
