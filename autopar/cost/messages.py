"""The number of messages of a step, after the compiler has combined collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.cost.combining import FREE, NORMS, SUMS, Combiner, Group, Place
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment
from autopar_passes.graph.operators import Operator

# The key of a sum: kind and axes, computation, element type, reduction, and number of
# runs. Sums with equal keys may share a message if none needs another sum's result.
_Alike = tuple[Group, int, str, str, float]


def messages(
    pricer: Pricer,
    collectives: Sequence[Collective],
    assignment: Assignment | None = None,
) -> dict[str, float]:
    """Number of messages in one step by kind of collective, as the compiler sends them.

    The planner prices each norm of a gradient as a separate message, because the bounds
    of its optimisation problem would be weaker if norms could share messages. The
    compiler, however, joins norms with sums of gradients over the same axes, or with
    other norms. This function counts what the compiler does. There is one exception: a
    norm needs the scattered sums of gradients. If these also run as all-reduces, a
    combiner that takes all-reduces in program order cannot join a norm with them.

    The planner also prices each sum of activations as a separate message. If
    ``assignment`` is given, this function joins these sums as the compiler does: a
    message takes sums in program order, up to the first sum that needs another sum of
    the message.

    Args:
      pricer: the mesh and cluster.
      collectives: the collectives of one step, after
        `autopar.cost.traffic.join_messages`.
      assignment: the plan of the step; None to count each sum of activations as a
        separate message.
    """
    out: dict[str, float] = {}
    norms: set[tuple[Group, Place, float]] = set()
    others: set[tuple[Group, Place, float]] = set()
    # Collectives over one device send nothing.
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
    """Counts the messages of sums of activations, by kind.

    Also returns all other collectives.
    """
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
    """Number of messages for sums of one kind, if some sums need other sums.

    A message takes sums in program order. A sum starts the next message if it needs a
    sum of the current message, or if it would make that message too large
    (``CombineInstructionsByKey``, ``xla/service/collective_combiner_utils.h``).

    Args:
      operators: the operators of the program.
      sums: the sums of one kind over the same devices, in program order, each as (the
        operator that makes the summand, the value, bytes).
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
