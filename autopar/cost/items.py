"""The items of a step's cost: each class of operators and each collective.

An item knows what it costs at the planned batch, and how often it is paid: by each
microbatch or once for each synchronisation. Everything that reports, compares or
scales costs is a sum over items.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autopar.cost.breakdown import CostBreakdown
from autopar.cost.combining import SUMS
from autopar.cost.compute import work_once_s
from autopar.cost.live import each_held_bytes
from autopar.cost.overlap import Timeline
from autopar.cost.parts import Part
from autopar.cost.placing import Placing, placing
from autopar.cost.pricer import Pricer
from autopar.cost.replicas import all_collectives
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment
from autopar.layouts.strategies import Strategy
from autopar.steps.nodes import Contraction
from autopar.steps.positions import PASSES
from autopar.steps.work import OperatorWork
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import InputRole, Role

_HELD = {
    InputRole.PARAMETER: "parameter_bytes",
    InputRole.OPTIMIZER_STATE: "optimizer_bytes",
    InputRole.FROZEN: "parameter_bytes",
    InputRole.BATCH: "batch_bytes",
}


class Paid(enum.Enum):
    """The occasions on which a cost is paid in a step."""

    MICROBATCH = "by every microbatch"
    SYNCHRONISATION = "once, when gradients are summed and state is updated"


@dataclasses.dataclass(frozen=True, slots=True)
class CostItem:
    """One item of a step's cost.

    Attributes:
      operator: class of the operators, or the operator that communicates.
      paid: how often it is paid.
      cost: at the planned batch in one microbatch, all its runs in a step together.
      work: what the operators of the class do; None for other items.
      parts: into how many parts each factor of its rule is split.
      collective: the collective; None for other items.
      timelines: of both passes, where the item is what they hide.
    """

    operator: int
    paid: Paid
    cost: CostBreakdown
    work: OperatorWork | None = None
    parts: tuple[int, ...] = ()
    collective: Collective | None = None
    timelines: tuple[Timeline, ...] = dataclasses.field(default=(), compare=False)


def items(assignment: Assignment, pricer: Pricer) -> list[CostItem]:
    """Lists what a step costs under an assignment, operator by operator.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    collectives = all_collectives(assignment, pricer)
    found = [
        *work_items(assignment, pricer),
        *collective_items(assignment, pricer, collectives),
    ]
    hidden = hidden_item(assignment, pricer, found)
    return [*found, *([hidden] if hidden else []), *held_items(assignment)]


def timelines(
    assignment: Assignment,
    found: Iterable[tuple[CostItem, float]],
    placed: Placing | None = None,
    *,
    whole: bool = True,
) -> list[Timeline]:
    """The work and the communication of both passes of a step, by position.

    Communication of the update, and what something waits for, is in none of them.

    Args:
      assignment: strategies as layouts.
      found: what a step of it costs, each item with its seconds.
      placed: its parts, for the collectives of the items; None: they are found.
      whole: whether messages are sent whole (`Calibration.whole_messages`).
    """
    places = assignment.analysis.positions
    by_class, gathers, sums = np.zeros((3, len(assignment.graph.operators)))
    moved: list[tuple[Collective, float]] = []
    for item, seconds in found:
        made = item.collective
        if item.work is not None:
            by_class[item.operator] += seconds
        elif made is not None:
            moved.append((made, seconds))
            if made.place is not None:
                target = sums if made.step.kind in SUMS else gathers
                target[made.ready] += seconds
    work = by_class[places.classes] * places.shares
    parts: list[Part] = []
    if whole:
        placed = placed or placing(assignment, [c for c, _ in moved])
        parts = placed.parts(work, [own for _, own in moved])
    after_s = float(work[places.update].sum()) if whole else 0.0
    return [
        Timeline(
            role,
            np.where(places.roles[role], work, 0.0),
            np.where(places.roles[role], gathers, 0.0),
            np.where(places.summed[role], sums, 0.0),
            after_s if role is Role.BACKWARD else 0.0,
            tuple(part for part in parts if part.key[0] is role),
        )
        for role in PASSES
    ]


def seconds_of(found: Iterable[CostItem]) -> Iterator[tuple[CostItem, float]]:
    """Items of work and communication with their seconds at the planned batch."""
    for item in found:
        yield item, item.cost.work_s + item.cost.communication_s


def hidden_item(
    assignment: Assignment, pricer: Pricer, found: Sequence[CostItem]
) -> CostItem | None:
    """The communication that runs beside work; None: devices do one after the other.

    It belongs to the whole program, so it stands at the program's last operator.
    """
    known = pricer.cluster.device.calibrated
    if not known.overlap or not assignment.graph.operators:
        return None
    whole = known.whole_messages
    lines = tuple(timelines(assignment, seconds_of(found), whole=whole))
    hidden_s = sum(t.communication_s - t.exposed_s(known.overlap) for t in lines)
    cost = CostBreakdown(cover_s=hidden_s, contention_s=known.contention * hidden_s)
    last = assignment.graph.operators[-1].index
    return CostItem(last, Paid.MICROBATCH, cost, timelines=lines)


def work_items(assignment: Assignment, pricer: Pricer) -> Iterator[CostItem]:
    """The work of each class of operators; the first of them stands for it."""
    analysis, device = assignment.analysis, pricer.cluster.device
    works = analysis.works(streamed=device.streams)
    for node in analysis.contraction.nodes:
        for member in node.members:
            work = works.get(member)
            if work is None:
                continue
            strategy = assignment.works_as(work.op)
            parts = parts_of(analysis.contraction, pricer, work.op, strategy)
            trips = analysis.trips[member]
            once_s = trips * work_once_s(work, parts, device)
            cost = CostBreakdown(
                matrix_s=once_s if work.is_matrix else 0.0,
                vector_s=0.0 if work.is_matrix else once_s,
                kernel_s=trips * device.kernel_latency_s if work.kernel else 0.0,
            )
            yield CostItem(member, paid_by(work.op), cost, work, parts)


def parts_of(
    contraction: Contraction, pricer: Pricer, op: Operator, strategy: Strategy
) -> tuple[int, ...]:
    """Into how many parts each factor of an operator's rule is split.

    Args:
      contraction: the nodes with a choice.
      pricer: the mesh.
      op: the operator.
      strategy: of its node.
    """
    mapping = contraction.node(op).members[op.class_index]
    return tuple(pricer.group(strategy[own]) if own >= 0 else 1 for own in mapping)


def paid_by(op: Operator) -> Paid:
    """The occasion on which the work of an operator is paid."""
    return Paid.SYNCHRONISATION if op.role is Role.UPDATE else Paid.MICROBATCH


def collective_items(
    assignment: Assignment, pricer: Pricer, collectives: Iterable[Collective]
) -> Iterator[CostItem]:
    """Collectives, each split into what its bytes take and its latency."""
    known: dict[tuple[object, ...], CostBreakdown] = {}
    for c in collectives:
        # What decides the cost: layers that are alike have the same.
        key = c.step, c.nbytes, c.trips, c.message_bytes, c.place is not None
        cost = known.get(key)
        if cost is None:
            cost = known[key] = _collective_cost(pricer, c)
        yield CostItem(c.operator, paid_of(assignment, c), cost, collective=c)


def _collective_cost(pricer: Pricer, collective: Collective) -> CostBreakdown:
    """The cost of a collective, split into what its bytes take and its latency."""
    step, nbytes, trips = collective.step, collective.nbytes, collective.trips
    whole_s = collective.seconds(pricer)
    least_s = min(whole_s, trips * pricer.bytes_s(step, nbytes))
    free = collective.place is not None
    kind = step.kind
    return CostBreakdown(
        **{
            "hideable_s" if free else "waiting_s": least_s,
            "hideable_latency_s" if free else "waiting_latency_s": whole_s - least_s,
            f"{kind}_bytes": collective.sent_bytes(pricer),
        }
    )


def paid_of(assignment: Assignment, collective: Collective) -> Paid:
    """Sums of gradients wait for all microbatches, what an update reads comes once."""
    op = assignment.graph.operators[collective.operator]
    summed = collective.place is not None and collective.step.kind in SUMS
    if summed or op.role is Role.UPDATE or op.kind == "return":
        return Paid.SYNCHRONISATION
    return Paid.MICROBATCH


def held_items(assignment: Assignment) -> Iterator[CostItem]:
    """The bytes that a device holds of each input."""
    graph = assignment.graph
    known: dict[tuple[str, float], CostBreakdown] = {}
    held = each_held_bytes(assignment)
    for given, nbytes in zip(graph.inputs, held, strict=True):
        key = _HELD.get(given.role, "other_bytes"), nbytes
        if key not in known:
            known[key] = CostBreakdown(**{key[0]: nbytes})
        cost = known[key]
        op = assignment.contraction.producer[given.value].index
        yield CostItem(op, Paid.SYNCHRONISATION, cost)
