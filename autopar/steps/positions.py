"""The pass of each operator, and where its sums over devices are complete."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.sums.stacked import Deferral

# The passes in which communication may overlap with computation; not the update.
PASSES = (Role.FORWARD, Role.BACKWARD)
# At these fractions of the number of a pass's operators, the pass is divided into
# segments. Segments are short at both ends of a pass, because communication before the
# first or after the last operators has almost no computation to overlap with.
_CUTS = (1 / 256, 1 / 32, 1 / 8, 1 / 2, 7 / 8, 31 / 32, 255 / 256)
SEGMENTS = len(_CUTS) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Properties of a program's operators, as arrays by position of the operator.

    Attributes:
      classes: the class of each operator.
      shares: for each operator, its runs divided by all runs of its class.
      roles: for each pass, whether each operator belongs to it.
      update: whether each operator belongs to the update.
      summed: for each pass, whether the sum over devices that completes the result of
        each operator runs in that pass.
      ready: for each operator, the position of the operator after which all sums over
        devices that it contributes to can be computed.
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

        An operator of another pass has the segment of the nearest earlier operator of
        this pass.
        """
        found: list[np.ndarray] = []
        for role in PASSES:
            number = np.cumsum(self.roles[role]) - 1
            cuts = np.array(_CUTS) * self.roles[role].sum()
            found.append(np.searchsorted(cuts, number, side="right"))
        return found[0], found[1]

    def by_segment(self, number: int, seconds: np.ndarray) -> np.ndarray:
        """Adds up the seconds of operators in each segment of a pass.

        Args:
          number: the position of the pass in `PASSES`.
          seconds: float64 ``[operators]``, the seconds of each operator.
        """
        return np.bincount(self.segments[number], seconds, SEGMENTS)

    @functools.cached_property
    def work_parts(self) -> np.ndarray:
        """The fraction of each class's runs in each segment of both passes, and in the
        update.

        Returns:
          float64 ``[classes, 2 * SEGMENTS + 1]``. Runs of operators that are in no pass
          do not count.
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
        """The fraction of each class's sums that can run in each backward segment.

        Returns:
          float64 ``[classes, SEGMENTS]``.
        """
        found = np.zeros((len(self.classes), SEGMENTS))
        at = self.segments[1][self.ready]
        np.add.at(found, (self.classes, at), self.shares)
        return found

    def gather_parts(self, readers: Sequence[int]) -> np.ndarray:
        """The fraction of gathers in each segment of the forward and backward pass.

        There is one gather for each reader.

        Returns:
          float64 ``[2 * SEGMENTS]``. Readers that are in neither pass do not count.
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
      contraction: the nodes of the graph.
      deferrals: the paths along which sums may stay partial.
      trips: class -> the number of runs of its operators in a step.
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
    # The forward pass only completes sums of reported values, such as the loss.
    everywhere = np.ones(len(operators), bool)
    summed = {Role.FORWARD: ~everywhere, Role.BACKWARD: everywhere}
    ready = np.arange(len(operators))
    # A deferred sum is complete after its loop. Any other sum is computed right after
    # the operator.
    for deferral in (d for d in deferrals if d.hoisted):
        for op, ends in deferral.reach:
            made = [contraction.producer[end].index for end in ends]
            ready[op] = max((op, *made))
    update = np.array([o.role is Role.UPDATE for o in operators], bool)
    return Positions(classes, shares, roles, update, summed, ready)


def followers(graph: OperatorGraph, summing: Collection[int]) -> tuple[Operator, ...]:
    """Returns the update, and the operators for which only the update waits.

    Args:
      graph: the operator graph.
      summing: classes of operators whose partial results are sums that only the update
        waits for.
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
    """Returns operators of the backward pass that depend on results of late operators.

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
