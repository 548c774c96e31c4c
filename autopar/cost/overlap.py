"""Overlap of communication with work.

A compiler with a latency-hiding scheduler overlaps two kinds of communication with
work: gathers of parameters, before the operators that read them, and sums of gradients,
after the operators that complete them. Communication that work does not hide is
exposed.

*A lower bound* of exposed communication (`Stretch`, `Timeline.least_s`) is simple
enough for the planner's optimisation problem. Each collective has a window: the
interval of the pass in which it may run. The window of a gather reaches from the start
of the pass to the gather's reader. The window of a sum reaches from the operator that
completes it to the end of the update. A device does one communication and one piece of
work at a time. A stretch is an interval of the pass. All communication whose window
lies within a stretch must run in it:

    exposed >= max over stretches (communication within - share x work within, 0)

``share`` is the fraction of the seconds of work that communication may overlap with.
The bound is exact if transfers can be interrupted (the interval bound of preemptive
scheduling on one machine, Horn 1974). The windows of all gathers begin with the pass,
and the windows of all sums end with it. Therefore three kinds of stretches suffice:
from the start, to the end, and the whole pass.

Hidden communication makes the overlapping work slower, by the fraction ``contention``
of the device.

*The messages of a plan* (`Part`) give the predicted time. A part of a step is a pass,
or the body of a loop that communicates. A message that starts in a part ends in the
same part. One message is sent at a time.

A message of gathers must arrive before the first of its arrays is read. The compiler
waits for the message at that operator, and only then starts the next message. For each
message,

    exposed = max(message - share x work since the previous wait, 0)

A message of sums can start when its last array is complete. The update of parameters
whose gradients are summed continues while later sums are sent. Therefore a stretch with
messages of sums may end within the update, at the first operator that needs one of
these messages:

    exposed = max over stretches (sums within - share x work within, 0)

XLA's GPU compiler moves sums that the program writes as collectives from an iteration
of a loop into the next one (openxla/xla, ``xla/service/collective_pipeliner.cc``). The
sums of the last iteration run after the loop. Work of a whole iteration hides the other
sums, except the work that hides gathers or other sums of the loop.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from autopar_passes.graph.roles import Role

# The key of a part: its pass, and the last operator of its loop that communicates.
Key = tuple[Role, int]


@dataclasses.dataclass(frozen=True, slots=True)
class PartCut:
    """A stretch of a part, as half-open ranges of positions of operators.

    Attributes:
      gathers: whether the messages are gathers. Otherwise they are sums, and positions
        are ranks (`Analysis.ranks`).
      moved: the range of positions of the messages in the stretch.
      work: the range of positions of the operators whose work hides these messages.
      needs: operators of the update that need only sums of lower ranks than this also
        hide the messages; -1 if no operator of the update does.
    """

    gathers: bool
    moved: tuple[int, int]
    work: tuple[int, int]
    needs: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Seconds of a part of a step, for each position of an operator.

    Attributes:
      key: the part's pass, and the last operator of its loop.
      work: seconds of each operator of the part.
      late_work: seconds of the operator at each rank (`Analysis.ranks`): the order in
        which products that make gradients come last.
      gathers: for each operator, seconds of the messages that must end before it.
      sums: for each rank, seconds of the messages that can start after its operator.
      update: seconds of each operator of the update, if the update follows the part.
      needs: for each operator of the update, the last rank of a message that the
        operator needs, or -1 if it needs none. For an operator outside of the update,
        the entry is the number of operators.
      pipelined_s: seconds of sums that run in the next iteration of the loop.
    """

    key: Key
    work: np.ndarray
    late_work: np.ndarray
    gathers: np.ndarray
    sums: np.ndarray
    update: np.ndarray
    needs: np.ndarray
    pipelined_s: float = 0.0

    def exposed_s(self, share: float) -> float:
        """Seconds of the part in which only communication runs."""
        last = self.last_sums(share)
        cuts = [*self.waits(), *([last] if last else [])]
        exposed_s = sum(max(0.0, self.excess_s(cut, share)) for cut in cuts)
        if not self.pipelined_s:
            return exposed_s
        hidden_s = float(self.gathers.sum() + self.sums.sum()) - exposed_s
        free_s = share * float(self.work.sum()) - hidden_s
        return exposed_s + max(0.0, self.pipelined_s - max(0.0, free_s))

    def excess_s(self, cut: PartCut, share: float) -> float:
        """Seconds of messages in a stretch, minus ``share`` of the work there."""
        messages = self.gathers if cut.gathers else self.sums
        work = self.work if cut.gathers else self.late_work
        done = work[slice(*cut.work)].sum()
        if cut.needs >= 0:
            done += self.update[self.needs < cut.needs].sum()
        return float(messages[slice(*cut.moved)].sum() - share * done)

    def waits(self) -> list[PartCut]:
        """For each message of gathers, the stretch since the previous wait."""
        found: list[PartCut] = []
        last = 0
        for reader in np.flatnonzero(self.gathers).tolist():
            found.append(PartCut(True, (reader, reader + 1), (last, reader)))
            last = reader
        return found

    def last_sums(self, share: float) -> PartCut | None:
        """The stretch with the most exposed sums; None if the part has no sums.

        Args:
          share: fraction of the work that communication may overlap with.
        """
        if not self.sums.any():
            return None
        done, summed = _running(self.late_work), _running(self.sums)
        # Seconds of sums up to each position, minus the seconds of the update that can
        # overlap.
        ends = summed[1:] - share * self._update_seconds_below()
        # Seconds of sums before each position, plus the work after the position.
        starts = summed[:-1] + share * (done[-1] - done[1:])
        last = int(np.argmax(ends - np.minimum.accumulate(starts)))
        first = int(np.argmin(starts[: last + 1]))
        return PartCut(False, (first, last + 1), (first + 1, len(done) - 1), last)

    def _update_seconds_below(self) -> np.ndarray:
        """For each rank, seconds of those operators of the update that need only sums
        of lower ranks.
        """
        count = len(self.work)
        by_need = np.bincount(self.needs + 1, self.update, minlength=count + 2)
        return np.cumsum(by_need)[:count]


def _running(values: np.ndarray) -> np.ndarray:
    """Running totals: 0, then the sum up to each position."""
    return np.concatenate(([0.0], np.cumsum(values)))


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of one pass, by positions of operators, both ends included.

    Attributes:
      role: the pass.
      first: position of the first operator; -1 is the start of the pass.
      last: position of the last operator; the number of operators is the end of the
        pass.
    """

    role: Role
    first: int
    last: int

    def slices(self, count: int) -> tuple[slice, slice, slice]:
        """The positions whose work, gathers and sums lie within the stretch.

        A gather does not overlap with its own reader. A sum does not overlap with the
        operator that completes it.

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
    """Seconds of one pass, for each position of an operator.

    Attributes:
      role: the pass.
      work: seconds of each operator.
      gathers: for each operator, seconds of the gathers that must end before it.
      sums: for each operator, seconds of the sums that can start after it.
      after_s: seconds of work after the pass that sums may overlap with.
      parts: the messages of the plan, by part; () if each array has a separate message
        and no work follows the pass.
    """

    role: Role
    work: np.ndarray
    gathers: np.ndarray
    sums: np.ndarray
    after_s: float = 0.0
    parts: tuple[Part, ...] = ()

    @property
    def communication_s(self) -> float:
        """Seconds of all hideable communication of the pass."""
        return float(self.gathers.sum() + self.sums.sum())

    @functools.cached_property
    def _running(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Running totals of work, gathers and sums, each with a leading 0."""
        w, g, s = (
            np.concatenate(([0.0], np.cumsum(x)))
            for x in (self.work, self.gathers, self.sums)
        )
        return w, g, s

    def within(self, stretch: Stretch) -> tuple[float, float]:
        """Seconds of communication and of work that must lie in a stretch."""
        work, gathers, sums = self._running
        done, early, late = stretch.slices(len(self.work))
        moved = gathers[early.stop] + sums[-1] - sums[late.start]
        after_s = self.after_s if stretch.last >= len(self.work) else 0.0
        return float(moved), float(work[done.stop] - work[done.start]) + after_s

    def tightest(self, share: float) -> Stretch:
        """The stretch with the most exposed communication.

        Args:
          share: fraction of the work that communication may overlap with.
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
        """Seconds of communication in a stretch, minus ``share`` of the work in it."""
        moved, done = self.within(stretch)
        return moved - share * done

    def exposed_s(self, share: float) -> float:
        """Seconds of the pass in which only communication runs.

        The result is at least `excess_s` of every stretch, because the window of a
        message is no longer than the windows of its arrays.
        """
        parts_s = sum(part.exposed_s(share) for part in self.parts)
        return max(self.least_s(share), parts_s)

    def least_s(self, share: float) -> float:
        """Seconds exposed if each array had its own message, regardless of loops."""
        return max(0.0, self.excess_s(self.tightest(share), share))
