"""Shows how far a run has come, in one line of a terminal."""

from __future__ import annotations

import math
import time

from autopar import progress
from autopar.plans import Plan
from autopar.units import rounded_cluster, seconds_text

# Least seconds between two messages.
_EVERY_S = 0.1


class Display:
    """A line of progress; it shows nothing where nobody looks."""

    def __init__(self, steps: float, shows: bool | None) -> None:
        """Shows nothing yet.

        Args:
          steps: how many there are.
          shows: whether it is shown; None: on a terminal (`autopar.progress`).
        """
        self._steps = steps
        self._shows = progress.is_shown() if shows is None else shows
        self._last_s = 0.0

    def show(self, step: int, seconds: float, plan: Plan) -> None:
        """Says how many steps have run, how long the last took, and where."""
        now = time.perf_counter()
        if self._shows and (now - self._last_s > _EVERY_S or step == self._steps):
            self._last_s = now
            progress.write(progress_text(step, self._steps, seconds, plan))

    def close(self) -> None:
        """Wipes the line."""
        if self._shows:
            progress.wipe()
            self._shows = False


def progress_text(step: int, steps: float, seconds: float, plan: Plan) -> str:
    """The line of progress.

    Args:
      step: how many steps have run.
      steps: how many there are; infinite: nobody knows.
      seconds: of the last one.
      plan: in use.
    """
    of = f" of {steps}" if math.isfinite(steps) else ""
    where = rounded_cluster(plan.cluster)
    return f"step {step}{of}, {seconds_text(seconds)} a step on {where}"
