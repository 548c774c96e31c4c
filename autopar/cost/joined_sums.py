"""When sums of gradients travel that a compiler joins into one message.

A combiner makes one message of the sums over the same devices, of one element type and
in one computation (`autopar.cost.combining`). It is sent when the last of them is
there. The others wait, whole as their makers left them; then the results wait for
their updates, which run one after the other. So at the message all of it is there
twice. Compilers that hide messages limit their size; XLA's for CPUs does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.cost.combining import SUMS
from autopar.layouts.assignment import Assignment
from autopar.steps.lifetimes import Lifetimes
from autopar_passes.graph.operators import Operator

# Mesh axes, computation and element type: such sums share a message.
_Alike = tuple[tuple[int, ...], int, str]


def sending_times(
    assignment: Assignment, life: Lifetimes, among: Sequence[Operator]
) -> Mapping[int, int]:
    """When the message runs that carries the sum of a gradient, by the gradient.

    Args:
      assignment: strategies as layouts.
      life: when values are made; says how many sums travel together.
      among: the operators that count.
    """
    if not life.joined_sums:
        return {}
    alike: dict[_Alike, list[tuple[int, int]]] = {}
    for op in among:
        for value, axes in _sums_for_update(assignment, op):
            where = assignment.independent.computations[op.index]
            key = axes, where, str(assignment.graph.values[value].dtype)
            alike.setdefault(key, []).append((life.time[op.index], value))
    out: dict[int, int] = {}
    for sums in alike.values():
        for first in range(0, len(sums), life.joined_sums):
            together = sums[first : first + life.joined_sums]
            sent = max(time for time, _ in together)
            out.update((value, sent) for _, value in together)
    return out


def _sums_for_update(
    assignment: Assignment, op: Operator
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The results of an operator that only the update reads and devices sum up."""
    if op.kind == "return" or op.class_index not in assignment.independent.summing:
        return
    if op.class_index not in assignment.contraction.node_of:
        return
    for slot, value in enumerate(op.outputs):
        steps = assignment.result_steps(op, slot)
        axes = next((s.axes for s in steps if s.kind in SUMS), None)
        if axes is not None:
            yield value, axes
