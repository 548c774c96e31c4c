"""The positions of operators: the pass of each, and where sums are complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role
from autopar_passes.sums.deferral import Deferral

# The passes in which communication may run beside work; the update is none.
PASSES = (Role.FORWARD, Role.BACKWARD)


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

    def of_classes(self, values: np.ndarray) -> np.ndarray:
        """The mean of each class, weighed by runs."""
        return np.bincount(
            self.classes, weights=values * self.shares, minlength=len(values)
        )


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
