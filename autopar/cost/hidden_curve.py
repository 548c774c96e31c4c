"""Hidden communication of a planned step as a function of its batch.

What is exposed of a pass is a maximum over stretches (`autopar.cost.overlap`), or what
its messages leave exposed (`autopar.cost.parts`) where that is more. The stretches that
decide at some batch are kept, each with its communication less its work as a piecewise
polynomial of the batch; a query takes their maximum. Messages of gathers that are
exposed at the same batches are added up to one stretch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cost.items import CostItem, Paid, timelines
from autopar.cost.overlap import Stretch, Timeline
from autopar.cost.parts import Cut
from autopar.cost.pieces import Pieces, PieceSum, added, value_at
from autopar.cost.placing import Key, Placing, placing
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.steps.positions import PASSES
from autopar_passes.graph.roles import Role

# Batches, over the planned one, at which stretches that decide are looked for.
_BATCHES = (1 / 64, 1 / 8, 1 / 2, 1.0, 2.0, 8.0, 64.0)

Priced = Sequence[tuple[CostItem, Pieces]]


@dataclasses.dataclass(frozen=True, slots=True)
class ExposedCurve:
    """What one pass leaves exposed, by batch.

    Attributes:
      least: stretches of the pass with its arrays alone.
      parts: sums of maxima over stretches with its messages.
    """

    least: tuple[PieceSum, ...]
    parts: tuple[tuple[PieceSum, ...], ...]

    def __call__(self, batch: float) -> float:
        """Seconds at a batch, over the planned one."""
        return max(
            _most(self.least, batch), sum(_most(cuts, batch) for cuts in self.parts)
        )


def _most(stretches: Sequence[PieceSum], batch: float) -> float:
    most = 0.0
    for excess in stretches:
        most = max(most, excess(batch))
    return most


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenCurve:
    """Seconds that a step saves because communication runs beside work.

    Attributes:
      contention: seconds of work lost for each second that is hidden.
      gathers: seconds of what is gathered for a microbatch and may be hidden.
      sums: the same of what is summed once in a step.
      first: what each pass of a microbatch without sums exposes.
      last: the same of the last microbatch, which has the sums.
    """

    contention: float
    gathers: PieceSum
    sums: PieceSum
    first: tuple[ExposedCurve, ...]
    last: tuple[ExposedCurve, ...]

    def saved_s(self, batch: float, accumulation: int) -> float:
        """Seconds that a step saves.

        Args:
          batch: of a microbatch, over the planned one.
          accumulation: number of microbatches.
        """
        gathers = self.gathers(batch)
        exposed = sum(curve(batch) for curve in self.last)
        hidden = gathers + self.sums(batch) - exposed
        if accumulation > 1:
            each = gathers - sum(curve(batch) for curve in self.first)
            hidden += (accumulation - 1) * each
        return (1.0 - self.contention) * hidden


def hidden_curve(
    assignment: Assignment, pricer: Pricer, priced: Priced
) -> HiddenCurve | None:
    """What an assignment hides, by batch; None: the devices hide nothing.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      priced: what a step costs, each item with its seconds by batch.
    """
    known = pricer.cluster.device.calibrated
    if not known.overlap:
        return None
    found = placing(assignment, [i.collective for i, _ in priced if i.collective])
    whole = known.whole_messages
    places = _Places(assignment, priced, found, known.overlap, whole)
    return HiddenCurve(
        known.contention,
        added(p for i, p in places.hideable() if i.paid is Paid.MICROBATCH),
        added(p for i, p in places.hideable() if i.paid is not Paid.MICROBATCH),
        places.curves(with_sums=False),
        places.curves(with_sums=True),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """The items of a step with their positions, and how communication is covered."""

    assignment: Assignment
    priced: Priced
    placed: Placing
    share: float
    whole: bool

    def hideable(self) -> list[tuple[CostItem, Pieces]]:
        """The items that have a slot."""
        sent = [(i, p) for i, p in self.priced if i.collective is not None]
        slots = zip(sent, self.placed.slots, strict=True)
        return [found for found, slot in slots if slot is not None]

    def curves(self, *, with_sums: bool) -> tuple[ExposedCurve, ...]:
        """What each pass leaves exposed."""
        lines = [
            timelines(
                self.assignment,
                self._at(batch, with_sums),
                self.placed,
                whole=self.whole,
            )
            for batch in _BATCHES
        ]
        return tuple(
            self._curve([line[n] for line in lines], with_sums=with_sums)
            for n in range(len(PASSES))
        )

    def _at(self, batch: float, with_sums: bool) -> list[tuple[CostItem, float]]:
        return [
            (
                item,
                value_at(pieces.at(batch), batch)
                if self._counts(item, with_sums)
                else 0.0,
            )
            for item, pieces in self.priced
        ]

    def _counts(self, item: CostItem, with_sums: bool) -> bool:
        return with_sums or item.work is not None or item.paid is Paid.MICROBATCH

    def _curve(self, lines: Sequence[Timeline], *, with_sums: bool) -> ExposedCurve:
        """What a pass leaves exposed, from its timelines at `_BATCHES`."""
        stretches = dict.fromkeys(t.tightest(self.share) for t in lines)
        parts: list[tuple[PieceSum, ...]] = []
        for number, part in enumerate(lines[0].parts):
            at = [t.parts[number] for t in lines]
            together: dict[tuple[bool, ...], list[Cut]] = {}
            for cut in part.waits():
                signs = tuple(p.excess_s(cut, self.share) > 0 for p in at)
                together.setdefault(signs, []).append(cut)
            parts += [
                (self._excess(part.key, cuts, with_sums=with_sums),)
                for signs, cuts in together.items()
                if any(signs)
            ]
            lasts = dict.fromkeys(p.last_sums(self.share) for p in at)
            parts.append(
                tuple(
                    self._excess(part.key, [cut], with_sums=with_sums)
                    for cut in lasts
                    if cut is not None
                )
            )
        least = tuple(self._least(s, with_sums=with_sums) for s in stretches)
        return ExposedCurve(least, tuple(parts))

    def _excess(self, key: Key, cuts: Sequence[Cut], *, with_sums: bool) -> PieceSum:
        """Messages of stretches of a part less the work that covers them, by batch."""
        covering = sum(self.placed.covering(key, cut) for cut in cuts)
        sent = [(i, p) for i, p in self.priced if i.collective is not None]
        moved = [
            pieces
            for (item, pieces), slot in zip(sent, self.placed.slots, strict=True)
            if slot is not None
            and slot.key == key
            and self._counts(item, with_sums)
            and any(slot.within(cut) for cut in cuts)
        ]
        return self._less_work(moved, np.asarray(covering, float))

    def _less_work(self, moved: list[Pieces], covering: np.ndarray) -> PieceSum:
        places = self.assignment.analysis.positions
        shares = np.zeros(len(covering))
        np.add.at(shares, places.classes, places.shares * covering)
        terms = list(moved)
        for item, pieces in self.priced:
            if item.work is not None and shares[item.operator]:
                terms.append(pieces.scaled(-self.share * shares[item.operator]))
        return added(terms)

    def _least(self, stretch: Stretch, *, with_sums: bool) -> PieceSum:
        """Arrays of a stretch of a pass less the work that covers them, by batch."""
        places = self.assignment.analysis.positions
        count = len(places.classes)
        done, early, late = stretch.slices(count)
        covering = np.zeros(count)
        covering[done] += places.roles[stretch.role][done]
        tail = stretch.role is Role.BACKWARD and stretch.last >= count
        if self.whole and tail:
            covering += places.update
        moved: list[Pieces] = []
        sent = [(i, p) for i, p in self.priced if i.collective is not None]
        for (item, pieces), slot in zip(sent, self.placed.slots, strict=True):
            made = item.collective
            if slot is None or made is None or slot.key[0] is not stretch.role:
                continue
            within = late if slot.sums else early
            held = within.start <= made.ready < within.stop
            if held and self._counts(item, with_sums):
                moved.append(pieces)
        return self._less_work(moved, covering)
