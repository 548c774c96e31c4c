"""When decisions are made: in every interval, and where something happens at once.

The simulator and the scheduler of a real cluster ask the same object. A look at the
jobs and nodes is cheap, a decision is not: a look is followed by a decision where the
interval is over, or where something differs from what the last decision left.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from autopar.errors import ScheduleError


class Rounds:
    """The times of looks, and which of them call for a decision."""

    def __init__(
        self, interval_s: float, react_s: float | None, first_s: float
    ) -> None:
        """Nothing was decided.

        Args:
          interval_s: seconds between two decisions that nothing calls for; they are
            made at multiples of it.
          react_s: seconds between two looks; None: looks are at decisions alone.
          first_s: when the first decision is due.

        Raises:
          ScheduleError: an interval is not above 0.
        """
        check_times(interval_s, react_s)
        self._interval_s, self._react_s = interval_s, react_s
        self._due_s, self._number = first_s, 0
        self._left: Hashable = None

    def until_look_s(self, now_s: float) -> float:
        """Seconds until the next look; 0 where it is late."""
        left_s = max(self._due_s - now_s, 0.0)
        return left_s if self._react_s is None else min(self._react_s, left_s)

    def calls(self, now_s: float, found: Hashable) -> bool:
        """Whether a look calls for a decision.

        Args:
          now_s: when it is.
          found: the jobs and nodes that are there.
        """
        due = now_s >= self._due_s
        if due:
            # A number that rises, so that no rounding makes the same time due twice.
            passed = math.floor(now_s / self._interval_s)
            self._number = max(self._number, passed) + 1
            self._due_s = self._number * self._interval_s
        return due or (self._react_s is not None and found != self._left)

    def settle(self, left: Hashable) -> None:
        """Takes what a decision left: what differs from it calls for the next one."""
        self._left = left


def check_times(interval_s: float, react_s: float | None) -> None:
    """Refuses times between decisions that cannot be.

    Raises:
      ScheduleError: one of them is not above 0, or not finite.
    """
    if not (math.isfinite(interval_s) and interval_s > 0):
        raise ScheduleError(
            f"the interval is {interval_s} s; give more than 0 seconds."
        )
    if react_s is not None and not (math.isfinite(react_s) and react_s > 0):
        raise ScheduleError(
            f"a look follows another after {react_s} s; give more than 0 seconds, or "
            "none for decisions in every interval alone."
        )
