"""The work and the messages of a training step on one device, with their seconds.

`Work` has a row for each class of equivalent operators, and `Messages` has a row for
each collective. Most rows run once per microbatch. The sums of gradients and the update
of the state run once per step. The same formulas give the seconds of a row for the
planned batch size and for any other. `StepEstimate` adds the rows up. Reports, goodput
and stages read its totals.

Sums over replicas run once per step, after the loop over microbatches
(`autopar_passes.replay.replicas.Replicas.add_up`). In the cost model, the replicas are
one more mesh axis. Gradients are partial over this axis, so they are summed after the
loop like all gradients whose sums are deferred. Every other result of the loop is
summed by an all-reduce over this axis.
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
from autopar.cost.combining import SUMS, is_moved
from autopar.cost.compute import roofline_s, shard_s
from autopar.cost.live import Live, each_held_bytes, live
from autopar.cost.overlap import Key, Part, Timeline
from autopar.cost.pricer import Pricer
from autopar.cost.rows import exchange_s
from autopar.cost.traffic import Collective, compiled_traffic, join_messages
from autopar.cost.work import beside_ring_s
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes, ReshardStep, shards
from autopar.layouts.stacking import partial_along, without
from autopar.steps.positions import PASSES
from autopar.steps.work import WorkTable, first_splits
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.replay.replicas import AXIS

# Where the messages of a planned step may run, and which work overlaps with them.
#
# A step is divided into parts: its passes, and within a pass the bodies of loops that
# communicate. A compiler's scheduler handles one loop body at a time. Therefore a
# message that begins in a body ends in the same body, and overlaps only with work of
# this body. A loop without communication counts as ordinary work.


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where the message of one collective runs.

    Attributes:
      key: the part of the step.
      sums: whether the message carries sums, which may start after ``position``. If
        not, it carries gathers, which must end before ``position``.
      position: for sums, the rank (`Analysis.ranks`) of the operator that completes the
        last array of the message; for gathers, the index of the first operator that
        reads an array of the message.
      last: if the compiler moves the sums of a loop into the next iteration, the part
        of them that runs after the loop: 1 / iterations. Otherwise 0.
    """

    key: Key
    sums: bool
    position: int
    last: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class MessagePlaces:
    """Where the messages of a planned step may run, without their seconds.

    Attributes:
      assignment: strategies as layouts.
      slots: the slot of each collective; None if an operator waits for the collective,
        or if it belongs to the update.
      inside: for each part, whether each operator runs in the part.
      needs: for each operator of the update, the largest rank of a message of sums that
        the operator needs, or -1 if it needs none. For an operator outside of the
        update, the entry is the number of operators.
      around: the last operator of a loop -> that of the computation around it.
    """

    assignment: Assignment
    slots: tuple[Slot | None, ...]
    inside: Mapping[Key, np.ndarray]
    needs: np.ndarray
    around: Mapping[int, int]

    def parts(self, work: np.ndarray, seconds: Sequence[float]) -> list[Part]:
        """The parts of the step that communicate, with their seconds.

        Args:
          work: seconds of each operator.
          seconds: seconds of each collective.
        """
        count = len(work)
        moved = {key: (np.zeros(count), np.zeros(count)) for key in self.inside}
        ranks = self.assignment.analysis.ranks
        later = dict.fromkeys(self.inside, 0.0)
        for slot, own in zip(self.slots, seconds, strict=True):
            if slot is None:
                continue
            if slot.last:
                later[slot.key] += (1.0 - slot.last) * own
                end = slot.key[1]
                outer = slot.key[0], self.around[end]
                moved[outer][True][ranks[end]] += slot.last * own
            else:
                moved[slot.key][slot.sums][slot.position] += own
        places = self.assignment.analysis.positions
        after = np.where(places.update, work, 0.0)
        order = np.argsort(ranks)
        return [
            Part(
                key=key,
                work=(own := np.where(inside, work, 0.0)),
                late_work=own[order],
                gathers=moved[key][0],
                sums=moved[key][1],
                update=after if self.follows(key) else np.zeros(count),
                needs=self.needs,
                pipelined_s=later[key],
            )
            for key, inside in self.inside.items()
        ]

    def follows(self, key: Key) -> bool:
        """Whether the update runs directly after the part, so that its work can hide
        messages of the part.
        """
        return key == (Role.BACKWARD, len(self.assignment.graph.operators))


def placing(assignment: Assignment, collectives: Sequence[Collective]) -> MessagePlaces:
    """Finds the parts of a planned step.

    Args:
      assignment: the layouts of all arrays.
      collectives: the collectives of one step, with their messages.
    """
    known = assignment.independent
    around = dict(zip(known.computations, known.outside, strict=True))
    slots = tuple(_slots(assignment, collectives, around))
    return MessagePlaces(
        assignment,
        slots,
        _inside(assignment, collectives, slots, around),
        _needs(assignment, collectives, slots),
        around,
    )


def _slots(
    assignment: Assignment,
    collectives: Sequence[Collective],
    around: Mapping[int, int],
) -> list[Slot | None]:
    """The slot of each collective.

    Collectives of one message in one part have the same slot.
    """
    found = [_own_slot(assignment, c, around) for c in collectives]
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
        else dataclasses.replace(slot, position=decides[c.message, slot.key, slot.sums])
        for c, slot in zip(collectives, found, strict=True)
    ]


def _own_slot(
    assignment: Assignment, c: Collective, around: Mapping[int, int]
) -> Slot | None:
    """The slot that a collective would have in a separate message."""
    if c.place is None:
        return None
    places = assignment.analysis.positions
    sums = c.step.kind in SUMS
    within = places.summed if sums else places.roles
    role = next((r for r in PASSES if within[r][c.ready]), None)
    if role is None:
        return None
    if not sums:
        return Slot((role, c.place[0]), False, c.ready)
    last = _last_part(assignment, c, c.place[0], around)
    ready = int(assignment.analysis.ranks[c.ready])
    return Slot((role, c.place[0]), True, ready, last)


def _last_part(
    assignment: Assignment, c: Collective, end: int, around: Mapping[int, int]
) -> float:
    """`Slot.last` of a sum in the computation with the last operator ``end``."""
    if not is_moved(assignment, c.value, end):
        return 0.0
    operators, outer = assignment.graph.operators, around[end]
    outside = operators[outer].trips if outer < len(operators) else 1.0
    return min(1.0, outside / operators[end].trips)


def _inside(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
    around: Mapping[int, int],
) -> dict[Key, np.ndarray]:
    """The operators of each part that has a message."""
    known = assignment.independent
    places = assignment.analysis.positions
    whole = len(assignment.graph.operators)
    busy = {whole}
    for c in collectives:
        busy.add(c.place[0] if c.place else known.computations[c.operator])

    def part_of(computation: int) -> int:
        while computation not in busy:
            computation = around.get(computation, whole)
        return computation

    parts = {computation: part_of(computation) for computation in around}
    own = np.array([parts[computation] for computation in known.computations])
    used = [slot for slot in slots if slot is not None]
    keys = dict.fromkeys(slot.key for slot in used)
    keys |= {(s.key[0], around[s.key[1]]): None for s in used if s.last}
    return {key: places.roles[key[0]] & (own == key[1]) for key in keys}


def _needs(
    assignment: Assignment,
    collectives: Sequence[Collective],
    slots: Sequence[Slot | None],
) -> np.ndarray:
    """For each operator of the update, the rank of the last sums that it needs."""
    count, ranks = len(assignment.graph.operators), assignment.analysis.ranks
    needs = [count] * count
    last: dict[int, int] = {}
    for c, slot in zip(collectives, slots, strict=True):
        if slot is not None and slot.sums:
            sent = int(ranks[slot.key[1]]) if slot.last else slot.position
            last[c.value] = max(last.get(c.value, -1), sent)
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
    """The work of one device, with a row for each class of equivalent operators.

    Attributes:
      table: the work on unsharded arrays.
      device: the device.
      parts: ``[rows]``, number of parts into which the FLOPs of a row are split.
      memory_parts: ``[rows]``, number of parts into which its memory traffic is split.
      sides: ``[rows, 3]``, M, N and K of the shard of a product.
    """

    table: WorkTable
    device: DeviceSpec
    parts: np.ndarray
    memory_parts: np.ndarray
    sides: np.ndarray

    @functools.cached_property
    def kernel_s(self) -> np.ndarray:
        """Seconds of all kernel launches of each row in a step, ``[rows]``."""
        return self.table.trips * self.table.kernels * self.device.kernel_latency_s

    @functools.cached_property
    def planned_s(self) -> np.ndarray:
        """Seconds of each row in a step at the planned batch, ``[rows]``."""
        return self.seconds(np.ones(1))[:, 0]

    def seconds(self, scales: np.ndarray) -> np.ndarray:
        """Seconds of all runs in a step; arguments and shape as for `run_s`."""
        return self.table.trips[:, None] * self.run_s(scales)

    def run_s(self, scales: np.ndarray) -> np.ndarray:
        """Seconds of one run of each row of the table, without the kernel's launch.

        Args:
          scales: ``[scales]``; each scale is the number of samples in a microbatch,
            divided by that number in the plan.

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
      collectives: the collectives of one step.
      once: bool ``[rows]``, whether the collective runs once per step. If not, it runs
        once per microbatch.
      hideable: bool ``[rows]``, whether work may overlap with the collective because no
        operator waits for it.
      beside: bool ``[rows]``, whether the collective may overlap with the work of the
        operator that it belongs to, as in ring attention.
      row_of: int ``[rows]``, the index in ``priced`` of the collective with the same
        price.
      priced: one collective for each distinct price, and the number of dimensions of
        its array that grow with the batch.
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
        """Seconds of each row in a step at the planned batch, ``[rows]``."""
        return self.seconds(np.ones(1))[:, 0]

    def seconds(self, scales: np.ndarray) -> np.ndarray:
        """Seconds of all runs of each collective in a step.

        Collectives that share a message divide its time in proportion to their bytes.

        Args:
          scales: ``[scales]``; each scale is the number of samples in a microbatch,
            divided by that number in the plan.

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
        """Seconds of each row without the latency of messages, ``[rows]``."""
        pricer = self.pricer
        least = [c.trips * pricer.bytes_s(c.step, c.nbytes) for c, _ in self.priced]
        return np.minimum(self.planned_s, np.array(least)[self.row_of])

    @functools.cached_property
    def coding_s(self) -> np.ndarray:
        """Seconds in a step of encoding and decoding for each row, ``[rows]``."""
        coding_s = [c.coding_s(self.pricer) for c, _ in self.priced]
        return np.array(coding_s)[self.row_of]

    @functools.cached_property
    def sent_bytes(self) -> np.ndarray:
        """Bytes that the device sends in a step for each row, ``[rows]``."""
        sent = [c.sent_bytes(self.pricer) for c, _ in self.priced]
        return np.array(sent)[self.row_of]


def messages_of(
    assignment: Assignment, pricer: Pricer, collectives: Sequence[Collective]
) -> Messages:
    """The messages of a step under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      collectives: the collectives of one step, each with its message.
    """
    labels = assignment.analysis.dim_labels
    numbers: dict[tuple[object, ...], int] = {}
    priced: list[tuple[Collective, int]] = []
    row_of: list[int] = []
    for c in collectives:
        degree = labels.degree(c.value) if c.size > 0 else 0
        # The key contains everything on which the price depends. Equal layers have
        # equal keys.
        step, code = c.step, c.code
        key = step.kind, step.axes, c.size, c.trips, c.message_bytes, degree, code
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
    """Whether a collective runs once per step rather than once per microbatch.

    Sums of gradients run once, after all microbatches, unless the plan sums gradients
    in every microbatch. Collectives of the update and of the step's results run once.
    """
    op = assignment.graph.operators[collective.operator]
    summed = collective.place is not None and collective.step.kind in SUMS
    if assignment.sums_each_microbatch:
        summed = summed and collective.value in assignment.stackings
    return summed or op.role is Role.UPDATE or op.kind == "return"


@dataclasses.dataclass(frozen=True, eq=False)
class StepEstimate:
    """The predicted work and communication of a training step on one device of a mesh.

    Attributes:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      work: the device's work.
      messages: the device's communication.
    """

    assignment: Assignment
    pricer: Pricer
    work: Work
    messages: Messages
    # `_priced` caches `_rows_s` by scale. `_hidden` caches `_hidden_at` by scale, and
    # by whether the microbatch is the last of its step.
    _priced: dict[float, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        init=False, repr=False, default_factory=dict
    )
    _hidden: dict[tuple[float, bool], float] = dataclasses.field(
        init=False, repr=False, default_factory=dict
    )

    def seconds(self, batch: float = 1.0, accumulation: int = 1) -> float:
        """Seconds of a step.

        Args:
          batch: the number of samples in a step, divided by that number in the plan.
          accumulation: number of microbatches into which the batch is split.
        """
        scale = batch / accumulation
        micro_s, once_s = self._paid_s(scale)
        hidden_s = self._hidden_at(scale, last=True)
        if accumulation > 1:
            micro_s += self.accumulate_s
            hidden_s += (accumulation - 1) * self._hidden_at(scale, last=False)
        slowed = 1.0 - self.pricer.cluster.device.corrections.contention
        rows_s = exchange_s(self.assignment, self.pricer, batch)
        return rows_s + accumulation * micro_s + once_s - slowed * hidden_s

    def microbatch_s(self, scale: float = 1.0) -> float:
        """Seconds of a microbatch if nothing overlaps, without rows that run per step.

        Args:
          scale: the number of samples in a microbatch, divided by that number in the
            plan.
        """
        return self._paid_s(scale)[0]

    def _rows_s(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each row of work (kernel launches included) and of messages."""
        if scale not in self._priced:
            scales = np.array([scale])
            work_s = self.work.seconds(scales)[:, 0] + self.work.kernel_s
            self._priced[scale] = work_s, self.messages.seconds(scales)[:, 0]
        return self._priced[scale]

    def _paid_s(self, scale: float) -> tuple[float, float]:
        """Seconds of each microbatch, and seconds that a step takes only once."""
        work_s, sent_s = self._rows_s(scale)
        sent_s = sent_s + self.messages.coding_s
        update, once = self.work.table.update, self.messages.once
        once_s = float(work_s[update].sum() + sent_s[once].sum())
        return float(work_s.sum() + sent_s.sum()) - once_s, once_s

    def _hidden_at(self, scale: float, *, last: bool) -> float:
        """Seconds of communication that overlap with the work of a microbatch.

        Args:
          scale: the number of samples in a microbatch, divided by that number in the
            plan.
          last: whether the microbatch is the last of its step, in which the gradients
            are summed over devices.
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
        """Seconds of communication that overlap with the work of the same operator."""
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
        """Seconds of each operator, from the seconds of each row of work."""
        places = self.assignment.analysis.positions
        by_class = np.zeros(len(self.assignment.graph.operators))
        by_class[self.work.table.operators] = work_s
        return by_class[places.classes] * places.shares

    def _hidden_s(self, lines: Sequence[Timeline]) -> float:
        """Seconds of communication that overlap with work."""
        share = self.pricer.cluster.device.corrections.overlap
        return sum(line.communication_s - line.exposed_s(share) for line in lines)

    @functools.cached_property
    def live(self) -> Live:
        """The arrays that the device holds, each with its lifetime."""
        return live(self.assignment, self.pricer.cluster.device)

    @functools.cached_property
    def message_places(self) -> MessagePlaces:
        """The parts of the step in which messages run."""
        return placing(self.assignment, self.messages.collectives)

    @functools.cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timelines of the forward and backward pass at the planned batch."""
        work_s = self.work.planned_s + self.work.kernel_s
        return self._timelines(work_s, self.messages.planned_s)

    def _timelines(
        self, work_s: np.ndarray, sent_s: np.ndarray
    ) -> tuple[Timeline, ...]:
        """The work and the hideable communication of the forward and backward pass.

        The timelines leave out communication of the update, and communication for which
        an operator waits.
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
        """Seconds to add a microbatch's gradients to their sums over microbatches.

        Each addition makes two reads and one write. Where the sum over devices runs
        after all microbatches, each device adds unsharded gradients.
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
        """The seconds and bytes of a step at the planned batch, by purpose."""
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
        rows_s = exchange_s(self.assignment, self.pricer)
        return CostBreakdown(
            matrix_s=float(work.planned_s[matrix].sum()),
            vector_s=float(work.planned_s[~matrix].sum()),
            kernel_s=float(work.kernel_s.sum()),
            waiting_s=float(sent.bytes_s[~hideable].sum()) + rows_s,
            hideable_s=float(sent.bytes_s[hideable].sum()),
            waiting_latency_s=float(latency_s[~hideable].sum()),
            hideable_latency_s=float(latency_s[hideable].sum()),
            codec_s=float(sent.coding_s.sum()),
            cover_s=hidden_s,
            contention_s=known.contention * hidden_s,
            **moved,
            **{kind: math.fsum(own) for kind, own in held.items()},
        )


def estimate(assignment: Assignment, pricer: Pricer) -> StepEstimate:
    """Estimates the work and the communication of a step under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    collectives = all_collectives(assignment, pricer)
    sent = messages_of(assignment, pricer, collectives)
    return StepEstimate(assignment, pricer, work_of(assignment, pricer), sent)


# Sums over replicas use a type of at least 4 bytes per element, also for arrays of
# narrower types.
_WIDE_BYTES = 4


def all_collectives(
    assignment: Assignment, pricer: Pricer, *, rounds: bool | None = None
) -> list[Collective]:
    """The collectives of one step with their messages, also those between replicas.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      rounds: as for `compiled_traffic`.
    """
    found = join_messages(pricer, compiled_traffic(assignment, pricer, rounds=rounds))
    if not assignment.replicas:
        return found
    between = _pack_sums(pricer, list(_between(assignment)))
    return sorted([*found, *between], key=lambda c: c.operator)


def _between(assignment: Assignment) -> Iterator[Collective]:
    """Yields the sum over replicas of each result of the loop over microbatches that is
    whole in a replica.

    The sums are not grouped into messages yet.
    """
    loop = assignment.analysis.pytrees.loop
    for op in assignment.graph.operators:
        if op.equation != loop or op.kind not in ("carry", "stack_step"):
            continue
        slot = 1 if op.kind == "carry" else 0
        value = op.outputs[slot]
        partial, own = assignment.partial_layout(value), assignment.results(op, slot)
        if partial is not None and AXIS in partial[0]:
            continue
        layout = partial[1] if partial is not None else own[0] if own else ()
        parts = math.prod(assignment.sizes[a] for axes in layout for a in axes)
        of = assignment.graph.values[value]
        nbytes = max(of.nbytes, _WIDE_BYTES * of.size)
        step = ReshardStep("all_reduce", (AXIS,), 1.0 / parts, layout)
        yield Collective(step, nbytes, 1.0, value, op.index)


def _pack_sums(pricer: Pricer, found: list[Collective]) -> list[Collective]:
    """The sums, grouped into messages as the compiler's combiner groups them."""
    sums = [c for c in found if c.size > 0]
    if "all_reduce" not in pricer.combiner.kinds:
        return sums
    sizes = pricer.combiner.bytes_of_messages(c.size for c in sums)
    return [
        dataclasses.replace(c, message_bytes=nbytes)
        for c, nbytes in zip(sums, sizes, strict=True)
    ]
