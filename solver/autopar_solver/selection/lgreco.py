"""Chooses a compression parameter for each layer, by L-GreCo's method or exactly.

Source: Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo: Layerwise-adaptive
gradient compression for efficient data-parallel deep learning", MLSys 2024 (arXiv
2210.17357). Let ``error[l][p]`` be the norm of the error of layer ``l`` with parameter
``p``::

    E = alpha sum_l error[l][reference[l]]
    minimise    sum_l size[l][p[l]]
    subject to  sum_l error[l][p[l]] <= E

L-GreCo solves this problem by a dynamic programme over errors that are rounded up to
multiples of ``E / buckets``::

    q[l][p] = clip(ceil(error[l][p] buckets / E), 1, buckets)
    best[l][e] = min_p best[l - 1][e - q[l][p]] + size[l][p]

The rounding of errors makes the total size larger, but only by a bounded amount. Write
``least(B)`` for the least size with errors up to ``B``, ``S`` for ``sum_l q``, ``x``
for ``sum_l error buckets / E`` and ``L`` for the number of layers. Since ``error <= q E
/ buckets``, the errors of the programme's choice sum to at most E, so its size is at
least ``least(E)``. Since ``q < error buckets / E + 1`` unless the error is 0, ``S < x +
L`` if some error is not 0. If all errors are 0, ``S = L``. Because ``S`` is a whole
number,

    least(E) <= programme <= least(E (1 - L / buckets))          if S < buckets counts,
    least(E) <= programme <= least(E (1 - (L - 1) / buckets))    if S <= buckets counts

The first line holds for ``L < buckets``, the second for ``L <= buckets``. The published
code (github.com/LGrCo/L-GreCo, ``lgreco_hook.py``) is the first case: its first layer
requires strictly more than ``q`` buckets, so one bucket is never used. Two more facts
about the published code follow. First, clipping ``q`` never admits a layer whose error
alone exceeds the budget: such a layer takes all buckets, but the code requires ``S <
buckets``. Second, the programme may not find the reference parameters themselves,
because rounding up their errors can exceed the budget that they define.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar_errors import InputError
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.highs import IntegerProgram, StopCriteria
from autopar_solver.selection.problem import entries_of
from autopar_solver.status import Status

DEFAULT_BUCKETS = 10_000
"""``DPBUCKETS`` of the published code."""

SIZE_UNITS = 1e4
"""Range of the sizes of all choices, in units of the integer program."""

GAP_UNITS = 1e-5
"""Difference of cost and bound, in units of size, that rounding may cause."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LGreCoProblem:
    """Layers with parameters, and the reference parameters that set the error budget.

    Args:
        error: for layer ``l``: float64 ``[P_l]``, the norm of the error of each
            parameter; ``inf`` forbids a parameter.
        size: for layer ``l``: float64 ``[P_l]``, the amount of data sent, in any unit.
        reference: the parameter of each layer that defines the budget.
        alpha: the budget, divided by the sum of the errors of ``reference``.
        buckets: the number of parts that the budget is divided into.

    Raises:
        InputError: an array has the wrong shape or values; the message names it.

    >>> problem = LGreCoProblem(
    ...     error=(np.array([4.0, 1.0]), np.array([9.0, 5.0])),
    ...     size=(np.array([10.0, 20.0]), np.array([10.0, 20.0])),
    ...     reference=(0, 1),
    ... )
    >>> problem.error_budget
    9.0
    """

    error: tuple[np.ndarray, ...]
    size: tuple[np.ndarray, ...]
    reference: tuple[int, ...]
    alpha: float = 1.0
    buckets: int = DEFAULT_BUCKETS

    def __post_init__(self) -> None:
        """Checks shapes and values."""
        if not len(self.error) == len(self.size) == len(self.reference) > 0:
            raise InputError(
                "L-GreCo: error, size and reference must name the same layers, at "
                f"least one, got {len(self.error)}, {len(self.size)} and "
                f"{len(self.reference)}."
            )
        if not 0 <= self.alpha < math.inf:
            raise InputError(
                f"L-GreCo: alpha must be finite and not negative, got {self.alpha}."
            )
        if self.buckets < 1:
            raise InputError(f"L-GreCo: buckets must be positive, got {self.buckets}.")
        for layer in range(len(self.error)):
            _check_layer(self, layer)

    @property
    def error_budget(self) -> float:
        """E, the limit of the sum of the errors."""
        return self.alpha * math.fsum(entries_of(self.error, self.reference))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LGreCoResult:
    """One parameter per layer.

    Attributes:
        choices: empty when the status is ``INFEASIBLE`` or ``UNKNOWN``. In that case
            ``size`` is infinite and ``error`` is 0.
        size: the sum of the chosen sizes.
        error: the sum of the chosen errors, not rounded.
        error_budget: the limit of the sum of the errors.
        status: the status of the solve; for the programme, ``OPTIMAL`` refers to the
            rounded errors.
        seconds: wall-clock time of the solve.
    """

    choices: tuple[int, ...]
    size: float
    error: float
    error_budget: float
    status: Status
    seconds: float


def solve_lgreco(problem: LGreCoProblem, *, whole_budget: bool = False) -> LGreCoResult:
    """Runs the dynamic programme.

    Ties are broken as in the published code: the first of equally good parameters of a
    layer, and the result with the least rounded error among those of equal size. If no
    choice fits, the published code reads its tables at index -1. Here the status is
    ``INFEASIBLE`` instead. A budget of 0 admits only parameters without error.

    Args:
        problem: the problem to solve.
        whole_budget: lets the rounded errors sum to ``buckets``; the published code
            allows at most ``buckets - 1``.
    """
    begin = time.monotonic()
    rounded = [_errors_in_buckets(problem, row) for row in problem.error]
    most = problem.buckets if whole_budget else problem.buckets - 1
    table, taken = _fill(problem, rounded, most)
    end = int(np.argmin(table))
    if not math.isfinite(table[end]):
        return _result(problem, (), begin, problem.error_budget)
    choices = list[int]()
    for layer in reversed(range(len(rounded))):
        choices.append(int(taken[layer, end]))
        end -= int(rounded[layer][choices[-1]])
    return _result(problem, tuple(reversed(choices)), begin, problem.error_budget)


def rounded_errors(problem: LGreCoProblem) -> tuple[np.ndarray, ...]:
    """``q`` by layer and parameter: errors in buckets, rounded up and clipped."""
    over = problem.buckets + 1
    return tuple(
        np.where(q == over, problem.buckets, q)
        for q in (_errors_in_buckets(problem, row) for row in problem.error)
    )


def solve_lgreco_ilp(
    problem: LGreCoProblem,
    *,
    error_budget: float | None = None,
    seconds: float | None = None,
    gap: float = 0.0,
    backend: BackendName = "highs",
) -> LGreCoResult:
    """Solves the same problem without rounding, as an integer program.

    With ``x[l, p]`` binary (layer ``l`` uses parameter ``p``)::

        minimise    sum size[l, p] x[l, p]
        one_parameter_l    sum_p x[l, p] = 1
        error              sum error[l, p] x[l, p] <= error_budget

    Args:
        problem: the problem to solve; ``buckets`` is ignored.
        error_budget: replaces the problem's own budget.
        seconds: wall-clock limit; None to stop only when the optimum is proved.
        gap: the largest difference of size and bound at which a result counts as
            optimal, divided by the largest size minus the least size of all choices.
            Every difference up to 1e-9 counts as optimal.
        backend: the solver of the program: "highs", or "cbc" through PuLP.

    Raises:
        InputError: there is no backend of this name.
    """
    begin = time.monotonic()
    budget = problem.error_budget if error_budget is None else error_budget
    starts = np.cumsum([0, *map(len, problem.error)])
    possible = np.concatenate([row <= budget for row in problem.error])
    if not np.logical_or.reduceat(possible, starts[:-1]).all():
        return _result(problem, (), begin, budget)
    program = _program(problem, starts, possible, budget)
    stop = StopCriteria(seconds=seconds, gap=max(gap * SIZE_UNITS, GAP_UNITS))
    answer = backend_of(backend)(program, stop, None)
    if answer.values is None:
        none = Status.INFEASIBLE if answer.finished else Status.UNKNOWN
        return _result(problem, (), begin, budget, none)
    parts = np.split(answer.values, starts[1:-1])
    choices = tuple(int(np.argmax(part)) for part in parts)
    status = Status.OPTIMAL if answer.finished else Status.FEASIBLE
    return _result(problem, choices, begin, budget, status)


def _errors_in_buckets(problem: LGreCoProblem, error: np.ndarray) -> np.ndarray:
    """Errors in buckets, rounded up; ``buckets + 1`` for errors above the budget."""
    budget, over = problem.error_budget, problem.buckets + 1
    if budget == 0.0:
        return np.where(error > 0, over, 1)
    finite = np.where(error <= budget, error, 0.0)
    q = np.maximum(np.ceil(finite * problem.buckets / budget), 1.0)
    return np.where(error <= budget, np.minimum(q, problem.buckets), over).astype(int)


def _fill(
    problem: LGreCoProblem, rounded: Sequence[np.ndarray], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The last layer's table over 0 to ``most`` buckets, and all chosen parameters.

    Entry ``e`` of a layer's table is the least total size of this and all earlier
    layers with at most ``e`` buckets.
    """
    table = np.zeros(most + 1)
    taken = np.zeros((len(rounded), most + 1), np.int32)
    for layer, (costs, sizes) in enumerate(zip(rounded, problem.size, strict=True)):
        above = np.full(most + 1, np.inf)
        for parameter, (cost, size) in enumerate(
            zip(costs.tolist(), sizes.tolist(), strict=True)
        ):
            if cost > most:
                continue
            found = table[: most + 1 - cost] + size
            better = found < above[cost:]
            np.copyto(above[cost:], found, where=better)
            np.copyto(taken[layer, cost:], parameter, where=better)
        table = above
    return table, taken


def _program(
    problem: LGreCoProblem, starts: np.ndarray, possible: np.ndarray, budget: float
) -> IntegerProgram:
    """Returns the integer program, scaled so that its numbers are near one."""
    count, width = len(problem.error), int(starts[-1])
    lows = np.repeat([float(row.min()) for row in problem.size], np.diff(starts))
    above = np.concatenate(problem.size) - lows
    error = np.where(possible, np.concatenate(problem.error), 0.0)
    columns = np.flatnonzero(error)
    return IntegerProgram(
        costs=above / (float(above.sum()) / SIZE_UNITS or 1.0),
        most=possible.astype(np.float64),
        num_binary=width,
        starts=np.append(starts, width + len(columns)),
        columns=np.concatenate([np.arange(width), columns]),
        values=np.concatenate([np.ones(width), error[columns] / (budget or 1.0)]),
        lower=np.append(np.ones(count), -np.inf),
        upper=np.ones(count + 1),
        names=("error",),
    )


def _result(
    problem: LGreCoProblem,
    choices: tuple[int, ...],
    begin: float,
    budget: float,
    status: Status | None = None,
) -> LGreCoResult:
    size = math.fsum(entries_of(problem.size, choices)) if choices else math.inf
    found = Status.OPTIMAL if choices else Status.INFEASIBLE
    return LGreCoResult(
        choices=choices,
        size=size,
        error=math.fsum(entries_of(problem.error, choices)) if choices else 0.0,
        error_budget=budget,
        status=found if status is None else status,
        seconds=time.monotonic() - begin,
    )


def _check_layer(problem: LGreCoProblem, layer: int) -> None:
    error, size = problem.error[layer], problem.size[layer]
    reference = problem.reference[layer]
    where = f"L-GreCo: layer {layer}"
    if error.ndim != 1 or not error.size or error.shape != size.shape:
        raise InputError(
            f"{where}: error and size must be two non-empty rows of one length, got "
            f"shapes {error.shape} and {size.shape}."
        )
    if not ((error >= 0).all() and (size >= 0).all() and np.isfinite(size).all()):
        raise InputError(
            f"{where}: errors must be numbers from 0 to inf and sizes finite and not "
            f"negative, got {error} and {size}."
        )
    if not 0 <= reference < len(error) or not math.isfinite(error[reference]):
        raise InputError(
            f"{where}: the reference must name a parameter of finite error, got "
            f"{reference}."
        )
