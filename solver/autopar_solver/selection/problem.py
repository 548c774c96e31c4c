"""The selection of codecs: one option for each gradient.

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

import numpy as np

from autopar_errors import InputError

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
        InputError: an array has the wrong shape or values, or a gradient has no
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
        """``memory_bytes``, zeros where it is None."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return tuple(np.zeros(size) for size in self.num_options)

    @property
    def memory_limit(self) -> float:
        """``memory_budget_bytes``, ``inf`` where it is None."""
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
