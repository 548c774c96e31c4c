"""The sums over devices that a step needs, and when a codec may take them.

Nothing here depends on a cluster or a layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.sums.reassociated import Reassociation
from autopar_passes.sums.stacked import Deferral

# Gradients with fewer elements, and those of vectors, are sent as they are: they
# make up next to nothing of the bytes, and norms and biases suffer most (PowerSGD,
# arXiv 1905.13727, and CGX, arXiv 2111.08617, do the same).
SMALLEST = 1024


def worth_a_codec(shape: Sequence[int]) -> bool:
    """Whether a gradient is large enough to be compressed, and no vector."""
    return sum(size > 1 for size in shape) > 1 and math.prod(shape) >= SMALLEST


def times_due(graph: OperatorGraph, maker: Operator, value: int) -> float:
    """The number of times the sum of a value is taken.

    A stacked sum is taken after its loop, and one that microbatches add to after the
    last of them.
    """
    trips = maker.trips
    if value in graph.accumulated:
        trips /= graph.microbatches
    if maker.kind == "stack_step":
        trips /= graph.values[maker.outputs[0]].shape[0]
    return trips


# Of each class: bytes of a sum over devices, and how often it is taken in a step.
Sums = dict[int, list[tuple[int, float]]]


def sums_due(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> Sums:
    """Returns the sums that finish the results of each class of operators.

    A result whose sum waits is summed where its way ends, together with what meets
    it there, so each contribution carries its part.
    """
    waiting = {
        op: (deferral, ends) for deferral in deferrals for op, ends in deferral.reach
    }
    out: Sums = {}
    for op in graph.operators:
        sums: dict[int, float] = {}
        if op.index in waiting:
            deferral, ends = waiting[op.index]
            for end in ends:
                times = times_due(graph, contraction.producer[end], end)
                nbytes = graph.values[end].nbytes
                sums[nbytes] = sums.get(nbytes, 0.0) + times / deferral.sharing(end)
        elif op.outputs:
            sums[graph.values[op.outputs[0]].nbytes] = op.trips
        known = out.setdefault(op.class_index, [])
        known.extend(sums.items())
    return {c: _added_up(sums) for c, sums in out.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSums:
    """The sums over devices that may be one sum, where they are added up.

    Attributes:
      summed: of each value that may be such a sum, the results of contractions that it
        adds up; of such a result itself.
      count: of each such result, how many at most may be summed together with it, it
        among them.
      additions: the operator and the result of each addition, in program order.
    """

    summed: Mapping[int, tuple[int, ...]]
    count: Mapping[int, int]
    additions: tuple[tuple[int, int], ...] = ()


def find_shared_sums(
    graph: OperatorGraph, reassociations: Sequence[Reassociation]
) -> SharedSums:
    """Returns the sums that may be one.

    Args:
      graph: the operators.
      reassociations: the additions of two sums, in program order.
    """
    summed: dict[int, tuple[int, ...]] = {}
    count: dict[int, int] = {}
    additions: list[tuple[int, int]] = []
    for found in reassociations:
        (made,) = graph.operators[found.operator].outputs
        for v in found.summed:
            summed.setdefault(v, (v,))
        one, other = (summed[v] for v in found.summed)
        summed[made] = one + other
        count.update(dict.fromkeys(summed[made], len(summed[made])))
        additions.append((found.operator, made))
    return SharedSums(summed, count, tuple(additions))


def shares(graph: OperatorGraph, known: SharedSums) -> dict[int, float]:
    """Returns the part of a sum that each operator of a class pays, if it is shared.

    Classes that share none are left out. Operators of one class pay alike.

    Args:
      graph: the operators.
      known: the sums that may be one.
    """
    by_class: dict[int, list[float]] = {}
    for op in graph.operators:
        share = 1.0 / known.count.get(op.outputs[0], 1) if op.outputs else 1.0
        by_class.setdefault(op.class_index, []).append(share)
    means = {c: sum(found) / len(found) for c, found in by_class.items()}
    return {c: mean for c, mean in means.items() if mean < 1.0}


# Classes of a contribution and of an operator behind it -> how often the second runs.
PartialRuns = dict[tuple[int, int], float]


def partial_runs(
    graph: OperatorGraph,
    contraction: Contraction,
    deferrals: Sequence[Deferral],
    trips: Mapping[int, float],
) -> PartialRuns:
    """Returns how often operators work on partial values that wait in loops.

    What adds to a value that waits, or hands it on, does so on every device with the
    device's own part of the sum. Its runs are dealt out to the contributions. The
    first operator of a class stands for it.

    Args:
      graph: the operators.
      contraction: which of them make the values.
      deferrals: the paths of partial values.
      trips: how often the operators of each class run.
    """
    out: PartialRuns = {}
    for deferral in deferrals:
        if not deferral.hoisted:
            continue
        contributions = [graph.operators[c] for c in deferral.contributions]
        behind = {contraction.producer[v].index for v in deferral.members}
        for index in sorted(behind.difference(deferral.contributions)):
            op = graph.operators[index]
            if op.class_index != op.index:
                continue
            for maker in contributions:
                key = maker.class_index, op.class_index
                share = trips[op.class_index] / len(contributions)
                out[key] = out.get(key, 0.0) + share
    return out


# Of each class: shape of a gradient, and how many of it are summed in a step.
CodedSums = dict[int, list[tuple[tuple[int, ...], float]]]


def coded_sums(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> CodedSums:
    """Returns the gradients that classes of operators contribute to.

    A class is left out where not all of its operators make gradients that are
    worth a codec.
    """
    made: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    ends_of = {op: (d, ends) for d in deferrals for op, ends in d.reach}
    plain: set[int] = set()
    for op in graph.operators:
        deferral, ends = ends_of.get(op.index, (None, ()))
        if deferral is None or not all(
            e in deferral.gradients and worth_a_codec(graph.values[e].shape)
            for e in ends
        ):
            plain.add(op.class_index)
            continue
        own = graph.values[op.outputs[0]]
        for end in ends:
            value = graph.values[end]
            shape = own.shape if value.size == own.size else value.shape
            times = times_due(graph, contraction.producer[end], end)
            found = made.setdefault(op.class_index, [])
            found.append((shape, times / deferral.sharing(end)))
    return {c: rows for c, rows in made.items() if c not in plain}


def _added_up(sums: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    total: dict[int, float] = {}
    for nbytes, weight in sums:
        total[nbytes] = total.get(nbytes, 0.0) + weight
    return sorted(total.items())
