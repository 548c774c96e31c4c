"""Measures the time that a solve has left, or counts the work that it has done."""

import copy
import math
import time
from collections.abc import Callable

Timer = Callable[[], float]


class Clock:
    """The time that a solve has left.

    Without a time limit the clock reads no timer. It adds the estimated seconds that
    `tick` gets for each piece of work, so the same problem always takes the same steps.
    """

    def __init__(
        self, begin: float, seconds: float | None, timer: Timer | None = None
    ) -> None:
        """Starts at ``begin`` of a timer, which is ``time.monotonic`` by default."""
        self.timer = timer
        self.began = begin
        self.counted = seconds is None
        self._ticks = [0.0]
        self.begin = 0.0 if seconds is None else begin
        self.length = math.inf if seconds is None else seconds
        self.end = self.begin + self.length

    def within(self, seconds: float) -> "Clock":
        """Returns a clock that stops after some seconds, or when this clock stops."""
        other = copy.copy(self)
        other.begin = self.now
        other.end = min(self.end, self.now + seconds)
        other.length = other.end - other.begin
        return other

    def tick(self, seconds: float) -> None:
        """Counts work that takes about this many seconds."""
        self._ticks[0] += seconds

    @property
    def now(self) -> float:
        """Returns the timer's current time.

        Without a time limit, this is the sum of the seconds that `tick` has counted.
        """
        return self._ticks[0] if self.counted else self._read()

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a limit."""
        return self.end - self.now

    @property
    def out(self) -> bool:
        """Whether the time limit has passed; always false without a limit."""
        return not self.counted and self.now > self.end

    @property
    def spent_s(self) -> float:
        """Real seconds since the beginning."""
        return self._read() - self.began

    def _read(self) -> float:
        return time.monotonic() if self.timer is None else self.timer()
