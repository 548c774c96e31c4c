"""Communication that runs beside work.

A compiler with a latency-hiding scheduler sends what nothing waits for while the
device computes: gathers of parameters ahead of their readers, sums of gradients
behind the operators that complete them. `autopar.cost.parts` says what the messages of
a plan leave exposed.

What follows here bounds that from below, in terms that a problem can hold. Each
collective has a window of its own: from the start of its pass to its reader, or from
its maker to the end of the update. Communication is one stream, work another. What
must lie within a stretch and exceeds the work there is exposed, and no more than that,
if transfers can be cut (the interval bound of preemptive scheduling on one machine,
Horn 1974):

    exposed >= max over stretches (communication within - share x work within, 0)

All gathers of a pass start with it and all sums end with it, so stretches from the
start, stretches to the end and the whole pass are all that matter.

What is hidden slows the work beside it by the device's ``contention``.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar.cost.parts import Part
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of one pass, by positions of operators, both ends included.

    Attributes:
      role: the pass.
      first: position of the first operator; -1 is the start of the pass.
      last: position of the last; the number of operators is the end of the pass.
    """

    role: Role
    first: int
    last: int

    def slices(self, count: int) -> tuple[slice, slice, slice]:
        """The positions whose work, gathers and sums lie within.

        A gather is outside of the work of its own reader, a sum of its maker's.

        Args:
          count: number of operators.
        """
        starts, ends = self.first < 0, self.last >= count
        low = 0 if starts else self.first + 1
        high = count if ends else self.last
        upto = (count if ends else self.last + 1) if starts else 0
        since = max(self.first, 0) if ends else count
        return slice(low, high), slice(0, upto), slice(since, count)


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Seconds of one pass by position of operators.

    Attributes:
      role: the pass.
      work: seconds of each operator.
      gathers: of each operator, seconds of the gathers that must end before it.
      sums: of each operator, seconds of the sums that can start after it.
      after_s: seconds of work that follows the pass, beside which sums may run.
      parts: the messages that really are sent; () where each array travels alone and
        nothing follows the pass.
    """

    role: Role
    work: np.ndarray
    gathers: np.ndarray
    sums: np.ndarray
    after_s: float = 0.0
    parts: tuple[Part, ...] = ()

    @property
    def communication_s(self) -> float:
        """Seconds of all communication of the pass that may be hidden."""
        return float(self.gathers.sum() + self.sums.sum())

    @functools.cached_property
    def _running(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Work, gathers and sums up to each position, and 0 before the first."""
        w, g, s = (
            np.concatenate(([0.0], np.cumsum(x)))
            for x in (self.work, self.gathers, self.sums)
        )
        return w, g, s

    def within(self, stretch: Stretch) -> tuple[float, float]:
        """Seconds of communication that must lie in a stretch, and of work there."""
        work, gathers, sums = self._running
        done, early, late = stretch.slices(len(self.work))
        moved = gathers[early.stop] + sums[-1] - sums[late.start]
        after_s = self.after_s if stretch.last >= len(self.work) else 0.0
        return float(moved), float(work[done.stop] - work[done.start]) + after_s

    def tightest(self, share: float) -> Stretch:
        """The stretch that exposes most.

        Args:
          share: part of the work that communication may run beside.
        """
        count = len(self.work)
        whole = Stretch(self.role, -1, count)
        if not count:
            return whole
        work, gathers, sums = self._running
        early = gathers[1:] - share * work[:-1]
        late = (sums[-1] - sums[:-1]) - share * (work[-1] - work[1:])
        found = (
            whole,
            Stretch(self.role, -1, int(np.argmax(early))),
            Stretch(self.role, int(np.argmax(late)), count),
        )
        return max(found, key=lambda s: self.excess_s(s, share))

    def excess_s(self, stretch: Stretch, share: float) -> float:
        """Seconds of communication in a stretch beyond the work that covers it."""
        moved, done = self.within(stretch)
        return moved - share * done

    def exposed_s(self, share: float) -> float:
        """Seconds of the pass in which only communication runs.

        Never less than `excess_s` of any stretch: messages have shorter windows than
        their arrays.
        """
        parts_s = sum(part.exposed_s(share) for part in self.parts)
        return max(self.least_s(share), parts_s)

    def least_s(self, share: float) -> float:
        """Seconds exposed if arrays were sent alone, whatever loops they are in."""
        return max(0.0, self.excess_s(self.tightest(share), share))
