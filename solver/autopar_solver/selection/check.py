"""Computes the cost of choices by simulating the link that sends gradients."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.selection.problem import (
    BUDGET_TOLERANCE,
    CodecSelection,
    SelectionCost,
    SelectionResult,
)
from autopar_solver.status import Status


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
    """The seconds by which a step grows per added second of a gradient on the link.

    The result has one weight for each gradient.

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
    """The time at which the link has sent each gradient, in the link's order.

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
    """The chosen entry of each row, as a list."""
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
