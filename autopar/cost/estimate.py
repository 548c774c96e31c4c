"""What a training step does on one device of a mesh, as lists, and what that takes.

A step does work and sends messages (`Work`, `Messages`): arrays with a row for each
class of operators and for each collective. Some rows are paid by every microbatch,
others once in a step, when gradients are summed and the state is updated. What a row
takes depends on the batch of a microbatch, and is priced at any batch by the formulas
that price the planned one. `StepEstimate` adds the rows up. Reports, goodput and stages
read its totals.

The sums over replicas are taken once, behind the microbatches. They are those of
`autopar_passes.replay.replicas.Replicas.add_up`: an all-reduce over the axis of the
replicas of what a device holds of each result of the loop. Nothing of the step runs
beside them, as the update waits for them and the loop is over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.cluster import DeviceSpec
from autopar.cost.breakdown import CostBreakdown
from autopar.cost.collectives import collective_s_at
from autopar.cost.combining import SUMS
from autopar.cost.compute import roofline_s, shard_s
from autopar.cost.live import Live, each_held_bytes, live
from autopar.cost.overlap import Key, Part, PartCut, Timeline
from autopar.cost.pricer import Pricer
from autopar.cost.reassociation import compiled_traffic
from autopar.cost.traffic import Collective, join_messages
from autopar.cost.work import beside_ring_s
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes, Layout, ReshardStep, shards
from autopar.layouts.stacking import partial_along, without
from autopar.steps.positions import PASSES
from autopar.steps.work import WorkTable, first_splits
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.replay.replicas import AXIS

# Where the messages of a planned step may run, and beside which work.
#
# The parts of a step are its passes, and within them the bodies of loops that
# communicate: a compiler's scheduler sees one body at a time, so that what begins in it
# ends in it, and nothing from outside runs beside it. A loop that sends nothing is work
# like any other.


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where the message of one collective runs.

    Attributes:
      key: the part.
      sums: whether it may start behind its position; else it must end before it.
      position: of the operator that decides when: of the arrays of a message of sums,
        the last that is complete, by `Analysis.ranks`; of one of gathers, the first
        that is read, in program order.
    """

    key: Key
    sums: bool
    position: int

    def within(self, cut: PartCut) -> bool:
        """Whether the message is one of a stretch of its part."""
        first, last = cut.moved
        return self.sums is not cut.gathers and first <= self.position < last


@dataclasses.dataclass(frozen=True, eq=False)
class MessagePlaces:
    """The parts of a planned step, whatever its seconds are.

    Attributes:
      assignment: strategies as layouts.
      slots: of each collective; None: something waits for it, or the update sends it.
      inside: of each part, whether the work of each operator runs in it.
      needs: of each operator of the update, the last rank of a message of sums
        that it needs, -1: none; the number of operators for operators elsewhere.
    """

    assignment: Assignment
    slots: tuple[Slot | None, ...]
    inside: Mapping[Key, np.ndarray]
    needs: np.ndarray

    def parts(self, work: np.ndarray, seconds: Sequence[float]) -> list[Part]:
        """The parts that communicate.

        Args:
          work: seconds of each operator.
          seconds: of each collective.
        """
        count = len(work)
        moved = {key: (np.zeros(count), np.zeros(count)) for key in self.inside}
        for slot, own in zip(self.slots, seconds, strict=True):
            if slot is not None:
                moved[slot.key][slot.sums][slot.position] += own
        places = self.assignment.analysis.positions
        after = np.where(places.update, work, 0.0)
        order = np.argsort(self.assignment.analysis.ranks)
        return [
            Part(
                key=key,
                work=(own := np.where(inside, work, 0.0)),
                late_work=own[order],
                gathers=moved[key][0],
                sums=moved[key][1],
                update=after if self.follows(key) else np.zeros(count),
                needs=self.needs,
            )
            for key, inside in self.inside.items()
        ]

    def covering(self, key: Key, cut: PartCut) -> np.ndarray:
        """Whether the work of each operator covers messages of a stretch of a part."""
        analysis = self.assignment.analysis
        count = len(self.needs)
        at = np.arange(count) if cut.gathers else analysis.ranks
        first, last = cut.work
        own = self.inside[key] & (at >= first) & (at < last)
        if self.follows(key):
            own = own | (analysis.positions.update & (self.needs < cut.needs))
        return own.astype(float)

    def follows(self, key: Key) -> bool:
        """Whether the update follows a part."""
        return key == (Role.BACKWARD, len(self.assignment.graph.operators))


def placing(assignment: Assignment, collectives: Sequence[Collective]) -> MessagePlaces:
    """Finds the parts of a planned step.

    Args:
      assignment: strategies as layouts.
      collectives: those of one step, with their messages.
    """
    slots = tuple(_slots(assignment, collectives))
    return MessagePlaces(
        assignment,
        slots,
        _inside(assignment, collectives, slots),
        _needs(assignment, collectives, slots),
    )


def _slots(
    assignment: Assignment, collectives: Sequence[Collective]
) -> list[Slot | None]:
    """The slot of each collective: a message has one in each pass."""
    found = [_own_slot(assignment, c) for c in collectives]
    decides: dict[tuple[int, Key, bool], int] = {}
    for c, slot in zip(collectives, found, strict=True):
        if slot is not None and c.message >= 0:
            key = c.message, slot.key, slot.sums
            known = decides.get(key, slot.position)
            better = max if slot.sums else min
            decides[key] = better(known, slot.position)
    return [
        slot
        if slot is None or c.message < 0
        else Slot(slot.key, slot.sums, decides[c.message, slot.key, slot.sums])
        for c, slot in zip(collectives, found, strict=True)
    ]


def _own_slot(assignment: Assignment, c: Collective) -> Slot | None:
    """The slot that a collective would have alone."""
    if c.place is None:
        return None
    places = assignment.analysis.positions
    sums = c.step.kind in SUMS
    within = places.summed if sums else places.roles
    role = next((r for r in PASSES if within[r][c.ready]), None)
    if role is None:
        return None
    ready = int(assignment.analysis.ranks[c.ready]) if sums else c.ready
    return Slot((role, c.place[0]), sums, ready)


def _inside(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
) -> dict[Key, np.ndarray]:
    """The operators of each part that has a message."""
    known = assignment.independent
    places = assignment.analysis.positions
    whole = len(assignment.graph.operators)
    busy = {whole}
    for c in collectives:
        busy.add(c.place[0] if c.place else known.computations[c.operator])
    around = dict(zip(known.computations, known.outside, strict=True))

    def part_of(computation: int) -> int:
        while computation not in busy:
            computation = around.get(computation, whole)
        return computation

    parts = {computation: part_of(computation) for computation in around}
    own = np.array([parts[computation] for computation in known.computations])
    keys = dict.fromkeys(slot.key for slot in slots if slot is not None)
    return {key: places.roles[key[0]] & (own == key[1]) for key in keys}


def _needs(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
) -> np.ndarray:
    """The last message of sums that each operator of the update needs."""
    count = len(assignment.graph.operators)
    needs = [count] * count
    last: dict[int, int] = {}
    for c, slot in zip(collectives, slots, strict=True):
        if slot is not None and slot.sums:
            last[c.value] = max(last.get(c.value, -1), slot.position)
    for op in assignment.analysis.followers:
        latest = max([last[v] for v in op.inputs if v in last], default=-1)
        if latest >= 0:
            for value in op.outputs:
                last[value] = max(last.get(value, -1), latest)
        if op.role is Role.UPDATE:
            needs[op.index] = latest
    return np.array(needs)


_HELD = {
    InputRole.PARAMETER: "parameter_bytes",
    InputRole.OPTIMIZER_STATE: "optimizer_bytes",
    InputRole.FROZEN: "parameter_bytes",
    InputRole.BATCH: "batch_bytes",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The work of one device, a row for each class of operators.

    Attributes:
      table: the work on whole arrays.
      device: the device.
      parts: ``[rows]``, into how many parts the FLOPs of each are split.
      memory_parts: the same of memory traffic.
      sides: ``[rows, 3]``, M, N and K of the shard of a product.
    """

    table: WorkTable
    device: DeviceSpec
    parts: np.ndarray
    memory_parts: np.ndarray
    sides: np.ndarray

    @functools.cached_property
    def kernel_s(self) -> np.ndarray:
        """``[rows]``, seconds of starting the kernels of all runs in a step."""
        return self.table.trips * self.table.kernels * self.device.kernel_latency_s

    @functools.cached_property
    def planned_s(self) -> np.ndarray:
        """``[rows]``, seconds of all runs in a step at the planned batch."""
        return self.seconds(np.ones(1))[:, 0]

    def seconds(self, scales: np.ndarray) -> np.ndarray:
        """`run_s` of all runs in a step."""
        return self.table.trips[:, None] * self.run_s(scales)

    def run_s(self, scales: np.ndarray) -> np.ndarray:
        """Seconds of one run, without the start of its kernel.

        Args:
          scales: ``[scales]``, rows of a microbatch over the planned ones.

        Returns:
          float64 ``[rows, scales]``.
        """
        table = self.table
        grown = scales[None] ** np.arange(table.nbytes.shape[1])[:, None]
        nbytes = (table.nbytes / self.memory_parts[:, None]) @ grown
        flops = (table.flops / self.parts)[:, None]
        flops = flops * scales ** table.flops_degree[:, None]
        sides = self.sides[:, None] * scales[:, None] ** table.sides_degree[:, None]
        out = np.zeros(flops.shape)
        for rows in table.alike:
            found = shard_s(
                table.works[rows[0]],
                flops[rows].ravel(),
                nbytes[rows].ravel(),
                sides[rows].reshape(-1, 3),
                self.device,
            )
            out[rows] = found.reshape(len(rows), -1)
        return out


def work_of(assignment: Assignment, pricer: Pricer) -> Work:
    """The work of a step under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    analysis, device = assignment.analysis, pricer.cluster.device
    table = analysis.work_table(streamed=device.streams)
    by, memory_by, sides_by = (
        table.split_by,
        table.memory_split_by,
        table.sides_split_by,
    )
    sizes = assignment.sizes
    splits = [1, *(shards((a,), sizes) for s in assignment.strategies for a in s)]
    if assignment.stackings:
        by, memory_by, sides_by = by.copy(), memory_by.copy(), sides_by.copy()
        first = first_splits(analysis.contraction)
        for row, work in enumerate(table.works):
            node = analysis.contraction.node_of[work.op.class_index]
            works_as = assignment.works_as(work.op)
            if works_as is not assignment.strategies[node]:
                for places in (by[row], memory_by[row], sides_by[row]):
                    places[places > 0] += len(splits) - first[node]
                splits += [shards((axes,), sizes) for axes in works_as]
    split = np.array(splits, float)
    return Work(
        table,
        device,
        split[by].prod(axis=-1),
        split[memory_by].prod(axis=-1),
        table.sides / split[sides_by].prod(axis=-1),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """The communication of one device, a row for each collective, in program order.

    Attributes:
      collectives: of one step.
      once: bool ``[rows]``, whether it is paid once in a step, not by microbatches.
      hideable: bool ``[rows]``, whether nothing waits for it, so that work may hide it.
      beside: bool ``[rows]``, whether the work of its own operator may hide it.
      row_of: int ``[rows]``, the row of `priced` that says what it takes.
      priced: one collective for each price, and how many dimensions of its array grow
        with the batch.
      pricer: the mesh and cluster.
    """

    collectives: tuple[Collective, ...]
    once: np.ndarray
    hideable: np.ndarray
    beside: np.ndarray
    row_of: np.ndarray
    priced: tuple[tuple[Collective, int], ...]
    pricer: Pricer

    @functools.cached_property
    def planned_s(self) -> np.ndarray:
        """``[rows]``, seconds of all runs in a step at the planned batch."""
        return self.seconds(np.ones(1))[:, 0]

    def seconds(self, scales: np.ndarray) -> np.ndarray:
        """Seconds of all runs in a step; each has its part of its message's.

        Args:
          scales: ``[scales]``, rows of a microbatch over the planned ones.

        Returns:
          float64 ``[rows, scales]``.
        """
        pricer = self.pricer
        out = np.zeros((len(self.priced), len(scales)))
        groups: dict[object, list[int]] = {}
        for row, (c, _) in enumerate(self.priced):
            groups.setdefault(pricer.group_of(c.step), []).append(row)
        for rows in groups.values():
            found = [self.priced[row] for row in rows]
            step = found[0][0].step
            size = np.array([c.size for c, _ in found])
            whole = [pricer.whole(c.step, c.size, c.message_bytes) for c, _ in found]
            degree = np.array([degree for _, degree in found])[:, None]
            trips = np.array([c.trips for c, _ in found])
            moved_s = [pricer.move_s(c.step, c.size) for c, _ in found]
            grown = scales**degree
            axes = tuple(pricer.mesh.axes[a] for a in step.axes)
            message = np.array(whole)
            kind = pricer.runs_as(step.kind)
            wire_s = collective_s_at(kind, message[:, None] * grown, axes)
            part = np.divide(size, message, out=np.ones_like(size), where=message > 0)
            waiting = (pricer.skew(axes) * part)[:, None] * wire_s
            moving = np.array(moved_s)[:, None] * grown
            out[rows] = trips[:, None] * (waiting + moving)
        return out[self.row_of]

    @functools.cached_property
    def bytes_s(self) -> np.ndarray:
        """``[rows]``, seconds that bytes take, without the latency of messages."""
        pricer = self.pricer
        least = [c.trips * pricer.bytes_s(c.step, c.nbytes) for c, _ in self.priced]
        return np.minimum(self.planned_s, np.array(least)[self.row_of])

    @functools.cached_property
    def sent_bytes(self) -> np.ndarray:
        """``[rows]``, bytes that the device sends in a step."""
        sent = [c.sent_bytes(self.pricer) for c, _ in self.priced]
        return np.array(sent)[self.row_of]


def messages_of(
    assignment: Assignment, pricer: Pricer, collectives: Sequence[Collective]
) -> Messages:
    """The messages of a step under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      collectives: of one step, each with its message.
    """
    labels = assignment.analysis.dim_labels
    numbers: dict[tuple[object, ...], int] = {}
    priced: list[tuple[Collective, int]] = []
    row_of: list[int] = []
    for c in collectives:
        degree = labels.degree(c.value) if c.size > 0 else 0
        # What decides the price: layers that are alike have the same.
        key = c.step.kind, c.step.axes, c.size, c.trips, c.message_bytes, degree
        number = numbers.setdefault(key, len(priced))
        if number == len(priced):
            priced.append((c, degree))
        row_of.append(number)
    return Messages(
        collectives=tuple(collectives),
        once=np.array([is_once(assignment, c) for c in collectives], bool),
        hideable=np.array([c.place is not None for c in collectives], bool),
        beside=np.array([c.beside for c in collectives], bool),
        row_of=np.array(row_of, int),
        priced=tuple(priced),
        pricer=pricer,
    )


def is_once(assignment: Assignment, collective: Collective) -> bool:
    """Whether a collective is paid once in a step, not by every microbatch.

    Sums of gradients wait for all microbatches, unless they are taken in each; what an
    update reads comes once.
    """
    op = assignment.graph.operators[collective.operator]
    summed = collective.place is not None and collective.step.kind in SUMS
    if assignment.sums_each_microbatch:
        summed = summed and collective.value in assignment.stackings
    return summed or op.role is Role.UPDATE or op.kind == "return"


@dataclasses.dataclass(frozen=True, eq=False)
class StepEstimate:
    """What a training step does on one device of a mesh.

    Attributes:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      work: what the device computes.
      messages: what it sends.
    """

    assignment: Assignment
    pricer: Pricer
    work: Work
    messages: Messages
    # By scale: seconds of the rows of work and of messages. By scale, and whether the
    # microbatch is the last: seconds that it hides.
    _priced: dict[float, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        init=False, repr=False, default_factory=dict
    )
    _hidden: dict[tuple[float, bool], float] = dataclasses.field(
        init=False, repr=False, default_factory=dict
    )

    def seconds(self, batch: float = 1.0, accumulation: int = 1) -> float:
        """Seconds of a step.

        Args:
          batch: rows of the whole step over the planned ones.
          accumulation: number of microbatches that they are split into.
        """
        scale = batch / accumulation
        micro_s, once_s = self._paid_s(scale)
        hidden_s = self._hidden_at(scale, last=True)
        if accumulation > 1:
            micro_s += self.accumulate_s
            hidden_s += (accumulation - 1) * self._hidden_at(scale, last=False)
        slowed = 1.0 - self.pricer.cluster.device.corrections.contention
        return accumulation * micro_s + once_s - slowed * hidden_s

    def microbatch_s(self, scale: float = 1.0) -> float:
        """Seconds that every microbatch pays, with nothing hidden.

        Args:
          scale: rows of the microbatch over the planned ones.
        """
        return self._paid_s(scale)[0]

    def _rows_s(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the rows of work, with starts of kernels, and of messages."""
        if scale not in self._priced:
            scales = np.array([scale])
            work_s = self.work.seconds(scales)[:, 0] + self.work.kernel_s
            self._priced[scale] = work_s, self.messages.seconds(scales)[:, 0]
        return self._priced[scale]

    def _paid_s(self, scale: float) -> tuple[float, float]:
        """Seconds that a microbatch pays, and those paid once in a step."""
        work_s, sent_s = self._rows_s(scale)
        update, once = self.work.table.update, self.messages.once
        once_s = float(work_s[update].sum() + sent_s[once].sum())
        return float(work_s.sum() + sent_s.sum()) - once_s, once_s

    def _hidden_at(self, scale: float, *, last: bool) -> float:
        """Seconds of communication that run beside the work of a microbatch.

        Args:
          scale: rows of the microbatch over the planned ones.
          last: whether sums of gradients are sent behind it.
        """
        if not self.pricer.cluster.device.corrections.overlap:
            return 0.0
        if (scale, last) not in self._hidden:
            work_s, sent_s = self._rows_s(scale)
            sent_s = sent_s if last else np.where(self.messages.once, 0.0, sent_s)
            hidden_s = self._hidden_s(self._timelines(work_s, sent_s))
            self._hidden[scale, last] = hidden_s + self._beside_s(work_s, sent_s)
        return self._hidden[scale, last]

    def _beside_s(self, work_s: np.ndarray, sent_s: np.ndarray) -> float:
        """Seconds of communication that run beside the work of their own operators."""
        rows = np.flatnonzero(self.messages.beside)
        if not len(rows):
            return 0.0
        work = self._by_operator(work_s)
        sent: dict[int, float] = {}
        axes: dict[int, Axes] = {}
        for row in rows:
            found = self.messages.collectives[row]
            sent[found.operator] = sent.get(found.operator, 0.0) + float(sent_s[row])
            axes[found.operator] = found.step.axes
        return sum(
            min(own, beside_ring_s(float(work[k]), self.pricer, axes[k]))
            for k, own in sent.items()
        )

    def _by_operator(self, work_s: np.ndarray) -> np.ndarray:
        """Seconds of each operator, of those of each row of work."""
        places = self.assignment.analysis.positions
        by_class = np.zeros(len(self.assignment.graph.operators))
        by_class[self.work.table.operators] = work_s
        return by_class[places.classes] * places.shares

    def _hidden_s(self, lines: Sequence[Timeline]) -> float:
        """Seconds of communication that run beside work."""
        share = self.pricer.cluster.device.corrections.overlap
        return sum(line.communication_s - line.exposed_s(share) for line in lines)

    @functools.cached_property
    def live(self) -> Live:
        """The arrays that the device holds, each with when it is there."""
        return live(self.assignment, self.pricer.cluster.device)

    @functools.cached_property
    def message_places(self) -> MessagePlaces:
        """The parts of the step in which messages run."""
        return placing(self.assignment, self.messages.collectives)

    @functools.cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """Work, and communication that may be hidden, of both passes."""
        work_s = self.work.planned_s + self.work.kernel_s
        return self._timelines(work_s, self.messages.planned_s)

    def _timelines(
        self, work_s: np.ndarray, sent_s: np.ndarray
    ) -> tuple[Timeline, ...]:
        """The work and the communication of both passes, by position.

        Communication of the update, and what something waits for, is in none of them.
        """
        places = self.assignment.analysis.positions
        whole = self.pricer.cluster.device.corrections.whole_messages
        gathers, sums = np.zeros((2, len(self.assignment.graph.operators)))
        free = np.flatnonzero(self.messages.hideable)
        made = self.messages.collectives
        ready = np.array([made[k].ready for k in free], int)
        summing = np.array([made[k].step.kind in SUMS for k in free], bool)
        np.add.at(sums, ready[summing], sent_s[free[summing]])
        np.add.at(gathers, ready[~summing], sent_s[free[~summing]])
        work = self._by_operator(work_s)
        parts: list[Part] = []
        if whole:
            parts = self.message_places.parts(work, sent_s.tolist())
        after_s = float(work[places.update].sum()) if whole else 0.0
        return tuple(
            Timeline(
                role,
                np.where(places.roles[role], work, 0.0),
                np.where(places.roles[role], gathers, 0.0),
                np.where(places.summed[role], sums, 0.0),
                after_s if role is Role.BACKWARD else 0.0,
                tuple(part for part in parts if part.key[0] is role),
            )
            for role in PASSES
        )

    @functools.cached_property
    def accumulate_s(self) -> float:
        """Seconds of adding each gradient to its sum: two reads and a write.

        Where the sum over devices waits for all microbatches, each device adds up its
        own part of it, whole.
        """
        assignment, device = self.assignment, self.pricer.cluster.device
        total = 0.0
        for deferral in assignment.analysis.deferrals:
            axes = partial_along(assignment, deferral)
            for value in deferral.ends:
                if value in deferral.gradients:
                    held = assignment.graph.values[value]
                    layout = without(assignment.home_layout(value), axes)
                    split = shards(layout, assignment.sizes)
                    total += float(
                        roofline_s(
                            held.size / split,
                            3.0 * held.nbytes / split,
                            str(held.dtype),
                            device,
                            is_matrix=False,
                        )
                    )
        return total

    @functools.cached_property
    def cost(self) -> CostBreakdown:
        """What a step at the planned batch is spent on."""
        work, sent = self.work, self.messages
        matrix, hideable = work.table.matrix, sent.hideable | sent.beside
        latency_s = sent.planned_s - sent.bytes_s
        kinds = np.array([c.step.kind for c in sent.collectives], object)
        moved = {
            f"{kind}_bytes": float(sent.sent_bytes[kinds == kind].sum())
            for kind in dict.fromkeys(kinds.tolist())
        }
        held: dict[str, list[float]] = {}
        inputs = self.assignment.graph.inputs
        for given, nbytes in zip(inputs, each_held_bytes(self.assignment), strict=True):
            held.setdefault(_HELD.get(given.role, "other_bytes"), []).append(nbytes)
        known = self.pricer.cluster.device.corrections
        hidden_s = self._hidden_at(1.0, last=True)
        return CostBreakdown(
            matrix_s=float(work.planned_s[matrix].sum()),
            vector_s=float(work.planned_s[~matrix].sum()),
            kernel_s=float(work.kernel_s.sum()),
            waiting_s=float(sent.bytes_s[~hideable].sum()),
            hideable_s=float(sent.bytes_s[hideable].sum()),
            waiting_latency_s=float(latency_s[~hideable].sum()),
            hideable_latency_s=float(latency_s[hideable].sum()),
            cover_s=hidden_s,
            contention_s=known.contention * hidden_s,
            **moved,
            **{kind: math.fsum(own) for kind, own in held.items()},
        )


def estimate(assignment: Assignment, pricer: Pricer) -> StepEstimate:
    """Lists what a step does under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    collectives = all_collectives(assignment, pricer)
    sent = messages_of(assignment, pricer, collectives)
    return StepEstimate(assignment, pricer, work_of(assignment, pricer), sent)


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
