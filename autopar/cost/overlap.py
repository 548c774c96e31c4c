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
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost.parts import Part
from autopar.steps.analysis import Analysis
from autopar.steps.sums import charged
from autopar.steps.uses import Use
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


@dataclasses.dataclass(frozen=True, eq=False)
class Discounts:
    """Prices of work and communication where a part is hidden.

    A step takes ``work + waiting + contention x hideable + (1 - contention) x
    exposed``, and ``exposed`` is at least ``communication - share x work`` of any
    stretch. So for weights of stretches, of each pass at most 1 together, prices
    that add over decisions give a lower bound of the time of every plan, and weights
    for which it is that of the best plan exist but for what cannot be split (the
    Lagrangian dual of the maximum).

    Attributes:
      work: factor on seconds of work, by class of operators.
      sums: factor on sums that nothing waits for, by class of their makers.
      gathers: factor on gathers that end before an operator, by position.
      shares: the part of such a sum that operators pay, by class, where sums may be
        one (`autopar.steps.sums.charged`); None: equal parts.
    """

    work: np.ndarray
    sums: np.ndarray
    gathers: np.ndarray
    shares: Mapping[int, float] | None = None

    def of_uses(self, uses: Sequence[Use]) -> float:
        """The factor on a gather for these readings; the mean over instances."""
        first: dict[int, int] = {}
        for use in uses:
            for value, (reader, _, _) in use.readers.items():
                first[value] = min(first.get(value, reader), reader)
        found = [float(self.gathers[reader]) for reader in first.values()]
        return sum(found) / len(found) if found else 1.0


def lowered(seconds: np.ndarray, factor: float) -> np.ndarray:
    """Seconds times a factor, which may be 0; what is infinite stays so."""
    finite = np.isfinite(seconds)
    return np.where(finite, factor * np.where(finite, seconds, 0.0), seconds)


def discounts(
    analysis: Analysis,
    weights: Mapping[Stretch, float],
    share: float,
    contention: float,
    *,
    whole: bool = True,
) -> Discounts:
    """The prices at weights of stretches.

    Args:
      analysis: the program.
      weights: of stretches, at least 0; those of a pass add up to at most 1.
      share: part of the work that communication may run beside.
      contention: seconds of work lost for each second that is hidden.
      whole: whether messages are sent whole, so that the update may cover sums.
    """
    places = analysis.positions
    count = len(places.classes)
    covering, gathered, summed = (np.zeros(count) for _ in range(3))
    for stretch, weight in weights.items():
        done, early, late = stretch.slices(count)
        covering[done] += weight * places.roles[stretch.role][done]
        if whole and stretch.role is Role.BACKWARD and stretch.last >= count:
            covering += weight * places.update
        gathered[early] += weight * places.roles[stretch.role][early]
        summed[late] += weight * places.summed[stretch.role][late]
    rest = 1.0 - contention
    in_pass = places.roles[Role.FORWARD] | places.roles[Role.BACKWARD]
    complete = contention + rest * summed
    return Discounts(
        places.of_classes(1.0 - rest * share * covering),
        places.of_classes(complete[places.ready]),
        np.where(in_pass, contention + rest * gathered, 1.0),
        _shares(analysis, complete),
    )


def _shares(analysis: Analysis, factors: np.ndarray) -> dict[int, float]:
    """The parts of sums that operators pay where sums may be one, by class.

    Args:
      analysis: the program.
      factors: on a sum that is complete at an operator, by position.
    """
    places, own = analysis.positions, factors[analysis.positions.ready]
    makers = {v: analysis.contraction.producer[v].index for v in analysis.shared.count}
    paid = own.copy()
    for operator, factor in charged(makers, analysis.shared, factors.tolist()).items():
        paid[operator] = factor
    whole, part = places.of_classes(own), places.of_classes(paid)
    return {c: float(part[c] / whole[c]) for c in analysis.shares if whole[c] > 0.0}
