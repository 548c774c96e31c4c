"""Accordion's rule for the batch: small in critical regimes of training, else large.

Agarwal et al., "Accordion: Adaptive gradient communication via critical learning regime
identification", MLSys 2021 (arXiv 2010.16248), section 4. With ``norm`` that of the
gradient over a window of steps, a regime is critical where

    |previous - norm| / previous >= eta

and the first window is critical. The squared norm of the mean gradient is estimated
without the noise of its batch, so that it means the same at every batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalRegimes:
    """Accordion's rule; `with_step` returns it after a step.

    Attributes:
      eta: relative change of the norm from which on a regime is critical.
      window: samples of the base batch, in batches of it, whose norms are put together.
      only_grows: whether the batch stays large once it is, as in the paper.
      critical: whether the regime is.
      previous: norm of the last window; None: there was none.
      squares: sum of the squared norms of this window.
      steps: number of them.
      worth: base batches that its rows are.
    """

    eta: float = 0.5
    window: float = 100.0
    only_grows: bool = False
    critical: bool = True
    previous: float | None = None
    squares: float = 0.0
    steps: int = 0
    worth: float = 0.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        if not (self.eta > 0 and self.window > 0):
            raise PlanError(
                "CriticalRegimes: expected eta and window above 0, got "
                f"eta={self.eta}, window={self.window}."
            )

    def with_step(self, sqr: float, worth: float) -> CriticalRegimes:
        """Takes a step.

        Args:
          sqr: its estimate of the squared norm of the mean gradient; one that is not
            finite is left out.
          worth: rows of the batch over those of the base batch.
        """
        if not math.isfinite(sqr):
            return self
        squares, steps = self.squares + sqr, self.steps + 1
        if self.worth + worth < self.window:
            return dataclasses.replace(
                self, squares=squares, steps=steps, worth=self.worth + worth
            )
        norm = math.sqrt(max(0.0, squares / steps))
        before = self.previous
        changed = not before or abs(before - norm) / before >= self.eta
        stays = self.only_grows and not self.critical
        return dataclasses.replace(
            self,
            critical=changed and not stays,
            previous=norm,
            squares=0.0,
            steps=0,
            worth=0.0,
        )

    def to_data(self) -> dict[str, Any]:
        """The rule as JSON can hold it."""
        return dataclasses.asdict(self)

    def gone_on(self, data: Mapping[str, Any]) -> CriticalRegimes:
        """The rule with what an earlier run has seen."""
        seen = ("critical", "previous", "squares", "steps", "worth")
        return dataclasses.replace(self, **{k: data[k] for k in seen if k in data})
