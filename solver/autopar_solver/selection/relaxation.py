"""Prices a second on the link, a unit of error and a byte of memory.

For weights that do not fall along the link's order and stay within 0 and 1, and prices
that are not negative, every choice within the budgets costs at least

    sum_l min_k (weight[l] wire[l][k] + local[l][k]
                 + error_price error[l][k] + memory_price memory[l][k])
    + sum_l (weight[l] - weight[l - 1]) (ready[l] - backward)
    - error_price error_budget - memory_price memory_budget

because exposed time is at least ``ready[l] + sum_(m >= l) wire[m] - backward`` for
every ``l`` and at least 0. The best weights and prices are the dual solution of the
program without the condition that its choices are whole.
"""

import dataclasses
import math

import numpy as np

from autopar_solver.ilp.highs import solve_without_integrality
from autopar_solver.selection.options import OptionTable, options_of
from autopar_solver.selection.problem import CodecSelection
from autopar_solver.selection.program import SelectionProgram, build_program
from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRelaxation:
    """Prices of a selection and the bound they prove.

    Attributes:
        wire_weights: by gradient, in the problem's numbering: the value of one second
            on the link, in seconds of the step, 0 to 1.
        seconds_per_error: the value of one unit of squared error.
        seconds_per_byte: the value of one byte of memory.
        bound_s: no choices within the budgets cost less; ``inf`` if there are none.
        status: ``OPTIMAL``, or ``INFEASIBLE`` and then without prices.
    """

    wire_weights: tuple[float, ...]
    seconds_per_error: float
    seconds_per_byte: float
    bound_s: float
    status: Status

    def option_prices(self, problem: CodecSelection) -> tuple[np.ndarray, ...]:
        """By gradient and option, what it costs at these prices, in seconds."""
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
    """Finds the prices that prove the highest bound.

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
        shares: by option, how much of its gradient it has.
        weights: by gradient in the link's order.
        error_price, memory_price: seconds per unit.
        bound_s: what the prices prove; may be negative.
        rises: by option, how far above the bound any choice with it is at least.
    """

    shares: np.ndarray
    weights: np.ndarray
    error_price: float
    memory_price: float
    bound_s: float
    rises: np.ndarray


def relax(problem: CodecSelection, built: SelectionProgram) -> Relaxed | None:
    """Solves the relaxed program; None if not even that has a solution."""
    solved = solve_without_integrality(built.program)
    if solved is None:
        return None
    values, duals = solved
    named = dict(zip(built.program.names, duals, strict=True))
    count = len(built.blocks.ready)
    weights = np.array(
        [named[f"start_{b}"] + named.get(f"queue_{b}", 0.0) for b in range(count)]
    )
    # Any weights in order prove a bound: the solver's rounding costs nothing else.
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
    """The formula of the module's docstring."""
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
    """A product in which a forbidden option stays forbidden at no price."""
    return np.where(np.isfinite(values), values * price if price else 0.0, np.inf)
