"""The sums over the replicas of a step, which are taken once, behind its microbatches.

They are those of `autopar_passes.replay.replicas.Replicas.add_up`: an all-reduce over
the axis of the replicas of what a device holds of each result of the loop. Nothing of
the step runs beside them, as the update waits for them and the loop is over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.cost.pricer import Pricer
from autopar.cost.reassociation import compiled_traffic
from autopar.cost.traffic import Collective, join_messages
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, ReshardStep
from autopar_passes.graph.operators import Operator
from autopar_passes.replay.replicas import AXIS

# Narrower numbers are added up in 32 bits.
_WIDE_BYTES = 4


def all_collectives(assignment: Assignment, pricer: Pricer) -> list[Collective]:
    """The collectives of one step, with those between replicas, and their messages.

    Args:
      assignment: strategies as layouts; of a replica where its analysis has turns.
      pricer: the mesh and cluster.
    """
    found = join_messages(pricer, compiled_traffic(assignment, pricer))
    if assignment.analysis.turns is None:
        return found
    between = _pack_sums(pricer, list(_between(assignment)))
    return sorted([*found, *between], key=lambda c: c.operator)


def _between(assignment: Assignment) -> Iterator[Collective]:
    """Yields the sum over replicas of each result of the loop, alone."""
    loop = assignment.analysis.pytrees.loop
    for op in assignment.graph.operators:
        if op.equation != loop or op.kind not in ("carry", "stack_step"):
            continue
        value = op.outputs[1 if op.kind == "carry" else 0]
        layout = _layout(assignment, op, value)
        parts = math.prod(assignment.sizes[a] for axes in layout for a in axes)
        of = assignment.graph.values[value]
        nbytes = max(of.nbytes, _WIDE_BYTES * of.size)
        step = ReshardStep("all_reduce", (AXIS,), 1.0 / parts, layout)
        yield Collective(step, nbytes, 1.0, value, op.index)


def _layout(assignment: Assignment, op: Operator, value: int) -> Layout:
    """The layout in which a result of the loop is added up over replicas."""
    partial = assignment.partial_layout(value)
    if partial is not None:
        due = assignment.due(value)
        return partial[1] if due is None else due[-1]
    own = assignment.results(op, 1 if op.kind == "carry" else 0)
    return own[0] if own else ()


def _pack_sums(pricer: Pricer, found: list[Collective]) -> list[Collective]:
    """The sums, in messages as large as the compiler makes them."""
    sums = [c for c in found if c.size > 0]
    if "all_reduce" not in pricer.combiner.kinds:
        return sums
    sizes = pricer.combiner.bytes_of_messages(c.size for c in sums)
    return [
        dataclasses.replace(c, message_bytes=nbytes)
        for c, nbytes in zip(sums, sizes, strict=True)
    ]
