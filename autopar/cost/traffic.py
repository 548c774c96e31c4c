"""The communication of an assignment, as a list of collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs import local_s
from autopar.cost.combining import (
    FREE,
    GATHERS,
    NORMS,
    SUMS,
    UPDATED,
    Combiner,
    Group,
    Place,
)
from autopar.cost.local import sent_bytes
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment, Way
from autopar.layouts.gathering import CodedGather
from autopar.layouts.layout import Axes, ReshardStep, exchange_step
from autopar.steps.sums import times_due
from autopar_passes.graph.operators import Operator
from autopar_passes.graph.ring_order import RingOrder
from autopar_passes.graph.roles import Role
from autopar_passes.rules.factor_rule import INNER, Dims, Exchange
from autopar_passes.sums.stacked import Reassociation


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a planned step.

    Attributes:
      step: the kind, mesh axes and layout of the collective. Its size is
        `ReshardStep.fraction` times ``nbytes``.
      nbytes: bytes of the unsharded array, in the dtype in which it is sent.
      trips: number of runs in a step.
      value: the array.
      operator: the operator that makes the partial result, or the first operator that
        reads the resharded array.
      place: key of the collectives with which the compiler may join this one; None if
        the collective cannot be joined.
      ready: the operator that completes the array before its sum, or that reads the
        gathered array.
      message_bytes: bytes of the message that holds the collective; 0 if the collective
        is not joined with others.
      message: number of that message in the step; -1 if the collective is not joined.
      beside: whether the collective overlaps with the work of ``operator``.
      code: the codes that are gathered; None: the array is sent as it is.
    """

    step: ReshardStep
    nbytes: float
    trips: float
    value: int
    operator: int
    place: Place | None = None
    ready: int = -1
    message_bytes: float = 0.0
    message: int = -1
    beside: bool = False
    code: CodedGather | None = None

    @property
    def size(self) -> float:
        """The collective's size in bytes (`autopar.cluster.specs.Kind`)."""
        return self.step.fraction * self.nbytes

    def sent_in(self, message_bytes: float, message: int) -> Collective:
        """The collective as part of message number ``message``."""
        return Collective(
            self.step,
            self.nbytes,
            self.trips,
            self.value,
            self.operator,
            self.place,
            self.ready,
            message_bytes,
            message,
            code=self.code,
        )

    def seconds(self, pricer: Pricer) -> float:
        """Seconds of all runs in one step: the collective's share of its messages."""
        return self.trips * pricer.collective_s(
            self.step, self.nbytes, self.message_bytes
        )

    def shared_s(self, pricer: Pricer) -> float:
        """The part of `seconds` that other arrays in the same message can change."""
        if not self.message_bytes:
            return 0.0
        own = self.trips * pricer.least_s(self.step, self.nbytes)
        return self.seconds(pricer) - own

    def sent_bytes(self, pricer: Pricer) -> float:
        """Bytes that one device sends for the collective in one step."""
        return self.trips * pricer.sent_bytes(self.step, self.nbytes)

    def coding_s(self, pricer: Pricer) -> float:
        """Seconds in one step to encode a shard, and to decode all gathered shards.

        Half of a codec's seconds are counted for encoding, half for decoding.
        """
        if self.code is None:
            return 0.0
        codec, device = parse_codec(self.code.codec), pricer.cluster.device
        each_s = local_s(codec, (self.code.elements,), device) / 2
        return self.trips * (1 + self.code.devices) * each_s


# Operators whose results a loop returns when it ends.
_HANDED_OUT = ("carry", "stack_step")

# A form of a value: one array of the planned program. It is given by the value's
# number, by whether the backward pass gathers the array again, and by the layouts
# through which it was resharded. Equal forms are the same array.
Form = tuple[object, ...]


@dataclasses.dataclass(slots=True)
class _Forms:
    """The resharded forms of all values, and the forms that operators read.

    Attributes:
      collectives: the collectives that make forms, in the order of their readers.
      children: for each form, the forms that one resharding step makes of it.
      read: the forms that operators read, apart from those in ``whole``.
      rounds: whether values that only products read are sent in bfloat16.
      whole: for each value, whether an operator reads it in its own layout.
      made: pairs of the number of a program and a form that exists in the program.
    """

    collectives: list[Collective]
    children: dict[Form, dict[Form, ReshardStep]]
    read: set[Form]
    rounds: bool
    whole: np.ndarray
    made: set[tuple[int, Form]] = dataclasses.field(default_factory=set)

    def is_read(self, form: Form) -> bool:
        """Whether an operator reads a form."""
        if form in self.read:
            return True
        value, fresh, *layouts = form
        moved = bool(fresh or layouts)
        return isinstance(value, int) and not moved and bool(self.whole[value])


def traffic(
    assignment: Assignment, only: Sequence[int] | None = None, *, rounds: bool = False
) -> list[Collective]:
    """Lists the collectives of one step, in program order.

    Args:
      assignment: strategies as layouts.
      only: the operators whose collectives are listed, in program order; None for all
        operators.
      rounds: whether values that only products read are sent in bfloat16
        (`autopar.cluster.DeviceSpec.rounds_operands`).
    """
    if not assignment.graph.operators:  # a pipeline stage may have no operators
        return []
    whole = np.zeros(len(assignment.graph.values), dtype=bool)
    forms = _Forms([], {}, set(), rounds, whole)
    among = operators_of(assignment, only)
    made = None if only is None else {v for op in among for v in op.outputs}
    _read_all(assignment, forms, among)
    operators = assignment.graph.operators
    updates = [op for op in operators if op.role is Role.UPDATE]
    for position, value in enumerate(assignment.graph.outputs):
        if value is None or (made is not None and value not in made):
            continue
        layout = assignment.output(position)
        if layout is not None:
            maker = assignment.contraction.producer.get(value)
            updated = maker is not None and maker.role is Role.UPDATE
            # The program's last operator need not belong to the update: it may, for
            # example, count the steps.
            last = (updates if updated else operators)[-1]
            backward = assignment.is_backward(last)
            for source, wanted in assignment.required_layouts(value, layout):
                way = assignment.fetch_steps(source, wanted, backward)
                _read(assignment, forms, last, source, way, 1.0)
    due = _due(assignment, forms)
    if only is not None:
        counted = frozenset(only)
        due = [c for c in due if c.operator in counted]
    out = forms.collectives + _reductions(assignment, forms, among) + due
    out += _exchanges(assignment, among)
    out += _token_gathers(assignment, among, outputs=made)
    return sorted(out, key=lambda c: c.operator)


def operators_of(
    assignment: Assignment, only: Collection[int] | None
) -> Sequence[Operator]:
    """The operators with these numbers, or all operators of the program if None."""
    operators = assignment.graph.operators
    return operators if only is None else [operators[k] for k in only]


def join_messages(
    pricer: Pricer, collectives: Sequence[Collective]
) -> list[Collective]:
    """Assigns each collective to the message in which it travels.

    Args:
      pricer: the mesh and cluster.
      collectives: the collectives of one step, in program order.
    """
    combiner = pricer.combiner
    groups: dict[tuple[Group, Place, float], list[int]] = {}
    for number, c in enumerate(collectives):
        group = pricer.group_of(c.step)
        if c.place is None or c.place[1] == NORMS or c.size <= 0:
            continue
        if group[0] in combiner.kinds:
            groups.setdefault((group, c.place, c.trips), []).append(number)
    out = list(collectives)
    count = 0
    for ((kind, axes), _, _), numbers in groups.items():
        # The limit of a message counts bytes of results. A collective's size counts its
        # operand, which for a reduce-scatter is larger than the result.
        parts = pricer.group(axes) if kind == "reduce_scatter" else 1
        for message in combiner.messages([out[k].size / parts for k in numbers]):
            members = [numbers[place] for place in message]
            nbytes = sum(out[k].size for k in members)
            for k in members:
                out[k] = out[k].sent_in(nbytes, count)
            count += 1
    return out


def _read_all(assignment: Assignment, forms: _Forms, among: Sequence[Operator]) -> None:
    """Adds the forms that operators read.

    A value that needs no resharding for its readers is only marked in `_Forms.whole`.
    """
    readings, ways = assignment.analysis.readings, assignment.ways
    rows, partial = readings.rows, bool(assignment.stackings)
    busy = np.full(len(assignment.graph.operators), partial)
    moved = np.array([bool(steps) for own in ways for steps, _ in own], dtype=bool)
    busy[rows.operators[moved[rows.ways]]] = True
    counted = np.zeros(len(busy), dtype=bool)
    counted[[op.index for op in among]] = True
    forms.whole[rows.sources[(counted & ~busy)[rows.operators]]] = True
    for op in among:
        if not busy[op.index]:
            continue
        for reading in readings.of[op.index]:
            if partial and stays_partial(assignment, op, reading.value):
                continue
            trips = op.input_trips[reading.slot]
            for source, way in zip(reading.sources, ways[reading.group], strict=True):
                _read(assignment, forms, op, source, way, trips)


def _read(
    assignment: Assignment,
    forms: _Forms,
    op: Operator,
    source: int,
    way: Way,
    trips: float,
) -> None:
    """Adds the collectives that reshard a value for one reader.

    Each program makes a form once. Values pass from one program to another without
    resharding. Therefore each program itself makes the forms that it reads.
    """
    steps, fresh = way
    program = (assignment.analysis.programs or {}).get(op.equation, 0)
    form: Form = (source, fresh)
    layout = assignment.home_layout(source)
    if fresh:
        forms.read.add((source, False))
    for step in steps:
        start, layout = layout, step.layout
        before, form = form, (*form, layout)
        forms.children.setdefault(before, {})[form] = step
        if (program, form) in forms.made:
            continue
        forms.made.add((program, form))
        if step.kind != "slice":
            code = assignment.coded_gather(source, start, step)
            nbytes = (
                sent_bytes(assignment.analysis, source, rounds=forms.rounds)
                if code is None
                else code.devices * code.code_bytes / step.fraction
            )
            place = _gather_place(assignment, forms, source, op, step, code)
            collective = Collective(
                step, nbytes, trips, source, op.index, place, op.index, code=code
            )
            forms.collectives.append(collective)
    forms.read.add(form)


def _gather_place(
    assignment: Assignment,
    forms: _Forms,
    source: int,
    reader: Operator,
    step: ReshardStep,
    code: CodedGather | None,
) -> Place | None:
    """The place of a parameter's gather; None if it is not joined with others."""
    known = assignment.independent
    maker = assignment.contraction.producer[source]
    if step.kind not in GATHERS or maker.class_index not in known.gathered:
        return None
    narrow = forms.rounds and source in assignment.analysis.rounded_values.brought
    dtype = "bfloat16" if narrow else str(assignment.graph.values[source].dtype)
    dtype = dtype if code is None else "uint8"
    made = UPDATED if maker.role is Role.UPDATE else known.behind.get(source, FREE)
    return known.computations[reader.index], made, dtype


def _sum_place(
    assignment: Assignment, maker: Operator, value: int, step: ReshardStep, at: Operator
) -> Place | None:
    """The place of a sum; None if it is not joined with others.

    Args:
      assignment: strategies as layouts.
      maker: the operator whose result is summed.
      value: the result.
      step: the collective.
      at: the operator after which the sum runs. If it returns a loop's result, the sum
        runs after that loop.
    """
    known = assignment.independent
    summing = maker.class_index in known.summing
    if step.kind not in SUMS or not (summing or maker.class_index in known.norms):
        return None
    where = known.outside if at.kind in _HANDED_OUT else known.computations
    behind = FREE if summing else NORMS
    return where[at.index], behind, str(assignment.graph.values[value].dtype)


def _reductions(
    assignment: Assignment, forms: _Forms, among: Sequence[Operator]
) -> list[Collective]:
    """The collectives that sum the partial results of operators."""
    out: list[Collective] = []
    reduced: dict[int, bool] = {}
    for op in among:
        if op.class_index not in reduced:
            reduced[op.class_index] = _is_reduced(assignment, op)
        if not reduced[op.class_index]:
            continue
        for slot, value in enumerate(op.outputs):
            steps = assignment.result_steps(op, slot)
            if op.rule.reduction != INNER and not op.rule.sums:
                steps = _finish_reduction(assignment, forms, value, steps)
            nbytes = assignment.graph.values[value].nbytes
            out.extend(
                Collective(
                    step,
                    nbytes,
                    op.trips,
                    value,
                    op.index,
                    _sum_place(assignment, op, value, step, op),
                    op.index,
                )
                for step in steps
                if step.kind != "slice"
            )
    return out


def _exchanges(
    assignment: Assignment, among: Sequence[Operator]
) -> Iterator[Collective]:
    """Yields the collectives among shards of an operator (`Exchange`)."""
    for op in among:
        for exchange, step, messages, value in exchanges_of(assignment, op):
            nbytes, trips = assignment.graph.values[value].nbytes, op.trips * messages
            beside = exchange.around and not assignment.gathers_keys(op)
            yield Collective(step, nbytes, trips, value, op.index, beside=beside)


def _token_gathers(
    assignment: Assignment, among: Sequence[Operator], outputs: set[int] | None
) -> Iterator[Collective]:
    """Yields the gathers of values whose tokens come into the order of a ring or back.

    Args:
      assignment: strategies as layouts.
      among: the operators that read the values.
      outputs: the values that count if the program returns them; None for all.
    """
    order = assignment.analysis.ring_order
    if isinstance(order, str) or not _has_ring(assignment, order):
        return
    operators = assignment.graph.operators
    readings = [
        (op, value, assignment.operand(op, slot))
        for op in among
        if op.kind != "return"
        for slot, value in enumerate(op.inputs)
        if value is not None and order.turn(value, op.equation)
    ]
    readings += [
        (operators[-1], value, assignment.output(position))
        for position, value in enumerate(assignment.graph.outputs)
        if value is not None
        and order.turn(value, -1)
        and (outputs is None or value in outputs)
    ]
    seen = set[tuple[int, object]]()
    for op, value, layout in readings:
        if (value, layout) in seen:
            continue
        seen.add((value, layout))
        dims, values = order.dims[value], assignment.graph.values
        known = ((),) * len(values[value].shape) if layout is None else layout
        whole = tuple(() if d in dims else axes for d, axes in enumerate(known))
        backward = assignment.is_backward(op)
        for source, wanted in assignment.required_layouts(value, whole):
            for step in assignment.fetch_steps(source, wanted, backward)[0]:
                if step.kind != "slice":
                    nbytes = values[source].nbytes
                    yield Collective(step, nbytes, op.trips, source, op.index)


def _has_ring(assignment: Assignment, order: RingOrder) -> bool:
    """Whether an attention kernel shards its sequence."""
    return any(
        exchange_axes(assignment, op, exchange)
        for op in assignment.graph.operators
        if op.equation in order.kernels
        for exchange in op.rule.exchanges[:1]
    )


def exchanges_of(
    assignment: Assignment, op: Operator
) -> Iterator[tuple[Exchange, ReshardStep, int, int]]:
    """Yields the exchanges of an operator.

    Each exchange comes with its collective, the number of its messages, and the number
    of the exchanged value.
    """
    gathered = assignment.gathers_keys(op)
    for exchange in op.rule.exchanges:
        dims, value = exchanged_array(op, exchange)
        axes = exchange_axes(assignment, op, exchange)
        layout = assignment.layout(op, dims)
        step, messages = exchange_step(
            exchange, axes, layout, assignment.sizes, gathered=gathered
        )
        if messages:
            yield exchange, step, messages, value


def exchange_axes(assignment: Assignment, op: Operator, exchange: Exchange) -> Axes:
    """The mesh axes over which shards of an operator exchange an array."""
    factor = assignment.contraction.node(op).members[op.class_index][exchange.factor]
    return assignment.works_as(op)[factor]


def exchanged_array(op: Operator, exchange: Exchange) -> tuple[Dims, int]:
    """The dimensions and the value of an array that shards exchange."""
    if exchange.result:
        return op.rule.results[exchange.slot], op.outputs[exchange.slot]
    value = op.inputs[exchange.slot]
    assert value is not None
    return op.rule.operands[exchange.slot], value


def _is_reduced(assignment: Assignment, op: Operator) -> bool:
    """Whether an operator's results need a collective or a slice to reach their home.

    The home of a result is the layout that the assignment gives to its value.
    """
    if op.kind == "return" or op.class_index not in assignment.contraction.node_of:
        return False
    return any(assignment.result_steps(op, slot) for slot in range(len(op.outputs)))


def stays_partial(assignment: Assignment, op: Operator, value: int) -> bool:
    """Whether an operator passes a partial value on without summing it."""
    stackings = assignment.stackings
    return (
        value in stackings
        and any(v in stackings for v in op.outputs)
        and value not in stackings[value].deferral.ends
    )


def _due(assignment: Assignment, forms: _Forms) -> list[Collective]:
    """The collectives that sum deferred partial values where their deferrals end."""
    out: list[Collective] = []
    for value, stacking in assignment.stackings.items():
        if value not in stacking.deferral.ends or value in assignment.codecs:
            continue
        first = next(c for c, ends in stacking.deferral.reach if value in ends)
        maker = assignment.graph.operators[first]
        last = assignment.contraction.producer[value]
        out.extend(
            Collective(
                step,
                assignment.graph.values[value].nbytes,
                times_due(assignment.graph, last, value),
                value,
                first,
                _sum_place(assignment, maker, value, step, last),
                last.index,
            )
            for step in _finish_reduction(
                assignment, forms, value, assignment.due_steps(value)
            )
            if step.kind != "slice"
        )
    return out


def _finish_reduction(
    assignment: Assignment, forms: _Forms, value: int, steps: tuple[ReshardStep, ...]
) -> tuple[ReshardStep, ...]:
    """The steps of a reduction: a reduce-scatter if readers keep only slices."""
    if not steps or steps[-1].kind != "all_reduce":
        return steps
    kept = _sliced_axes(forms, (value, False), frozenset(steps[-1].axes))
    return (*steps[:-1], *scatter_sum(steps[-1], kept, assignment.sizes))


def _sliced_axes(forms: _Forms, form: Form, axes: frozenset[int]) -> frozenset[int]:
    """The axes, among ``axes``, over which every reader keeps only a slice.

    A compiler does not merge a slice with a reduction if the slice has other axes too.
    """
    out: frozenset[int] = frozenset()
    while not forms.is_read(form):
        children = forms.children.get(form, {})
        if len(children) != 1:
            return out
        ((form, step),) = children.items()
        if step.kind != "slice" or not axes.issuperset(step.axes):
            return out
        out |= frozenset(step.axes)
    return out


def scatter_sum(
    step: ReshardStep, kept: frozenset[int], sizes: Sequence[int]
) -> tuple[ReshardStep, ...]:
    """Turns an all-reduce into a reduce-scatter over the axes in ``kept``.

    Readers keep only a slice over these axes. The returned steps end in the layout of
    the all-reduce, because the slice is a separate step after them.
    """
    out: list[ReshardStep] = []
    fraction = step.fraction
    for axis in step.axes:
        if axis in kept:
            out.append(ReshardStep("reduce_scatter", (axis,), fraction, step.layout))
            fraction /= sizes[axis]
    rest = tuple(a for a in step.axes if a not in kept)
    if rest:
        out.append(ReshardStep("all_reduce", rest, fraction, step.layout))
    return tuple(out)


# All-reduces that the compiler merges into one because their results are added.


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

    See `autopar_passes.sums.stacked`. No resharding may lie between the sums and
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


# The number of messages of a step, after the compiler has combined collectives.


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
