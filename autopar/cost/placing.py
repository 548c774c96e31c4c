"""Where the messages of a planned step may run, and beside which work.

The parts of a step are its passes, and within them the bodies of loops that
communicate: a compiler's scheduler sees one body at a time, so that what begins in it
ends in it, and nothing from outside runs beside it. A loop that sends nothing is work
like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost.combining import SUMS
from autopar.cost.parts import Cut, Key, Part
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment
from autopar.steps.positions import PASSES
from autopar_passes.graph.roles import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where the message of one collective runs.

    Attributes:
      key: the part.
      sums: whether it may start behind its position; else it must end before it.
      position: of the operator that decides when: of the arrays of a message of sums,
        the last that is complete, by `Analysis.ranks`; of one of gathers, the first
        that is read, in program order.
    """

    key: Key
    sums: bool
    position: int

    def within(self, cut: Cut) -> bool:
        """Whether the message is one of a stretch of its part."""
        first, last = cut.moved
        return self.sums is not cut.gathers and first <= self.position < last


@dataclasses.dataclass(frozen=True, eq=False)
class Placing:
    """The parts of a planned step, whatever its seconds are.

    Attributes:
      assignment: strategies as layouts.
      slots: of each collective; None: something waits for it, or the update sends it.
      inside: of each part, whether the work of each operator runs in it.
      needs: of each operator of the update, the last rank of a message of sums
        that it needs, -1: none; the number of operators for operators elsewhere.
    """

    assignment: Assignment
    slots: tuple[Slot | None, ...]
    inside: Mapping[Key, np.ndarray]
    needs: np.ndarray

    def parts(self, work: np.ndarray, seconds: Sequence[float]) -> list[Part]:
        """The parts that communicate.

        Args:
          work: seconds of each operator.
          seconds: of each collective.
        """
        count = len(work)
        moved = {key: (np.zeros(count), np.zeros(count)) for key in self.inside}
        for slot, own in zip(self.slots, seconds, strict=True):
            if slot is not None:
                moved[slot.key][slot.sums][slot.position] += own
        places = self.assignment.analysis.positions
        after = np.where(places.update, work, 0.0)
        order = np.argsort(self.assignment.analysis.ranks)
        return [
            Part(
                key=key,
                work=(own := np.where(inside, work, 0.0)),
                late_work=own[order],
                gathers=moved[key][0],
                sums=moved[key][1],
                update=after if self.follows(key) else np.zeros(count),
                needs=self.needs,
            )
            for key, inside in self.inside.items()
        ]

    def covering(self, key: Key, cut: Cut) -> np.ndarray:
        """Whether the work of each operator covers messages of a stretch of a part."""
        analysis = self.assignment.analysis
        count = len(self.needs)
        at = np.arange(count) if cut.gathers else analysis.ranks
        first, last = cut.work
        own = self.inside[key] & (at >= first) & (at < last)
        if self.follows(key):
            own = own | (analysis.positions.update & (self.needs < cut.needs))
        return own.astype(float)

    def follows(self, key: Key) -> bool:
        """Whether the update follows a part."""
        return key == (Role.BACKWARD, len(self.assignment.graph.operators))


def placing(assignment: Assignment, collectives: Sequence[Collective]) -> Placing:
    """Finds the parts of a planned step.

    Args:
      assignment: strategies as layouts.
      collectives: those of one step, with their messages.
    """
    slots = tuple(_slots(assignment, collectives))
    return Placing(
        assignment,
        slots,
        _inside(assignment, collectives, slots),
        _needs(assignment, collectives, slots),
    )


def _slots(
    assignment: Assignment, collectives: Sequence[Collective]
) -> list[Slot | None]:
    """The slot of each collective: a message has one in each pass."""
    found = [_own_slot(assignment, c) for c in collectives]
    decides: dict[tuple[int, Key, bool], int] = {}
    for c, slot in zip(collectives, found, strict=True):
        if slot is not None and c.message >= 0:
            key = c.message, slot.key, slot.sums
            known = decides.get(key, slot.position)
            better = max if slot.sums else min
            decides[key] = better(known, slot.position)
    return [
        slot
        if slot is None or c.message < 0
        else Slot(slot.key, slot.sums, decides[c.message, slot.key, slot.sums])
        for c, slot in zip(collectives, found, strict=True)
    ]


def _own_slot(assignment: Assignment, c: Collective) -> Slot | None:
    """The slot that a collective would have alone."""
    if c.place is None:
        return None
    places = assignment.analysis.positions
    sums = c.step.kind in SUMS
    within = places.summed if sums else places.roles
    role = next((r for r in PASSES if within[r][c.ready]), None)
    if role is None:
        return None
    ready = int(assignment.analysis.ranks[c.ready]) if sums else c.ready
    return Slot((role, c.place[0]), sums, ready)


def _inside(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
) -> dict[Key, np.ndarray]:
    """The operators of each part that has a message."""
    known = assignment.independent
    places = assignment.analysis.positions
    whole = len(assignment.graph.operators)
    busy = {whole}
    for c in collectives:
        busy.add(c.place[0] if c.place else known.computations[c.operator])
    around = dict(zip(known.computations, known.outside, strict=True))

    def part_of(computation: int) -> int:
        while computation not in busy:
            computation = around.get(computation, whole)
        return computation

    parts = {computation: part_of(computation) for computation in around}
    own = np.array([parts[computation] for computation in known.computations])
    keys = dict.fromkeys(slot.key for slot in slots if slot is not None)
    return {key: places.roles[key[0]] & (own == key[1]) for key in keys}


def _needs(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
) -> np.ndarray:
    """The last message of sums that each operator of the update needs."""
    count = len(assignment.graph.operators)
    needs = [count] * count
    last: dict[int, int] = {}
    for c, slot in zip(collectives, slots, strict=True):
        if slot is not None and slot.sums:
            last[c.value] = max(last.get(c.value, -1), slot.position)
    for op in assignment.analysis.followers:
        latest = max([last[v] for v in op.inputs if v in last], default=-1)
        if latest >= 0:
            for value in op.outputs:
                last[value] = max(last.get(value, -1), latest)
        if op.role is Role.UPDATE:
            needs[op.index] = latest
    return np.array(needs)
