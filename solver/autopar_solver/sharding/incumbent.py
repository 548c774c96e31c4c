"""The best choices so far, and a bound of what any choices cost."""

import copy
import functools
import math
from collections.abc import Sequence

import numpy as np

from autopar_solver.sharding.problem import ShardingProblem, evaluate_choices

ROUNDING = 1e-9
"""Relative difference of cost and bound that is always taken for equality."""


class Incumbent:
    """The best valid choices of a problem, and a bound that only rises.

    Attributes:
        choices: of all nodes of the problem; None until something valid is found.
        cost: of the choices; infinite until then.
        bound: no valid choices cost less.
    """

    def __init__(self, problem: ShardingProblem, gap: float) -> None:
        """Knows nothing; ``gap`` is relative."""
        self.problem = problem
        self.gap = gap
        self.choices: np.ndarray | None = None
        self.cost = math.inf
        self.bound = -math.inf

    @functools.cached_property
    def unit(self) -> float:
        """The smallest difference that a single choice can make to a cost of zero."""
        return _smallest_cost(self.problem)

    def fork(self) -> "Incumbent":
        """The same choices with a bound of its own, for a restricted problem."""
        other = copy.copy(self)
        other.bound = -math.inf
        return other

    def offer(self, choices: Sequence[int] | np.ndarray) -> bool:
        """Takes choices if they are valid and better; checks them from scratch."""
        found = evaluate_choices(self.problem, [int(choice) for choice in choices])
        limit = self.problem.memory_limit
        if not found.cost < self.cost or (limit is not None and found.peak > limit):
            return False
        self.choices = np.array(choices, np.int64)
        self.cost = found.cost
        return True

    def prove(self, bound: float) -> None:
        """Raises the bound; it never claims more than the cost."""
        self.bound = min(max(self.bound, bound), self.cost)

    @property
    def tolerance(self) -> float:
        """Absolute difference of cost and bound at which the cost counts as best."""
        if math.isinf(self.cost):
            return 0.0
        # A sum of costs that are not negative is none of them or no smaller.
        size = self.cost if self.cost > 0 else max(-self.cost, self.unit)
        return max(self.gap * abs(self.cost), ROUNDING * size)

    @property
    def cutoff(self) -> float:
        """Costs from here on are of no interest."""
        return self.cost - 0.9 * self.tolerance if self.cost < math.inf else math.inf

    @property
    def is_proved(self) -> bool:
        """Whether the cost is within the gap of the bound."""
        return self.cost - self.bound <= self.tolerance


def _smallest_cost(problem: ShardingProblem) -> float:
    """The smallest difference that a single choice can make to a cost of zero."""
    smallest = math.inf
    known: set[int] = set()
    for costs in (*problem.node_costs, *problem.edge_costs):
        if id(costs) not in known:
            known.add(id(costs))
            sizes = np.abs(costs[(costs != 0) & (costs < np.inf)])
            smallest = min(smallest, float(sizes.min(initial=math.inf)))
    return smallest if smallest < math.inf else 0.0
