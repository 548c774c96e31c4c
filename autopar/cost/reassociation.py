"""All-reduces that the compiler merges into one because their results are added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar.cost.combining import SUMS
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective, traffic
from autopar.layouts.assignment import Assignment
from autopar_passes.sums.reassociated import Reassociation


def compiled_traffic(
    assignment: Assignment,
    pricer: Pricer,
    only: Sequence[int] | None = None,
    *,
    rounds: bool | None = None,
) -> list[Collective]:
    """Lists the collectives of one step after the compiler's merges, in program order.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      only: the operators whose collectives are listed, in program order; None for all
        operators.
      rounds: whether values that only products read are sent in bfloat16; None to do as
        the device's compiler does.
    """
    if rounds is None:
        rounds = pricer.cluster.device.rounds_operands
    found = traffic(assignment, only, rounds=rounds)
    return reassociate_sums(assignment, found) if pricer.reassociates else found


def reassociate_sums(
    assignment: Assignment, collectives: Iterable[Collective]
) -> list[Collective]:
    """Merges equal all-reduces whose results are added into one after the addition.

    See `autopar_passes.sums.reassociated`. No resharding may lie between the sums and
    the addition, because the compiler merges only adjacent collectives. If each sum
    consists of several collectives, only the last ones may be equal and merged.

    Args:
      assignment: strategies as layouts.
      collectives: the collectives of one step of the assignment.
    """
    sums: dict[int, list[Collective]] = {}
    out: list[Collective] = []
    for c in collectives:
        made = assignment.contraction.producer[c.value].index == c.operator
        held = made and c.value not in assignment.stackings
        (sums.setdefault(c.value, []) if held else out).append(c)
    for found in assignment.analysis.reassociations:
        one, other = (sums.get(v, []) for v in found.summed)
        count = _alike(one, other)
        if count and _stays(assignment, found):
            (value,) = assignment.graph.operators[found.operator].outputs
            sums[value] = [
                dataclasses.replace(c, value=value, ready=found.operator)
                for c in other[-count:]
            ]
            del one[-count:], other[-count:]
    out.extend(c for kept in sums.values() for c in kept)
    return sorted(out, key=lambda c: c.operator)


def _alike(one: Sequence[Collective], other: Sequence[Collective]) -> int:
    """How many of the last collectives are equal sums: same devices, same bytes.

    The number is 0 if either sequence has a collective other than a sum.
    """
    if any(c.step.kind not in SUMS for c in (*one, *other)):
        return 0
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        kinds = [(c.step.kind, c.step.axes, c.size, c.trips, c.place) for c in (a, b)]
        if kinds[0] != kinds[1]:
            break
        count += 1
    return count


def _stays(assignment: Assignment, found: Reassociation) -> bool:
    """Whether no resharding lies between the sums and their addition.

    Slices are allowed, because a slice becomes part of its sum
    (`autopar.cost.traffic.scatter_sum`).
    """
    if not assignment.stackings.keys().isdisjoint(found.between):
        return False
    made_by, read = assignment.contraction.producer, assignment.analysis.readings.of
    between = {made_by[v].index for v in found.between}
    summed = {made_by[v].index for v in found.summed}
    return all(
        step.kind == "slice"
        for operator in (between - summed) | {found.operator}
        for reading in read[operator]
        for steps, _ in assignment.ways[reading.group]
        for step in steps
    )
