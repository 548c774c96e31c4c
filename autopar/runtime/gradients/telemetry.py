"""Warns of skipped steps and of large errors of codecs, from the steps' telemetry."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.compression.gradient import MOST_LOST
from autopar.compression.synchronise import ERROR, NON_FINITE, WANTED
from autopar_errors import warn_user

# Largest number of steps with unread telemetry. If there are more, the reader waits for
# the oldest step.
UNREAD = 64
# Least weight of the latest step in the running mean of squared errors.
LATEST = 0.1
# An error is too large if it exceeds TIMES * the error that the plan expects. This
# limit is raised to LITTLE, an error that does not harm training, and lowered to
# MOST_LOST. The first EARLY steps with a set of codecs give no warning.
TIMES, LITTLE, EARLY = 2.0, 0.1, 16


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGradient:
    """A gradient whose error a step may measure.

    Attributes:
      name: name of the gradient.
      codec: the codec as text; '' if each step chooses one of several codecs.
      error: relative error that the plan expects.
    """

    name: str
    codec: str
    error: float

    @property
    def most(self) -> float:
        """The largest relative error without a warning."""
        return min(MOST_LOST, max(LITTLE, TIMES * self.error))


class TelemetryReader:
    """Warns of skipped steps and of large errors, without waiting for the devices.

    The telemetry of a step is read when the devices have computed it, usually during a
    later call.

    Attributes:
      errors: name of a gradient -> codec -> relative error, a root mean square over the
        latest steps.
    """

    def __init__(self, *, warns: bool) -> None:
        """Creates a reader without telemetry.

        Args:
          warns: whether large errors give warnings.
        """
        self.errors: dict[str, dict[str, float]] = {}
        self._unread: deque[tuple[int, int, Sequence[MeasuredGradient], Any]] = deque()
        self._warns = warns
        self._measured: Counter[MeasuredGradient] = Counter()
        # Gradients whose last measured relative error was too large.
        self._lossy: set[MeasuredGradient] = set()
        self._told: set[str] = set()

    def add(
        self,
        step: int,
        turn: int,
        gradients: Sequence[MeasuredGradient],
        telemetry: Any,
    ) -> None:
        """Adds the telemetry of a step.

        Args:
          step: number of the step.
          turn: number of earlier steps with the same codecs.
          gradients: the gradients that were sent, in the order of the rows.
          telemetry: one row for each gradient.
        """
        self._unread.append((step, turn, gradients, telemetry))

    def look(self, *, wait: bool = False) -> None:
        """Reads telemetry, and warns of skipped steps and large errors.

        Args:
          wait: whether to wait for the telemetry of all steps; otherwise only
            telemetry is read that is ready.
        """
        while self._unread:
            step, turn, gradients, telemetry = self._unread[0]
            if not (wait or len(self._unread) > UNREAD or telemetry.is_ready()):
                return
            self._unread.popleft()
            rows = np.asarray(telemetry, dtype=float)
            bad = rows[:, NON_FINITE] != 0
            if not bad.any():
                self._learn(step, turn, gradients, rows)
                continue
            names = [g.name for g, x in zip(gradients, bad, strict=True) if x]
            warn_user(
                f"step {step}: the gradients of {_first_names(names)} are not finite; "
                "the step was skipped: what they would have spoilt is as it was before."
            )

    def _learn(
        self,
        step: int,
        turn: int,
        gradients: Sequence[MeasuredGradient],
        rows: np.ndarray,
    ) -> None:
        lossy: dict[MeasuredGradient, float] = {}
        for gradient, row in zip(gradients, rows, strict=True):
            if not gradient.codec or not 0 < row[WANTED] < np.inf or row[ERROR] < 0:
                continue
            squared = row[ERROR] / row[WANTED]
            known = self.errors.setdefault(gradient.name, {})
            before = known.get(gradient.codec, math.sqrt(squared)) ** 2
            self._measured[gradient] += 1
            # With the weight 1 / number of steps, the mean begins as the plain mean.
            # The first step is not typical, because it has no residual to send.
            weight = max(LATEST, 1 / self._measured[gradient])
            mean = (1 - weight) * before + weight * squared
            known[gradient.codec] = math.sqrt(mean)
            twice = gradient in self._lossy
            self._lossy.discard(gradient)
            if squared > gradient.most**2:
                self._lossy.add(gradient)
                if twice and turn >= EARLY and gradient.codec not in self._told:
                    lossy[gradient] = math.sqrt(squared)
        if lossy and self._warns:
            self._told |= {gradient.codec for gradient in lossy}
            _warn_of_loss(step, lossy)


def _warn_of_loss(step: int, lossy: dict[MeasuredGradient, float]) -> None:
    said = [
        f"{g.name!r} ({g.codec}: {error:.2g}, expected {g.error:.2g})"
        for g, error in sorted(lossy.items(), key=lambda item: -item[1])
    ]
    name = max(lossy, key=lambda g: lossy[g]).name
    warn_user(
        f"step {step}: codecs lose more of a gradient than planned, or nearly all of "
        f"it; relative errors: {_first_names(said)}. Training falls behind that with "
        f"dense gradients. Try another codec, as by recode({{{name!r}: 'int8'}}), or "
        "plan with compression='auto' and a smaller error_budget=."
    )


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
