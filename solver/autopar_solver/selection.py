"""Which codec each gradient is sent with: the problem, its answer, and what it costs.

Gradients are synchronised one after another on one link, in the order in which the
backward pass completes them. With ``x[l]`` the option of gradient ``l``, numbered in
that order, the link is done with it at

    finish[l] = max(finish[l - 1], ready[l]) + wire[l][x[l]]

and what the step waits for is ``exposed = max(0, finish[last] - backward)``. Unrolled::

    exposed = max(0, max_l (ready[l] + sum_(m >= l) wire[m][x[m]]) - backward)

    minimise    exposed + sum_l local[l][x[l]]
    subject to  sum_l error[l][x[l]]  <= error_budget
                sum_l memory[l][x[l]] <= memory_budget

Encoding and decoding (``local``) take the device's time and are never hidden; sending
(``wire``) is hidden behind what is left of the backward pass.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar_solver.solution import Status

BUDGET_TOLERANCE = 1e-8
"""By what share of a budget a sum may be over it: ten times the backends' own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecSelection:
    """Gradients with options, when they are ready, and what they may cost.

    Args:
        name: how messages call this problem.
        wire_s: gradient ``l``: float64 ``[K_l]``, seconds on the link by option; here
            and below ``inf`` forbids an option.
        local_s: the same, seconds of encoding and decoding on the device.
        error: the same, squared error in the metric of the budget, weighted already.
        ready_s: when each gradient is complete, from the start of the backward pass.
        backward_s: when the backward pass ends.
        error_budget: what the errors may add up to; ``inf`` for no limit.
        memory_bytes: what each option keeps between steps; None for nothing.
        memory_budget_bytes: what that may add up to; None for no limit.

    Raises:
        ValueError: an array has the wrong shape or values, or a gradient has no
            option that is possible; the message names it.

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
                raise ValueError(
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
        """``memory_bytes``, zeros where it is None."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return tuple(np.zeros(size) for size in self.num_options)

    @property
    def memory_limit(self) -> float:
        """``memory_budget_bytes``, ``inf`` where it is None."""
        limit = self.memory_budget_bytes
        return math.inf if limit is None else limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCost:
    """What given choices cost.

    Attributes:
        cost_s: the objective, ``exposed_s + local_s``.
        exposed_s: what the step waits for the link after the backward pass.
        local_s: encoding and decoding, all gradients together.
        wire_s: the link's busy time, hidden or not.
        error: the sum of squared errors.
        memory_bytes: the sum of what the codecs keep.
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

    ``choices`` is empty when the status is ``INFEASIBLE`` or ``UNKNOWN``; the cost is
    then infinite, and everything else but the bound zero.

    Attributes:
        choices: by gradient, in the problem's numbering.
        cost_s: as in `SelectionCost`, and so are the next five.
        bound_s: no choices within the budgets cost less.
        status: how the solve ended; budgets stand for the memory limit.
        seconds: wall-clock time of the solve.
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
        """How far the cost can be from the least one, relative to the cost."""
        if self.bound_s >= self.cost_s:
            return 0.0
        return (self.cost_s - self.bound_s) / max(abs(self.cost_s), 1e-300)


def recompute(problem: CodecSelection, choices: Sequence[int]) -> SelectionCost:
    """Adds up what choices cost by running the link, without any solver.

    Raises:
        ValueError: the choices do not name one existing option per gradient.
    """
    _check_choices(problem, choices)
    local = math.fsum(_chosen(problem.local_s, choices))
    exposed = max(0.0, _finishes(problem, choices)[-1] - problem.backward_s)
    return SelectionCost(
        cost_s=exposed + local,
        exposed_s=exposed,
        local_s=local,
        wire_s=math.fsum(_chosen(problem.wire_s, choices)),
        error=math.fsum(_chosen(problem.error, choices)),
        memory_bytes=math.fsum(_chosen(problem.memory, choices)),
    )


def fits(problem: CodecSelection, cost: SelectionCost) -> bool:
    """Whether error and memory are within the budgets, rounding aside.

    >>> import dataclasses
    >>> zeros = (np.zeros(1),)
    >>> problem = CodecSelection(
    ...     wire_s=zeros, local_s=zeros, error=(np.ones(1),), ready_s=(0.0,),
    ...     backward_s=0.0, error_budget=0.9,
    ... )
    >>> fits(problem, recompute(problem, (0,)))
    False
    """
    allowed = 1 + BUDGET_TOLERANCE
    return (
        cost.error <= problem.error_budget * allowed
        and cost.memory_bytes <= problem.memory_limit * allowed
    )


def wire_weights(problem: CodecSelection, choices: Sequence[int]) -> tuple[float, ...]:
    """What a further second of each gradient on the link would add to the step.

    The derivative of ``exposed`` to the right: 1 for every gradient from the first
    one on that starts the last busy stretch of the link, 0 for those before; all 0
    while the link is done before the backward pass is. Where two stretches touch, both
    count: more time for either delays the end.
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
    """Raises ValueError unless the result is what it says it is."""
    if result.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if result.choices:
            raise ValueError(f"{problem.name}: {result.status} but has choices.")
        return
    cost = recompute(problem, result.choices)
    for field in dataclasses.fields(cost):
        found, said = getattr(cost, field.name), getattr(result, field.name)
        if not math.isclose(found, said, rel_tol=1e-9, abs_tol=1e-300):
            raise ValueError(f"{problem.name}: {field.name} is {found}, not {said}.")
    if not math.isfinite(cost.cost_s + cost.error + cost.memory_bytes):
        raise ValueError(f"{problem.name}: the result uses a forbidden option.")
    if not fits(problem, cost):
        raise ValueError(
            f"{problem.name}: error {cost.error} of {problem.error_budget}, memory "
            f"{cost.memory_bytes} of {problem.memory_limit}: over a budget."
        )
    if result.bound_s > result.cost_s + 1e-9 * abs(result.cost_s):
        raise ValueError(
            f"{problem.name}: bound {result.bound_s} above cost {result.cost_s}."
        )


def _finishes(problem: CodecSelection, choices: Sequence[int]) -> list[float]:
    """When the link is done with each gradient, in its order; [0.0] without any."""
    finish, finishes = 0.0, list[float]()
    for index in problem.order:
        wire = float(problem.wire_s[index][choices[index]])
        finish = max(finish, problem.ready_s[index]) + wire
        finishes.append(finish)
    return finishes or [0.0]


def _chosen(rows: Sequence[np.ndarray], choices: Sequence[int]) -> list[float]:
    return [float(row[choice]) for row, choice in zip(rows, choices, strict=True)]


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
            raise ValueError(
                f"{problem.name}: {field} has {len(rows)} gradients, wire_s {size}."
            )
    for index, expected in enumerate(problem.num_options):
        where = f"{problem.name}: gradient {index}"
        possible = np.ones(expected, bool)
        for field, rows in fields.items():
            row = rows[index]
            if row.shape != (expected,) or not expected:
                raise ValueError(
                    f"{where}: {field} must be one non-empty row as long as wire_s, "
                    f"got shape {row.shape}."
                )
            if not (row >= 0).all():
                raise ValueError(
                    f"{where}: {field} must be numbers from 0 to inf, got {row}."
                )
            possible &= np.isfinite(row)
        if not possible.any():
            raise ValueError(f"{where}: no option is possible: each has an inf.")


def _check_times(problem: CodecSelection) -> None:
    if len(problem.ready_s) != len(problem.wire_s):
        raise ValueError(
            f"{problem.name}: ready_s has {len(problem.ready_s)} gradients, wire_s "
            f"{len(problem.wire_s)}."
        )
    for seconds in (*problem.ready_s, problem.backward_s):
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"{problem.name}: ready_s and backward_s must be finite and not "
                f"negative, got {seconds}."
            )


def _check_choices(problem: CodecSelection, choices: Sequence[int]) -> None:
    sizes = problem.num_options
    if len(choices) != len(sizes):
        raise ValueError(
            f"{problem.name}: {len(choices)} choices for {len(sizes)} gradients."
        )
    for index, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not 0 <= choice < size:
            raise ValueError(
                f"{problem.name}: gradient {index} has no option {choice}."
            )
