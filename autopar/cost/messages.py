"""Messages of a step, as the compiler's combiner makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.cost.combining import FREE, NORMS, SUMS, Combiner, Group, Place
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment
from autopar_passes.graph.operators import Operator

# Sums that may travel together as far as none needs another: kind and axes,
# computation, element type, how they combine, and how often they run.
_Alike = tuple[Group, int, str, str, float]


def messages(
    pricer: Pricer,
    collectives: Sequence[Collective],
    assignment: Assignment | None = None,
) -> dict[str, float]:
    """Messages of one step by kind of collective, as the compiler makes them.

    Norms are priced alone: the problem would prove less if it let them share. They
    travel with the sums of gradients over the same axes, or with each other. Where the
    scattered sums that they are made of run as all-reduces, too, a combiner that takes
    all-reduces in program order stops at each norm.

    So it is with sums of activations, which are counted where the program is given:
    a message takes sums in program order up to the first that needs one of them.

    Args:
      pricer: the mesh and cluster.
      collectives: of one step, after `autopar.cost.traffic.join_messages`.
      assignment: the plan that they are of; None: sums of activations go alone.
    """
    out: dict[str, float] = {}
    norms: set[tuple[Group, Place, float]] = set()
    others: set[tuple[Group, Place, float]] = set()
    # On an axis of one device nothing is sent.
    left = [c for c in collectives if pricer.group(c.step.axes) > 1]
    if assignment is not None:
        out, left = _in_order(pricer, left, assignment)
    alone = pricer.runs_as("reduce_scatter") == "all_reduce"
    for c in left:
        if c.step.kind == "slice":
            continue
        group = pricer.group_of(c.step)
        if c.place is not None and group[0] in pricer.combiner.kinds:
            where, behind, dtype = c.place
            key = group, (where, FREE, dtype), c.trips
            if behind == NORMS and not alone:
                norms.add(key)
                continue
            others.add(key)
        part = c.size / c.message_bytes if c.message_bytes else 1.0
        out[group[0]] = out.get(group[0], 0.0) + c.trips * part
    for (kind, _), _, trips in norms - others:
        out[kind] = out.get(kind, 0.0) + trips
    return out


def _in_order(
    pricer: Pricer, collectives: Sequence[Collective], assignment: Assignment
) -> tuple[dict[str, float], list[Collective]]:
    """Messages that hold sums of activations by kind, and the collectives left over."""
    known, graph = assignment.independent, assignment.graph
    alike: dict[_Alike, list[Collective]] = {}
    left: list[Collective] = []
    for c in collectives:
        group = pricer.group_of(c.step)
        if c.step.kind not in SUMS or group[0] not in pricer.combiner.kinds:
            left.append(c)
            continue
        maker = graph.operators[c.operator]
        where = c.place[0] if c.place is not None else known.computations[c.operator]
        dtype = str(graph.values[c.value].dtype)
        key = group, where, dtype, maker.rule.reduction, c.trips
        alike.setdefault(key, []).append(c)
    out: dict[str, float] = {}
    for ((kind, axes), _, _, _, trips), sums in alike.items():
        if all(c.place is not None for c in sums):
            left.extend(sums)
            continue
        parts = pricer.group(axes) if kind == "reduce_scatter" else 1
        sized = sorted((c.ready, c.value, c.size / parts) for c in sums)
        number = rounds(graph.operators, sized, pricer.combiner)
        out[kind] = out.get(kind, 0.0) + trips * number
    return out, left


def rounds(
    operators: Sequence[Operator],
    sums: Iterable[tuple[int, int, float]],
    combiner: Combiner,
) -> int:
    """Messages that carry some sums, none in one message with a sum that it needs.

    A message takes sums in program order until one needs a sum of it, or would make
    it too large; the next begins with the first that is left
    (``CombineInstructionsByKey``, ``xla/service/collective_combiner_utils.h``).

    Args:
      operators: of the program.
      sums: of one kind over the same devices, in program order: the operator that
        makes what is summed, the value, and its bytes.
      combiner: limits of a message.
    """
    needing: set[int] = set()
    number = position = held = 0
    total = 0.0
    for maker, value, nbytes in sums:
        for op in operators[position : maker + 1]:
            if not needing.isdisjoint(v for v in op.inputs if v is not None):
                needing.update(op.outputs)
        position = maker + 1
        if nbytes > combiner.most_bytes:
            number += 1
            continue
        full = held == combiner.most_arrays or total + nbytes > combiner.most_bytes
        if not held or full or value in needing:
            number, held, total = number + 1, 0, 0.0
            needing.clear()
        needing.add(value)
        held, total = held + 1, total + nbytes
    return number
