"""The positions of operators: the pass of each, and where sums are complete."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.sums.stacked import Deferral

# The passes in which communication may run beside work; the update is none.
PASSES = (Role.FORWARD, Role.BACKWARD)
# Each of them is cut into segments at these parts of its operators. What is read first
# or made last has next to no work to hide behind.
_CUTS = (1 / 256, 1 / 32, 1 / 8, 1 / 2, 7 / 8, 31 / 32, 255 / 256)
SEGMENTS = len(_CUTS) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Facts of a program's operators, by position.

    Attributes:
      classes: class of each.
      shares: its part of the runs of its class.
      roles: of each pass, whether it belongs there.
      update: whether it belongs to the update.
      summed: of each pass, whether a sum that it completes is taken there.
      ready: where the sums that each contributes to are complete.
    """

    classes: np.ndarray
    shares: np.ndarray
    roles: Mapping[Role, np.ndarray]
    update: np.ndarray
    summed: Mapping[Role, np.ndarray]
    ready: np.ndarray

    @functools.cached_property
    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """The segment of each operator in the forward and in the backward pass.

        An operator of another pass is in the segment of the nearest before it.
        """
        found: list[np.ndarray] = []
        for role in PASSES:
            number = np.cumsum(self.roles[role]) - 1
            cuts = np.array(_CUTS) * self.roles[role].sum()
            found.append(np.searchsorted(cuts, number, side="right"))
        return found[0], found[1]

    def by_segment(self, number: int, seconds: np.ndarray) -> np.ndarray:
        """Seconds of operators of a pass, by its segments.

        Args:
          number: of the pass in `PASSES`.
          seconds: float64 ``[operators]``.
        """
        return np.bincount(self.segments[number], seconds, SEGMENTS)

    @functools.cached_property
    def work_parts(self) -> np.ndarray:
        """The parts of each class's runs in each segment of both passes and the update.

        Returns:
          float64 ``[classes, 2 * SEGMENTS + 1]``; what is in neither is missing.
        """
        found = np.zeros((len(self.classes), 2 * SEGMENTS + 1))
        for number, role in enumerate(PASSES):
            own = self.roles[role]
            at = self.segments[number][own] + number * SEGMENTS
            np.add.at(found, (self.classes[own], at), self.shares[own])
        np.add.at(found[:, -1], self.classes[self.update], self.shares[self.update])
        return found

    @functools.cached_property
    def sum_parts(self) -> np.ndarray:
        """The parts of each class's sums that are complete in each backward segment.

        Returns:
          float64 ``[classes, SEGMENTS]``.
        """
        found = np.zeros((len(self.classes), SEGMENTS))
        at = self.segments[1][self.ready]
        np.add.at(found, (self.classes, at), self.shares)
        return found

    def gather_parts(self, readers: Sequence[int]) -> np.ndarray:
        """The parts of gathers, one before each reader, in each segment of both passes.

        Returns:
          float64 ``[2 * SEGMENTS]``; what is in neither is missing.
        """
        found = np.zeros(2 * SEGMENTS)
        for number, role in enumerate(PASSES):
            own = [r for r in readers if self.roles[role][r]]
            np.add.at(found, self.segments[number][own] + number * SEGMENTS, 1.0)
        return found / max(1, len(readers))


def positions(
    graph: OperatorGraph,
    contraction: Contraction,
    deferrals: Sequence[Deferral],
    trips: Mapping[int, float],
) -> Positions:
    """Finds the positions of a program's operators.

    Args:
      graph: the operator graph.
      contraction: its nodes.
      deferrals: the paths along which sums may stay partial.
      trips: how often the operators of each class run in a step.
    """
    operators = graph.operators
    classes = np.array(
        [o.class_index if o.class_index >= 0 else o.index for o in operators], int
    )
    shares = np.array(
        [
            o.trips / total if (total := trips.get(int(c), 0.0)) else 0.0
            for o, c in zip(operators, classes, strict=True)
        ]
    )
    roles = {
        role: np.array([o.role is role for o in operators], bool) for role in PASSES
    }
    # Sums that a forward pass completes are those of reported values, its loss.
    everywhere = np.ones(len(operators), bool)
    summed = {Role.FORWARD: ~everywhere, Role.BACKWARD: everywhere}
    ready = np.arange(len(operators))
    # Sums wait where they leave a loop so; others are taken where they are made.
    for deferral in (d for d in deferrals if d.hoisted):
        for op, ends in deferral.reach:
            made = [contraction.producer[end].index for end in ends]
            ready[op] = max((op, *made))
    update = np.array([o.role is Role.UPDATE for o in operators], bool)
    return Positions(classes, shares, roles, update, summed, ready)


def followers(graph: OperatorGraph, summing: Collection[int]) -> tuple[Operator, ...]:
    """The operators of the update, and those that make and finish sums for it.

    Args:
      graph: the operator graph.
      summing: classes of operators whose partial results are such sums.
    """
    behind: set[int] = set()
    found: list[Operator] = []
    for op in graph.operators:
        follows = not behind.isdisjoint(op.inputs)
        if follows or op.class_index in summing:
            behind.update(op.outputs)
        if follows or op.role is Role.UPDATE or op.class_index in summing:
            found.append(op)
    return tuple(found)


def behind(among: Iterable[Operator], late: Collection[int]) -> list[int]:
    """The operators of the backward pass that read what late ones make.

    Args:
      among: the operators to look at, in program order.
      late: operators that run late.
    """
    made: set[int] = set()
    found: list[int] = []
    for op in among:
        if op.index in late or not made.isdisjoint(op.inputs):
            made.update(op.outputs)
            if op.index not in late and op.role is Role.BACKWARD:
                found.append(op.index)
    return found
