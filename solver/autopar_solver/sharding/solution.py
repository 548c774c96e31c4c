"""A solution of a sharding problem: choices, cost and a proven bound."""

import dataclasses

from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionReport:
    """What one exact reduction removed.

    ``strategies`` counts strategies of nodes that stay as well as of removed ones.
    """

    name: str
    nodes: int
    edges: int
    strategies: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One strategy per node, its cost, and a proven lower bound of every cost.

    ``choices`` is empty when the status is ``INFEASIBLE`` or ``UNKNOWN``; the cost is
    then infinite.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    status: Status
    seconds: float
    reductions: tuple[ReductionReport, ...] = ()

    @property
    def gap(self) -> float:
        """How far the cost can be from the least one, relative to the cost."""
        if self.bound >= self.cost:
            return 0.0
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)
