"""What given choices of codecs cost, and the result of a solve."""

import dataclasses

from autopar_solver.status import Status


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
        cost_s, exposed_s, local_s, wire_s, error, memory_bytes: as in `SelectionCost`.
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
