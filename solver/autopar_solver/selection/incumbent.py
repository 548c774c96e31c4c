"""The best choices of codecs so far, and a bound of what any choices cost."""

import dataclasses

from autopar_solver.selection.check import fits_budgets, recompute
from autopar_solver.selection.problem import CodecSelection


@dataclasses.dataclass(frozen=True, slots=True)
class Incumbent:
    """The best choices so far, if any, and a bound of every choice's cost."""

    choices: tuple[int, ...] | None
    cost_s: float
    bound_s: float

    def offer(self, problem: CodecSelection, choices: tuple[int, ...]) -> "Incumbent":
        """These choices if they fit and are better, else the known ones."""
        cost = recompute(problem, choices)
        if cost.cost_s >= self.cost_s or not fits_budgets(problem, cost):
            return self
        return Incumbent(choices, cost.cost_s, self.bound_s)

    def prove(self, bound: float) -> "Incumbent":
        """Raises the bound; it never claims more than the cost."""
        return Incumbent(
            self.choices, self.cost_s, min(max(self.bound_s, bound), self.cost_s)
        )
