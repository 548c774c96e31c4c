"""Communication that runs beside work.

A compiler with a latency-hiding scheduler sends what nothing waits for while the
device computes: gathers of parameters ahead of their readers, sums of gradients
behind the operators that complete them. `autopar.cost.overlap` says what the messages
of a plan leave exposed.

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

What one stream of messages leaves exposed of a part of a step.

A part is a pass of the step, or the body of a loop that communicates: messages cross
no border of such a loop. One message is on its way at a time.

A message of gathers must be there where the first of its arrays is read. The compiler
waits for it there and starts the next one only then, so that of each

    exposed = max(message - share x work since the last one was waited for, 0)

A message of sums can leave when the last array that it holds is complete. The update
of what was summed goes on while later sums are sent. So a stretch in which sums are
sent may end within the update, at the first operator that needs a certain one:

    exposed = max over stretches (sums within - share x work within, 0)
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar_passes.graph.roles import Role

# A pass, and the last operator of the innermost loop that communicates.
Key = tuple[Role, int]


@dataclasses.dataclass(frozen=True, slots=True)
class PartCut:
    """A stretch of a part, as ranges of positions of operators, their ends excluded.

    Attributes:
      gathers: whether messages of gathers count; else those of sums, and positions are
        ranks (`Analysis.ranks`).
      moved: messages within these positions count.
      work: work within these positions covers them.
      needs: work of the update that needs sums of ranks below covers them, too; -1:
        none of it.
    """

    gathers: bool
    moved: tuple[int, int]
    work: tuple[int, int]
    needs: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Seconds of a part of a step by position of operators.

    Attributes:
      key: its pass, and the last operator of its loop.
      work: seconds of each operator of the part.
      late_work: the same by rank (`Analysis.ranks`): products of gradients come last.
      gathers: of each operator, seconds of the messages that must end before it.
      sums: of each rank, seconds of the messages that can start after its operator.
      update: seconds of each operator of the update, if it follows the part.
      needs: of each operator of the update, the last rank of a message that it
        needs, -1: none; the number of operators for operators elsewhere.
    """

    key: Key
    work: np.ndarray
    late_work: np.ndarray
    gathers: np.ndarray
    sums: np.ndarray
    update: np.ndarray
    needs: np.ndarray

    def exposed_s(self, share: float) -> float:
        """Seconds of the part in which only communication runs."""
        last = self.last_sums(share)
        cuts = [*self.waits(), *([last] if last else [])]
        return sum(max(0.0, self.excess_s(cut, share)) for cut in cuts)

    def excess_s(self, cut: PartCut, share: float) -> float:
        """Seconds of messages in a stretch beyond the work that covers them."""
        messages = self.gathers if cut.gathers else self.sums
        work = self.work if cut.gathers else self.late_work
        done = work[slice(*cut.work)].sum()
        if cut.needs >= 0:
            done += self.update[self.needs < cut.needs].sum()
        return float(messages[slice(*cut.moved)].sum() - share * done)

    def waits(self) -> list[PartCut]:
        """The stretch of each message of gathers."""
        found: list[PartCut] = []
        last = 0
        for reader in np.flatnonzero(self.gathers).tolist():
            found.append(PartCut(True, (reader, reader + 1), (last, reader)))
            last = reader
        return found

    def last_sums(self, share: float) -> PartCut | None:
        """The stretch whose sums expose most; None: the part has none.

        Args:
          share: part of the work that communication may run beside.
        """
        if not self.sums.any():
            return None
        done, summed = _running(self.late_work), _running(self.sums)
        # Up to the sum at each position: less the update that can run meanwhile.
        ends = summed[1:] - share * self._update_seconds_below()
        # Since the sum at each position: with the work behind it.
        starts = summed[:-1] + share * (done[-1] - done[1:])
        last = int(np.argmax(ends - np.minimum.accumulate(starts)))
        first = int(np.argmin(starts[: last + 1]))
        return PartCut(False, (first, last + 1), (first + 1, len(done) - 1), last)

    def _update_seconds_below(self) -> np.ndarray:
        """Of each position, seconds of the update that need sums below it alone."""
        count = len(self.work)
        by_need = np.bincount(self.needs + 1, self.update, minlength=count + 2)
        return np.cumsum(by_need)[:count]


def _running(values: np.ndarray) -> np.ndarray:
    """Sums up to each position, and 0 before the first."""
    return np.concatenate(([0.0], np.cumsum(values)))


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
