"""Reads from the telemetry which steps were skipped, and what codecs lost."""

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

# Steps whose telemetry may wait to be read; the oldest of more is waited for.
UNREAD = 64
# Least weight of the latest step in the mean of its squared error with those before.
LATEST = 0.1
# A codec that loses more is warned of: this many times what the plan expected, but not
# less than an error that leaves training as it is; not before this number of steps.
TIMES, LITTLE, EARLY = 2.0, 0.1, 16


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGradient:
    """A gradient whose error a step may measure.

    Attributes:
      name: of its parameter.
      codec: as text; '' where steps take one of several.
      error: relative error that the plan expects of it.
    """

    name: str
    codec: str
    error: float

    @property
    def most(self) -> float:
        """The largest error without a warning."""
        return min(MOST_LOST, max(LITTLE, TIMES * self.error))


class TelemetryReader:
    """Warns of steps that were skipped and of large errors, without waiting.

    The telemetry of a step is read once it is there, as a rule during a later call.

    Attributes:
      errors: relative error by gradient and codec, a mean over the latest steps.
    """

    def __init__(self, *, warns: bool) -> None:
        """Has no telemetry to read yet.

        Args:
          warns: whether large errors are warned of.
        """
        self.errors: dict[str, dict[str, float]] = {}
        self._unread: deque[tuple[int, int, Sequence[MeasuredGradient], Any]] = deque()
        self._warns = warns
        self._measured: Counter[MeasuredGradient] = Counter()
        # Gradients that lost too much when they were measured last; codecs warned of.
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
          turn: number of steps that these codecs made before.
          gradients: what was sent, a row of telemetry for each.
          telemetry: the rows.
        """
        self._unread.append((step, turn, gradients, telemetry))

    def look(self, *, wait: bool = False) -> None:
        """Reads the telemetry that is there, or all; warns of what it says."""
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
            # Of few steps their mean: the first one has no residual to send.
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
