"""Hidden communication of a planned step as a function of its batch.

What is exposed of a pass is a maximum over stretches (`autopar.cost.overlap`). Those
that decide at some batch are kept, each with its communication less its work as a
piecewise polynomial of the batch; their maximum at a batch is what a query needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cost.combining import SUMS
from autopar.cost.items import CostItem, Paid, timelines
from autopar.cost.overlap import Stretch
from autopar.cost.pieces import Pieces, PieceSum, added, value_at
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.steps.positions import PASSES

# Batches, over the planned one, at which stretches that decide are looked for.
_BATCHES = (1 / 64, 1 / 8, 1 / 2, 1.0, 2.0, 8.0, 64.0)

Priced = Sequence[tuple[CostItem, Pieces]]


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenCurve:
    """Seconds that a step saves because communication runs beside work.

    Attributes:
      contention: seconds of work lost for each second that is hidden.
      gathers: seconds of what is gathered for a microbatch and may be hidden.
      sums: the same of what is summed once in a step.
      first: for each pass, the stretches of a microbatch without sums: what they
        expose.
      last: the same of the last microbatch, which has the sums.
    """

    contention: float
    gathers: PieceSum
    sums: PieceSum
    first: tuple[tuple[PieceSum, ...], ...]
    last: tuple[tuple[PieceSum, ...], ...]

    def saved_s(self, batch: float, accumulation: int) -> float:
        """Seconds that a step saves.

        Args:
          batch: of a microbatch, over the planned one.
          accumulation: number of microbatches.
        """
        gathers = self.gathers(batch)
        hidden = gathers + self.sums(batch) - _exposed_s(self.last, batch)
        if accumulation > 1:
            each = gathers - _exposed_s(self.first, batch)
            hidden += (accumulation - 1) * each
        return (1.0 - self.contention) * hidden


def _exposed_s(passes: Sequence[Sequence[PieceSum]], batch: float) -> float:
    out = 0.0
    for stretches in passes:
        most = 0.0
        for excess in stretches:
            most = max(most, excess(batch))
        out += most
    return out


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
    places = _Places(assignment, priced)
    share = known.overlap
    hideable = [(i, p) for i, p in priced if _may_hide(assignment, i)]
    first = places.deciding(share, with_sums=False)
    last = places.deciding(share, with_sums=True)
    return HiddenCurve(
        known.contention,
        added(p for i, p in hideable if i.paid is Paid.MICROBATCH),
        added(p for i, p in hideable if i.paid is not Paid.MICROBATCH),
        tuple(
            tuple(places.excess(s, share, with_sums=False) for s in found)
            for found in first
        ),
        tuple(
            tuple(places.excess(s, share, with_sums=True) for s in found)
            for found in last
        ),
    )


def _may_hide(assignment: Assignment, item: CostItem) -> bool:
    """Whether an item is in a timeline of a pass: not what the update gathers."""
    made = item.collective
    if made is None or made.place is None:
        return False
    roles = assignment.analysis.positions.roles
    return made.step.kind in SUMS or any(roles[r][made.ready] for r in PASSES)


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """The items of a step with their positions."""

    assignment: Assignment
    priced: Priced

    def deciding(self, share: float, *, with_sums: bool) -> list[tuple[Stretch, ...]]:
        """For each pass, the stretches that decide at one of `_BATCHES`."""
        found = [
            t.tightest(share)
            for batch in _BATCHES
            for t in timelines(self.assignment, self._at(batch, with_sums))
        ]
        return [
            tuple(dict.fromkeys(s for s in found if s.role is role)) for role in PASSES
        ]

    def _at(self, batch: float, with_sums: bool) -> list[tuple[CostItem, float]]:
        return [
            (item, value_at(pieces.at(batch), batch))
            for item, pieces in self.priced
            if with_sums or item.work is not None or item.paid is Paid.MICROBATCH
        ]

    def excess(self, stretch: Stretch, share: float, *, with_sums: bool) -> PieceSum:
        """Communication of a stretch less the work that covers it, by batch."""
        places = self.assignment.analysis.positions
        count = len(places.classes)
        done, early, late = stretch.slices(count)
        shares = np.zeros(count)
        inside = places.roles[stretch.role][done]
        np.add.at(shares, places.classes[done], places.shares[done] * inside)
        terms: list[Pieces] = []
        for item, pieces in self.priced:
            if item.work is not None:
                if shares[item.operator]:
                    terms.append(pieces.scaled(-share * shares[item.operator]))
            elif item.collective is not None and _may_hide(self.assignment, item):
                ready = item.collective.ready
                if item.collective.step.kind in SUMS:
                    own, within = places.summed, late
                    counts = with_sums or item.paid is Paid.MICROBATCH
                else:
                    own, within, counts = places.roles, early, True
                held = within.start <= ready < within.stop
                if counts and held and own[stretch.role][ready]:
                    terms.append(pieces)
        return added(terms)
