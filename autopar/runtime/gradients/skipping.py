"""Says which steps were skipped because a gradient was not finite."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.compression.synchronise import NON_FINITE

# Steps whose telemetry may wait to be read; the oldest of more is waited for.
UNREAD = 64


class SkippedSteps:
    """Warns of the steps that were skipped, without waiting for the devices.

    The telemetry of a step is read once it is there, as a rule during a later call.
    """

    def __init__(self) -> None:
        """Has no telemetry to read yet."""
        self._unread: deque[tuple[int, Sequence[str], Any]] = deque()

    def add(self, step: int, names: Sequence[str], telemetry: Any) -> None:
        """Adds the telemetry of a step, a row for each gradient of these names."""
        self._unread.append((step, names, telemetry))

    def look(self, *, wait: bool = False) -> None:
        """Reads the telemetry that is there, or all; warns of what was skipped."""
        while self._unread:
            step, names, telemetry = self._unread[0]
            if not (wait or len(self._unread) > UNREAD or telemetry.is_ready()):
                return
            self._unread.popleft()
            bad = np.asarray(telemetry)[:, NON_FINITE] != 0
            found = [name for name, spoilt in zip(names, bad, strict=True) if spoilt]
            if found:
                _warn(step, found)


def _warn(step: int, names: Sequence[str]) -> None:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    warnings.warn(
        f"step {step}: the gradients of {', '.join(names[:4])}{more} are not finite; "
        "the step was skipped: what they would have spoilt is as it was before.",
        stacklevel=5,
    )
