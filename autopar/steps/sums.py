"""The sums over devices that a step needs, and the sums that a codec may compress.

The results of this module do not depend on a cluster or a layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.steps.nodes import Contraction
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.sums.stacked import Deferral, Reassociation

# Gradients with fewer elements and gradients of vectors are sent uncompressed. They
# have a very small part of the bytes, and compression harms norms and biases most
# (PowerSGD, arXiv 1905.13727, and CGX, arXiv 2111.08617, do the same).
SMALLEST = 1024


def worth_a_codec(shape: Sequence[int]) -> bool:
    """Whether a gradient is large enough to be compressed, and is not a vector."""
    return sum(size > 1 for size in shape) > 1 and math.prod(shape) >= SMALLEST


def times_due(graph: OperatorGraph, maker: Operator, value: int) -> float:
    """Returns the number of times per step that a value is summed over devices.

    A value that a loop stacks is summed once, after the loop. A value that accumulates
    over microbatches is summed once, after the last microbatch.
    """
    trips = maker.trips
    if value in graph.accumulated:
        trips /= graph.microbatches
    if maker.kind == "stack_step":
        # If replicas divide the microbatches, a loop runs less often than its stack has
        # entries.
        trips = max(1.0, trips / graph.values[maker.outputs[0]].shape[0])
    return trips


# Class -> the bytes of each of its sums over devices, and how often per step each is
# computed.
Sums = dict[int, list[tuple[int, float]]]


def sums_due(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> Sums:
    """Returns the sums that complete the partial results of each class of operators.

    A deferral delays the sum over devices of a partial result to the end of a path,
    where other partial results have been added. The cost of this sum is divided equally
    among the operators that contribute to it.
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
    """The sums over devices that may be combined, because their results are added.

    Attributes:
      summed: value whose sum over devices may be a combined one -> the results of
        contractions that are added up to it. A result of a contraction maps to itself.
      count: result of a contraction -> the largest number of results that may share its
        sum, including this result.
      additions: pairs of the operator and the result of each addition, in program
        order.
    """

    summed: Mapping[int, tuple[int, ...]]
    count: Mapping[int, int]
    additions: tuple[tuple[int, int], ...] = ()


def find_shared_sums(
    graph: OperatorGraph, reassociations: Sequence[Reassociation]
) -> SharedSums:
    """Returns the sums over devices that may be combined.

    Args:
      graph: the operators.
      reassociations: the additions of two sums over devices, in program order.
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
    """Returns, for each class, the fraction of a shared sum charged to an operator.

    Classes without a shared sum are left out. All operators of a class are charged the
    mean fraction of the class.

    Args:
      graph: the operators.
      known: the sums that may be combined.
    """
    by_class: dict[int, list[float]] = {}
    for op in graph.operators:
        share = 1.0 / known.count.get(op.outputs[0], 1) if op.outputs else 1.0
        by_class.setdefault(op.class_index, []).append(share)
    means = {c: sum(found) / len(found) for c, found in by_class.items()}
    return {c: mean for c, mean in means.items() if mean < 1.0}


# Class of an operator that computes a partial result, and class of an operator on the
# path of this result -> the number of runs of the second operator.
PartialRuns = dict[tuple[int, int], float]


def partial_runs(
    graph: OperatorGraph,
    contraction: Contraction,
    deferrals: Sequence[Deferral],
    trips: Mapping[int, float],
) -> PartialRuns:
    """Returns how often operators run on partial values whose sum waits in loops.

    The sum over devices of such a value is computed after the loop. Until then, each
    device runs the operators on the path of the value on its own partial value. These
    runs are divided equally among the operators that contribute to the value. The first
    operator of a class stands for the class.

    Args:
      graph: the operators.
      contraction: gives the operator that computes each value.
      deferrals: the paths of partial values.
      trips: class -> the number of runs of its operators.
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


# Class -> for each gradient that it contributes to, its shape and how often per step a
# gradient of this shape is summed over devices.
CodedSums = dict[int, list[tuple[tuple[int, ...], float]]]


def coded_sums(
    graph: OperatorGraph, contraction: Contraction, deferrals: Sequence[Deferral]
) -> CodedSums:
    """Returns the gradients to which each class of operators contributes.

    A class is included only if all its operators contribute to gradients that
    `worth_a_codec` accepts.
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
