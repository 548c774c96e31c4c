"""A clock that tells how much time a solve has left, or how much work it has done."""

import copy
import math
import time


class Clock:
    """How much time is left.

    Without a limit, time is counted in work done (``tick``), not read off a clock: then
    the same problem always takes the same steps.
    """

    def __init__(self, begin: float, seconds: float | None) -> None:
        """Runs from ``begin`` (of ``time.monotonic``)."""
        self.began = begin
        self.counted = seconds is None
        self._ticks = [0.0]
        self.begin = 0.0 if seconds is None else begin
        self.length = math.inf if seconds is None else seconds
        self.end = self.begin + self.length

    def within(self, seconds: float) -> "Clock":
        """A clock that stops after some seconds from now, or with this one."""
        other = copy.copy(self)
        other.begin = self.now
        other.end = min(self.end, self.now + seconds)
        other.length = other.end - other.begin
        return other

    def tick(self, seconds: float) -> None:
        """Counts work that takes about so long."""
        self._ticks[0] += seconds

    @property
    def now(self) -> float:
        """The present time, or the work counted so far."""
        return self._ticks[0] if self.counted else time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return self.end - self.now

    @property
    def deadline(self) -> float | None:
        """The end on ``time.monotonic``; None if time is only counted."""
        return None if self.counted else self.end

    @property
    def spent(self) -> float:
        """Real seconds since the beginning."""
        return time.monotonic() - self.began
