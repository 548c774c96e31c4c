"""Time that the problems of a mesh share."""

from __future__ import annotations

# Every problem has this part of the whole time, even where that is over.
_LEAST_SHARE = 0.05


class Limit:
    """A limit on what the solver spends on a mesh.

    It counts seconds of the thread's own work, so that a busy machine does not make
    plans worse. Pricing does not count: the number of problems bounds that.

    Attributes:
      seconds: of it; None: none.
      spent_s: seconds spent.
    """

    def __init__(self, seconds: float | None, parent: Limit | None = None) -> None:
        """A limit, or a part of another one."""
        self.seconds, self.parent = seconds, parent
        self.spent_s = 0.0

    def spend(self, seconds: float) -> None:
        """Counts what was spent."""
        self.spent_s += seconds
        if self.parent is not None:
            self.parent.spend(seconds)

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.seconds is not None and self.spent_s >= self.seconds

    def part_s(self, share: float) -> float | None:
        """A part of what is left; None: no limit."""
        if self.seconds is None:
            return None
        return max(share * (self.seconds - self.spent_s), _LEAST_SHARE * self.seconds)

    def part(self, share: float) -> Limit:
        """A limit of a part of what is left."""
        return Limit(self.part_s(share), self)
