"""Reads from the telemetry which steps were skipped, and what codecs lost."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.compression.synchronise import ERROR, NON_FINITE, WANTED

# Steps whose telemetry may wait to be read; the oldest of more is waited for.
UNREAD = 64
# Weight of the latest step in the mean of its squared error with those before.
LATEST = 0.1

# A gradient's name and its codec as text, '' where steps take one of several.
Coded = tuple[str, str]


class SkippedSteps:
    """Warns of the steps that were skipped, without waiting for the devices.

    The telemetry of a step is read once it is there, as a rule during a later call.

    Attributes:
      errors: relative error by gradient and codec, a mean over the latest steps.
    """

    def __init__(self) -> None:
        """Has no telemetry to read yet."""
        self.errors: dict[str, dict[str, float]] = {}
        self._unread: deque[tuple[int, Sequence[Coded], Any]] = deque()

    def add(self, step: int, codecs: Sequence[Coded], telemetry: Any) -> None:
        """Adds the telemetry of a step, a row for each of these gradients."""
        self._unread.append((step, codecs, telemetry))

    def look(self, *, wait: bool = False) -> None:
        """Reads the telemetry that is there, or all; warns of what was skipped."""
        while self._unread:
            step, codecs, telemetry = self._unread[0]
            if not (wait or len(self._unread) > UNREAD or telemetry.is_ready()):
                return
            self._unread.popleft()
            rows = np.asarray(telemetry, dtype=float)
            bad = rows[:, NON_FINITE] != 0
            if not bad.any():
                self._learn(codecs, rows)
                continue
            _warn(step, [name for (name, _), x in zip(codecs, bad, strict=True) if x])

    def _learn(self, codecs: Sequence[Coded], rows: np.ndarray) -> None:
        for (name, codec), row in zip(codecs, rows, strict=True):
            if not codec or not 0 < row[WANTED] < np.inf or row[ERROR] < 0:
                continue
            squared = row[ERROR] / row[WANTED]
            known = self.errors.setdefault(name, {})
            before = known.get(codec, math.sqrt(squared)) ** 2
            known[codec] = math.sqrt((1 - LATEST) * before + LATEST * squared)


def _warn(step: int, names: Sequence[str]) -> None:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    warnings.warn(
        f"step {step}: the gradients of {', '.join(names[:4])}{more} are not finite; "
        "the step was skipped: what they would have spoilt is as it was before.",
        stacklevel=5,
    )
