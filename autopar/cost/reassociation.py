"""Sums of activations that the compiler takes in one, where they are added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar.cost.combining import SUMS
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective, traffic
from autopar.layouts.assignment import Assignment, Way
from autopar.layouts.layout import Axes, Layout, ReshardStep
from autopar_passes.sums.reassociated import Reassociation

# Sums of which only a slice is read behind a change of shape.
#
# Where readers keep a slice of a sum, the program takes the sum so
# (`autopar.cost.traffic.scatter_sum`). Where a transposition stands between, a plan may
# state the whole sum, and XLA's GPU compiler makes less of it:
#
# * A sum over all devices, of which one reader keeps a slice over some of them, becomes
# a   sum over these and one of the slices over the others, if another sum goes over the
# same devices as one of the two. So the second may be taken with others
# (``xla/service/gpu/transforms/all_reduce_splitter.cc`` in openxla/xla).
# * A sum becomes a reduce-scatter where the slice is over the same devices, in their
#   order, and nothing else splits the array (``reduce_scatter_creator.cc`` beside it).
#
# In between, it takes sums that are added up in one (`autopar.cost.reassociation`).


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """What readers keep of a sum.

    Attributes:
      axes: mesh axes that split the one dimension that is cut, in their order there.
      once: whether there is one reader.
    """

    axes: Axes
    once: bool


def split_sums(
    assignment: Assignment, collectives: Sequence[Collective]
) -> tuple[list[Collective], frozenset[int]]:
    """Splits sums over all devices where the compiler does.

    Args:
      assignment: strategies as layouts.
      collectives: of one step of it.

    Returns:
      The collectives, and the values whose first sum becomes a reduce-scatter after
      sums are joined.
    """
    every = tuple(a for a, size in enumerate(assignment.sizes) if size > 1)
    whole = _whole_sums(assignment, collectives)
    candidates = {v for v, c in whole.items() if c.step.axes == every}
    if len(every) < 2 or not candidates:
        return list(collectives), frozenset()
    groups = _groups(assignment, collectives)
    out: list[Collective] = []
    late: set[int] = set()
    for c in collectives:
        kept = _slice(assignment, c.value) if c.value in candidates else None
        if kept and kept.once and _splits(assignment, c, kept, groups):
            out += _parts(assignment, c, kept.axes)
            late.add(c.value)
        else:
            out.append(c)
    return out, frozenset(late)


def scattered_sums(
    assignment: Assignment, collectives: Sequence[Collective]
) -> list[Collective]:
    """Makes reduce-scatters of sums where the compiler does.

    Args:
      assignment: strategies as layouts.
      collectives: of one step of it, those joined that are added up.
    """
    whole = _whole_sums(assignment, collectives)
    out: list[Collective] = []
    for c in collectives:
        kept = _kept_slice(assignment, c.value) if whole.get(c.value) is c else None
        if kept is not None and kept.axes == c.step.axes:
            step = dataclasses.replace(c.step, kind="reduce_scatter")
            c = dataclasses.replace(c, step=step)
        out.append(c)
    return out


def _whole_sums(
    assignment: Assignment, collectives: Iterable[Collective]
) -> dict[int, Collective]:
    """The values of one collective, an all-reduce, that may be sliced, each with it."""
    found: dict[int, list[Collective]] = {}
    for c in collectives:
        found.setdefault(c.value, []).append(c)
    return {
        v: sums[0]
        for v, sums in found.items()
        if len(sums) == 1
        and sums[0].step.kind == "all_reduce"
        and v in assignment.analysis.summed_shapes
        and v not in assignment.stackings
    }


def _groups(
    assignment: Assignment, collectives: Iterable[Collective]
) -> frozenset[tuple[int, Axes]]:
    """The computation and the mesh axes of each all-reduce.

    A reduce-scatter over one axis still is one then: the program leaves it to the
    compiler (`autopar.layouts.assignment`).
    """
    found: dict[tuple[int, int], list[ReshardStep]] = {}
    for c in collectives:
        if c.step.kind in SUMS:
            found.setdefault((c.operator, c.value), []).append(c.step)
    computations = assignment.independent.computations
    out: set[tuple[int, Axes]] = set()
    for (operator, _), steps in found.items():
        left = sum(len(s.axes) for s in steps) == 1
        for step in steps:
            if step.kind == "all_reduce" or left:
                out.add((computations[operator], step.axes))
    return frozenset(out)


def _splits(
    assignment: Assignment,
    c: Collective,
    kept: Slice,
    groups: frozenset[tuple[int, Axes]],
) -> bool:
    """Whether a sum over all devices is split: neighbours keep parts of a slice."""
    rest = c.step.axes[: -len(kept.axes)]
    if not rest or (*rest, *kept.axes) != c.step.axes:
        return False
    where = assignment.independent.computations[c.operator]
    return any((where, axes) in groups for axes in (rest, kept.axes))


def _parts(assignment: Assignment, c: Collective, kept: Axes) -> list[Collective]:
    """A sum over the devices of a slice, and one of slices over the others."""
    step, fraction = c.step, c.step.fraction
    rest = step.axes[: -len(kept)]
    first = dataclasses.replace(step, kind="reduce_scatter", axes=kept)
    for axis in kept:
        fraction /= assignment.sizes[axis]
    second = dataclasses.replace(step, axes=rest, fraction=fraction)
    return [dataclasses.replace(c, step=s) for s in (first, second)]


def _kept_slice(assignment: Assignment, value: int) -> Slice | None:
    """What is kept of a sum, or of each of those that it was added up of."""
    summed = assignment.analysis.shared_sums.summed.get(value, ())
    found = {_slice(assignment, v) for v in summed if v != value}
    if found <= {None}:
        return _slice(assignment, value)
    return found.pop() if len(found) == 1 else None


def _slice(assignment: Assignment, value: int) -> Slice | None:
    """What readers keep of a value, behind what only changes its shape."""
    forms = assignment.analysis.summed_shapes.get(value)
    if forms is None:
        return None
    made_by = assignment.contraction.producer
    reading = [(made_by[v].index,) for v in forms.values[1:]] + [forms.readers]
    for form, operators in zip(forms.values, reading, strict=True):
        ways = _ways(assignment, form, operators)
        if ways == {((), False)}:
            continue
        cut = _cut(assignment.home_layout(form), ways)
        return Slice(cut, len(operators) == 1) if cut else None
    return None


def _ways(assignment: Assignment, value: int, operators: Iterable[int]) -> set[Way]:
    """How a value is brought to operators."""
    return {
        way
        for operator in operators
        for reading in assignment.analysis.readings.of[operator]
        for source, way in zip(
            reading.sources, assignment.ways[reading.group], strict=True
        )
        if source == value
    }


def _cut(home: Layout, ways: set[Way]) -> Axes | None:
    """The axes of the slice along one dimension that all of the ways are.

    None where something else splits the array: such sums stayed as they were.
    """
    steps, fresh = next(iter(ways), ((), False))
    if len(ways) != 1 or fresh or len(steps) != 1 or steps[0].kind != "slice":
        return None
    found = [axes for axes in steps[0].layout if axes]
    return found[0] if len(found) == 1 and not any(home) else None


def compiled_traffic(
    assignment: Assignment,
    pricer: Pricer,
    only: Sequence[int] | None = None,
    *,
    rounds: bool | None = None,
) -> list[Collective]:
    """Lists the collectives of one step that the compiler keeps, in program order.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      only: the operators that count, in program order; None: all of them.
      rounds: whether what only products read is sent in bfloat16; None: as the
        device does it.
    """
    if rounds is None:
        rounds = pricer.cluster.device.rounds_operands
    found, late = traffic(assignment, only, rounds=rounds), frozenset[int]()
    if pricer.scatters_slices:
        found, late = split_sums(assignment, found)
    if pricer.reassociates:
        found = reassociate_sums(assignment, found, late)
    return scattered_sums(assignment, found) if pricer.scatters_slices else found


def reassociate_sums(
    assignment: Assignment,
    collectives: Iterable[Collective],
    late: frozenset[int] = frozenset(),
) -> list[Collective]:
    """Takes sums that are added up once, after the addition, where they are alike.

    See `autopar_passes.sums.reassociated`. Nothing may be moved between the sums and
    the addition, for the compiler only joins what it finds next to each other. Of sums
    that are taken in several collectives, the last ones may be alike and joined.

    Args:
      assignment: strategies as layouts.
      collectives: of one step of it.
      late: values whose reduce-scatters the compiler makes later.
    """
    sums: dict[int, list[Collective]] = {}
    out: list[Collective] = []
    for c in collectives:
        made = assignment.contraction.producer[c.value].index == c.operator
        held = made and c.value not in assignment.stackings
        (sums.setdefault(c.value, []) if held else out).append(c)
    for found in assignment.analysis.reassociations:
        one, other = (sums.get(v, []) for v in found.summed)
        count = _alike(one, other, late)
        if count and _stays(assignment, found):
            (value,) = assignment.graph.operators[found.operator].outputs
            sums[value] = [
                dataclasses.replace(c, value=value, ready=found.operator)
                for c in other[-count:]
            ]
            del one[-count:], other[-count:]
    out.extend(c for kept in sums.values() for c in kept)
    return sorted(out, key=lambda c: c.operator)


def _alike(
    one: Sequence[Collective], other: Sequence[Collective], late: frozenset[int]
) -> int:
    """How many of the last collectives are sums over the same devices of as many bytes.

    0 where either holds anything but sums.
    """
    if any(c.step.kind not in SUMS for c in (*one, *other)):
        return 0
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        kinds = [(c.step.kind, c.step.axes, c.size, c.trips, c.place) for c in (a, b)]
        scatters = a.step.kind == "reduce_scatter"
        if kinds[0] != kinds[1] or (scatters and {a.value, b.value} & late):
            break
        count += 1
    return count


def _stays(assignment: Assignment, found: Reassociation) -> bool:
    """Whether values come to an addition, and to all before it, where they are.

    A slice is part of the sum that it is taken of (`autopar.cost.traffic.scatter_sum`).
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
