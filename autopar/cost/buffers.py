"""The buffers of one step on one device, without the buffers of the step's inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.cost.combining import SUMS, is_moved
from autopar.cost.local import Buffer, local_bytes
from autopar.cost.traffic import exchanges_of
from autopar.layouts.assignment import Assignment, Way
from autopar.layouts.layout import Layout, shards
from autopar.steps.lifetimes import Lifetimes
from autopar.steps.rounding import WIDER, is_narrow
from autopar.steps.uses import Reading
from autopar_passes.graph.operators import PRODUCTS, RAGGED_PRODUCTS, Operator
from autopar_passes.graph.roles import Role

# Buffers of arrays that are resharded, transposed or converted for their readers.


# Convolutions run on copies of their operands, in the dimension order of their kernels.
_COPIES_OPERANDS = frozenset({"conv_general_dilated"})
# The key of an array after resharding: the number of the value, whether the backward
# pass gathers it again, and the layouts from the value's own layout to the last one.
_Form = tuple[int, bool, tuple[Layout, ...]]
_Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Brought:
    """The arrays that operators read, collected one operator at a time.

    A *time* is the position of an operator in the order of execution.

    Attributes:
      assignment: strategies as layouts.
      life: the lifetimes of values.
      ends: the last time at which each value is read in its own layout and type.
      widened: for each 16-bit value, the last time at which a copy in 32 bits is read.
      copied: for each parameter that is copied, the last time at which the copy is
        read. A parameter is copied if its update may run before its last reader.
      forms: resharded arrays, each with its bytes and its lifetime.
      spread: lifetimes of broadcast arrays, by value and layout (`Lifetimes.spread`).
      moved: buffers of copies whose dimensions are in another order.
      sliced: for each loop, the arrays that are gathered whole before it, each with the
        time of its gather. A compiler that hides gathers starts all of them before the
        first copy.
    """

    assignment: Assignment
    life: Lifetimes
    ends: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    widened: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    copied: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    forms: dict[_Form, tuple[float, _Span]] = dataclasses.field(
        default_factory=dict[_Form, tuple[float, _Span]]
    )
    spread: dict[tuple[int, Layout], _Span] = dataclasses.field(
        default_factory=dict[tuple[int, Layout], _Span]
    )
    moved: list[Buffer] = dataclasses.field(default_factory=list[Buffer])
    sliced: dict[int, list[tuple[int, _Form]]] = dataclasses.field(
        default_factory=dict[int, list[tuple[int, _Form]]]
    )

    def read_all(self, among: Sequence[Operator]) -> None:
        """Records what operators read.

        Most operators read a value without a copy: in its own layout, order of
        dimensions and type. For such a read, only its time is recorded if it is the
        last one.
        """
        life, readings = self.life, self.assignment.analysis.readings
        special = _special(self.assignment, life)
        rows, until = readings.rows, _all_needs(life, self.assignment.graph.operators)
        plain = np.zeros(len(special), dtype=bool)
        plain[[op.index for op in among]] = True
        plain &= ~special
        kept = plain[rows.operators]
        last = np.zeros(len(self.assignment.graph.values), dtype=int)
        np.maximum.at(last, rows.sources[kept], until[rows.operators[kept]])
        read = np.flatnonzero(last)
        self.ends.update(zip(read.tolist(), last[read].tolist(), strict=True))
        for op in among:
            if special[op.index]:
                for reading in readings.of[op.index]:
                    self.read(op, reading)

    def read(self, op: Operator, reading: Reading) -> None:
        """Records one array that an operator reads."""
        until, value = self.life.needs(op), reading.value
        made = self.life.copies.get((value, op.index))
        if made is not None:
            # The copy is computed from the same operands as the value, so it has the
            # value's layout.
            nbytes = self.bytes_of(value, self.assignment.home_layout(value))
            self.moved.append(Buffer(value, nbytes, made, until))
            return
        if value in self.life.spread:
            key = value, self.assignment.layout(op, op.rule.operands[reading.slot])
            span = self.life.time[op.index], until
            self.spread[key] = _join_spans(self.spread.get(key, span), span)
        ways, special = self.assignment.ways[reading.group], op.kind in PRODUCTS
        for source, way in zip(reading.sources, ways, strict=True):
            if special or way[0]:
                self._need(op, source, way, until)
            elif until > self.ends.get(source, 0):
                self.ends[source] = until
        if special:
            self._move(op, reading)
            self._copy_ragged(op, reading)

    def _need(self, op: Operator, source: int, way: Way, until: int) -> None:
        """Records that an operator needs a value until a time."""
        steps, fresh = way
        start = self.life.arrives(source, op.index)
        product = op.kind in PRODUCTS
        wide = product and source in self.life.widened.operands
        if steps:
            _extend(self.ends, source, start)
            key = source, fresh, tuple(s.layout for s in steps)
            part = self.life.rounded.brought_part(source)
            nbytes = self.bytes_of(source, steps[-1].layout) * part
            nbytes *= WIDER if wide else 1
            known, span = self.forms.get(key, (nbytes, (start, until)))
            self.forms[key] = max(known, nbytes), _join_spans(span, (start, until))
            if op.kind == "slice_step" and self.life.placed:
                self.sliced.setdefault(op.equation, []).append((start, key))
            return
        _extend(self.widened if wide else self.ends, source, until)
        if product and not wide and self._overtaken(op, source):
            _extend(self.copied, source, until)

    def _overtaken(self, op: Operator, source: int) -> bool:
        """Whether a parameter's update may run before an operator that reads it.

        An update is sure to run after the operator only if the update waits for a
        gradient that depends on the operator's result.
        """
        known = self.life.replacing
        waits = known.waits_for.get(source)
        if waits is None or op.role is not Role.BACKWARD:
            return False
        return not waits & known.made_of[op.index]

    def _move(self, op: Operator, reading: Reading) -> None:
        """Records the copy of an operand in the dimension order of a kernel."""
        early = bool(self.life.early)
        turned = early and op.kind == "dot_general" and contracts_first(op)
        if op.kind not in _COPIES_OPERANDS and not (turned and reading.slot == 0):
            return
        layout = self.assignment.layout(op, op.rule.operands[reading.slot])
        nbytes = self.bytes_of(reading.value, layout)
        if reading.value in self.life.widened.operands:
            nbytes *= WIDER
        start = end = self.life.time[op.index]
        resharded = any(steps for steps, _ in self.assignment.ways[reading.group])
        if turned and not resharded:
            # The copy is made as soon as the operand is complete.
            start = min(self.life.early[reading.value] + 1, end)
        self.moved.append(Buffer(reading.value, nbytes, start, end))

    def _copy_ragged(self, op: Operator, reading: Reading) -> None:
        """Records the copies of an operand of a ragged product."""
        for copy in self.life.ragged.get((op.index, reading.slot), ()):
            layout = self.assignment.layout(op, op.rule.operands[reading.slot])
            nbytes = copy.times * self.bytes_of(reading.value, layout)
            if reading.value in self.life.widened.operands:
                nbytes *= WIDER
            self.moved.append(Buffer(reading.value, nbytes, copy.start, copy.end))

    def bytes_of(self, value: int, layout: Layout) -> float:
        """Bytes of an array's shard on one device, in the array's own type."""
        return local_bytes(self.assignment, value, layout, tiled=self.life.tiled)

    def buffers(self) -> Iterator[Buffer]:
        """Yields the buffers of all recorded copies."""
        yield from self.moved
        together: dict[_Form, _Span] = {}
        for gathers in self.sliced.values():
            times = [time for time, _ in gathers]
            span = min(times), max(times)
            together.update((key, span) for _, key in gathers)
        for key, (nbytes, (start, end)) in self.forms.items():
            value = key[0]
            yield Buffer(value, nbytes, start, end, "gathered copies")
            # The buffer into which the collective writes, before the result is copied
            # into a buffer of its own.
            first, last = together.get(key, (start, start))
            yield Buffer(value, nbytes, first, last, "collective buffers")
        for (value, layout), (start, end) in self.spread.items():
            nbytes = self.bytes_of(value, layout)
            for source in self.life.spread[value]:
                made = self.life.early.get(source, start)
                yield Buffer(value, nbytes, made, end, "activations")
        yield from self._in_place(self.copied, 0, "gathered copies")
        # A copy in 32 bits is made one time after the value itself.
        yield from self._in_place(self.widened, 1, "temporaries", WIDER)

    def _in_place(
        self, until: Mapping[int, int], later: int, kind: str, factor: int = 1
    ) -> Iterator[Buffer]:
        """Yields buffers of copies in the values' own layouts.

        Args:
          until: the end of each copy's lifetime, by value.
          later: how many time steps after the value its copy is made.
          kind: the kind of buffer.
          factor: bytes of the copy divided by bytes of the value.
        """
        for value, end in until.items():
            nbytes = factor * self.bytes_of(value, self.assignment.home_layout(value))
            start = min(self.life.early[value] + later, end)
            yield Buffer(value, nbytes, start, end, kind)


def contracts_first(op: Operator) -> bool:
    """Whether a product contracts dimensions of its left operand that are not the last.

    XLA then transposes the operand: it puts contracted dimensions last
    (``DotDecomposer``).
    """
    left = op.rule.operands[0]
    kept = op.rule.factors_of(op.rule.results[0])
    gone = [n for n, dim in enumerate(left) if dim and kept.isdisjoint(dim)]
    return gone != list(range(len(left) - len(gone), len(left)))


def _special(assignment: Assignment, life: Lifetimes) -> np.ndarray:
    """Which operators may need a copy of an operand, bool ``[operators]``."""
    readings = assignment.analysis.readings
    # If a compiler neither converts nor copies operands nor runs updates early, only
    # convolutions and ragged products copy an operand that is not resharded.
    wide = life.early or life.widened.operands or life.replacing.waits_for
    apart = PRODUCTS if wide else _COPIES_OPERANDS
    if life.ragged:
        apart |= RAGGED_PRODUCTS
    unlike = [
        bool(steps) or group.operator.kind in apart
        for group, ways in zip(readings.groups, assignment.ways, strict=True)
        for steps, _ in ways
    ]
    out = np.zeros(len(assignment.graph.operators), dtype=bool)
    out[readings.rows.operators[np.array(unlike, dtype=bool)[readings.rows.ways]]] = (
        True
    )
    out[[reader for _, reader in life.copies]] = True
    if life.spread:
        spread = life.spread.keys()
        reads = (op for op in assignment.graph.operators if op.inputs)
        out[[op.index for op in reads if not spread.isdisjoint(op.inputs)]] = True
    return out


def _all_needs(life: Lifetimes, operators: Sequence[Operator]) -> np.ndarray:
    """`Lifetimes.needs` of each operator, int ``[operators]``."""
    reads = np.array(life.reads)
    out = np.maximum(reads, np.array(life.until))
    if life.early:
        copied = [op.index for op in operators if op.kind == "stack_step"]
        out[copied] = reads[copied]
    return out


def _extend(ends: dict[int, int], value: int, end: int) -> None:
    ends[value] = max(ends.get(value, 0), end)


def _join_spans(one: _Span, other: _Span) -> _Span:
    return min(one[0], other[0]), max(one[1], other[1])


# The mesh axes, the computation and the element type of a sum. Sums that agree in them
# share a message.
_Alike = tuple[tuple[int, ...], int, str]


def buffers(
    assignment: Assignment, life: Lifetimes, only: Sequence[int] | None = None
) -> list[Buffer]:
    """Lists the buffers of one step, without the buffers of its inputs.

    Args:
      assignment: strategies as layouts.
      life: the lifetimes of values.
      only: the operators whose operands and results are listed; None for all operators.
    """
    graph = assignment.graph
    among = graph.operators if only is None else [graph.operators[k] for k in only]
    sent = sending_times(assignment, life, among)
    brought = Brought(assignment, life)
    brought.read_all(among)
    homes = _Homes(assignment, life, brought.ends, sent)
    return [*brought.buffers(), *homes.of(among)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Homes:
    """The buffers of results, before and after their sum over devices.

    Attributes:
      assignment: strategies as layouts.
      life: the lifetimes of values.
      ends: the time at which each value is last read.
      sent: for each gradient whose sum shares a message, the time of this message
        (`sending_times`).
      replaced: results of the step that are written into the buffers of inputs.
      kept: all results of the step.
      known: a cache of `_sizes`. Its key contains everything on which a result's bytes
        depend.
      spans: a cache of `_span`.
    """

    assignment: Assignment
    life: Lifetimes
    ends: Mapping[int, int]
    sent: Mapping[int, int]
    replaced: frozenset[int | None] = dataclasses.field(init=False)
    kept: frozenset[int | None] = dataclasses.field(init=False)
    known: dict[tuple[object, ...], tuple[float, float | None]] = dataclasses.field(
        default_factory=dict[tuple[object, ...], tuple[float, float | None]]
    )
    spans: dict[int, _Span] = dataclasses.field(default_factory=dict[int, _Span])

    def __post_init__(self) -> None:
        """Finds the results of the step, and which of them reuse buffers of inputs."""
        graph = self.assignment.graph
        places = (graph.outputs[i.output] for i in graph.inputs if i.output >= 0)
        object.__setattr__(self, "replaced", frozenset(places))
        object.__setattr__(self, "kept", frozenset(graph.outputs))

    def of(self, among: Sequence[Operator]) -> Iterator[Buffer]:
        """Yields the buffers of the results of operators."""
        written = self.life.written - self.replaced
        for op in among:
            yield from self._exchange_buffers(op)
            for slot, value in enumerate(op.outputs):
                if value in written:
                    yield from self._result(op, slot)

    def _result(self, op: Operator, slot: int) -> Iterator[Buffer]:
        value = op.outputs[slot]
        start, end = self.life.starts(op, value), self._end(op, value)
        if value in self.assignment.graph.accumulated:
            yield self._accumulator(value, end)
            end = start
        elif value in self.sent:
            yield from self._waiting(op, slot, end)
            return
        nbytes, before = self._sizes(op, slot)
        yield Buffer(value, nbytes, start, end, self._kind(op, value, end))
        if before is not None:
            yield Buffer(value, before, start, start, "collective buffers")
            if self.life.moves_sums:
                yield from self._carried(op, value, before)

    def _carried(self, op: Operator, value: int, nbytes: float) -> Iterator[Buffer]:
        """Yields the buffer of a summand that the next iteration of a loop sums."""
        known = self.assignment.independent
        end = known.computations[op.index]
        summing = op.class_index in known.summing
        if summing and is_moved(self.assignment, value, end):
            first, last = self._span(end)
            yield Buffer(value, nbytes, first, last, "collective buffers")

    def _span(self, computation: int) -> _Span:
        """The first and the last time of a computation, without loops inside it."""
        if computation not in self.spans:
            inside = np.array(self.assignment.independent.computations) == computation
            times = np.array(self.life.time)[inside]
            self.spans[computation] = int(times.min()), int(times.max())
        return self.spans[computation]

    def _exchange_buffers(self, op: Operator) -> Iterator[Buffer]:
        """Yields the buffer that an operator's shards need while they run.

        An array that goes around a ring needs two buffers: one to read and one to
        receive. A gathered array, or one to be scattered, needs a buffer for the shards
        of all devices. An operand that shards exchange only once needs one buffer for
        the copy. The operator's first result is accumulated in float32 over the rounds
        of the ring. A kernel may also hold intermediate values.
        """
        assignment, time = self.assignment, self.life.time[op.index]
        total, held = 0.0, op.kernel is not None and op.kernel.held_bytes
        for exchange, step, _, value in exchanges_of(assignment, op):
            nbytes = local_bytes(assignment, value, step.layout, tiled=self.life.tiled)
            if exchange.around:
                gathered = assignment.gathers_keys(op)
                parts = shards((step.axes,), assignment.sizes) if gathered else 2
                total += parts * exchange.widened * nbytes
            elif not exchange.result:
                total += nbytes
        if total or held:
            value, dims = op.outputs[0], op.rule.results[0]
            layout = assignment.layout(op, dims)
            nbytes = local_bytes(assignment, value, layout, tiled=self.life.tiled)
            wide = WIDER if is_narrow(assignment.graph, value) else 1
            if op.kernel is not None and held:
                share = nbytes / assignment.graph.values[value].nbytes
                total += min(held, op.kernel.inner_bytes * share)
            yield Buffer(value, total + wide * nbytes, time, time, "collective buffers")

    def _sizes(self, op: Operator, slot: int) -> tuple[float, float | None]:
        """Bytes of a result in its final layout, and in the layout before it.

        The second number is None if the result is neither summed nor resharded.
        """
        value, life = op.outputs[slot], self.life
        home = self.assignment.contraction.homes.get(value)
        wide = value in life.widened.held
        kernel = life.tiled and value in self.assignment.analysis.in_kernels
        part, held = life.rounded.part(value), self.assignment.partial_layout(value)
        key = op.class_index, slot, home, wide, kernel, part, held
        if key not in self.known:
            self.known[key] = self._sizes_of(op, slot, part)
        return self.known[key]

    def _sizes_of(
        self, op: Operator, slot: int, part: float
    ) -> tuple[float, float | None]:
        value, assignment = op.outputs[slot], self.assignment
        held = assignment.partial_layout(value)
        if held is not None:
            # The value stays partial and is summed later, so it is not rounded at this
            # point.
            return self._bytes(value, held[1]), None
        home = assignment.home_layout(value)
        nbytes = part * self._bytes(value, home)
        if op.class_index not in assignment.contraction.node_of:
            return nbytes, None
        own = assignment.layout(op, op.rule.results[slot])
        same = shards(own, assignment.sizes) == shards(home, assignment.sizes)
        partial = bool(assignment.partial(op))
        if same and not partial:
            return nbytes, None
        # Sums over devices are computed before the result is rounded.
        return nbytes, (1.0 if partial else part) * self._bytes(value, own)

    def _end(self, op: Operator, value: int) -> int:
        """The last time at which a result is needed in its own layout and type."""
        last = len(self.assignment.graph.operators) - 1
        start = self.life.time[op.index]
        end = last if value in self.kept else max(start, self.ends.get(value, start))
        if value in self.life.widened.operands:
            # The copy in 32 bits is made one time after the value itself.
            end = max(end, min(start + 1, last))
        return max(end, held_until(op, self.life))

    def _waiting(self, op: Operator, slot: int, end: int) -> Iterator[Buffer]:
        """Yields the buffers of a gradient that waits for its message, and of its sum.

        Every device receives the whole sum, even if it then keeps only a slice.
        """
        value = op.outputs[slot]
        sent = self.sent[value]
        own = self.assignment.layout(op, op.rule.results[slot])
        nbytes = local_bytes(self.assignment, value, own, tiled=self.life.tiled)
        if self.life.widens and is_narrow(self.assignment.graph, value):
            nbytes *= WIDER
        start = self.life.starts(op, value)
        yield Buffer(value, nbytes, start, sent, "collective buffers")
        yield Buffer(value, nbytes, sent, max(sent, end), "gradients")

    def _accumulator(self, value: int, end: int) -> Buffer:
        """The buffer to which microbatches add, live from the first microbatch on."""
        held = self.assignment.partial_layout(value)
        layout = self.assignment.home_layout(value) if held is None else held[1]
        return Buffer(value, self._bytes(value, layout), 0, end, "gradients")

    def _bytes(self, value: int, layout: tuple[tuple[int, ...], ...]) -> float:
        """Bytes of a result on one device, in the type in which memory holds it."""
        nbytes = local_bytes(self.assignment, value, layout, tiled=self.life.tiled)
        return WIDER * nbytes if value in self.life.widened.held else nbytes

    def _kind(self, op: Operator, value: int, end: int) -> str:
        """The kind of buffer (`BUFFER_KINDS`) of a result that lives until ``end``."""
        if value in self.kept:
            return "results"
        summing = self.assignment.independent.summing
        if op.role is Role.BACKWARD and op.class_index in summing:
            return "gradients"
        last = self.assignment.graph.operators[self.life.order[end]]
        if op.role is Role.FORWARD and last.role is not op.role:
            return "activations"
        return "temporaries"


def held_until(op: Operator, life: Lifetimes) -> int:
    """The end of the loop or branch for which an operator makes a carry or stacked
    result.
    """
    return -1 if op.kind == "slice_step" else life.until[op.index]


def sending_times(
    assignment: Assignment, life: Lifetimes, among: Sequence[Operator]
) -> Mapping[int, int]:
    """For each gradient, the time of the message that carries its sum.

    A combiner joins sums over the same devices, of one element type and in one
    computation, into one message (`autopar.cost.combining`). The message is sent when
    its last summand is complete. Until then the other summands wait in memory, in the
    layouts in which their operators made them. Afterwards the sums wait for their
    updates, which run one after the other. Therefore memory holds both the summands and
    the sums while the message is sent. Compilers that hide messages limit the size of a
    message. XLA's compiler for CPUs does not limit the size.

    Args:
      assignment: strategies as layouts.
      life: the lifetimes of values, and the number of sums in a message.
      among: the operators whose results are considered.
    """
    if not life.joined_sums:
        return {}
    alike: dict[_Alike, list[tuple[int, int]]] = {}
    for op in among:
        for value, axes in _sums_for_update(assignment, op):
            where = assignment.independent.computations[op.index]
            key = axes, where, str(assignment.graph.values[value].dtype)
            alike.setdefault(key, []).append((life.time[op.index], value))
    out: dict[int, int] = {}
    for sums in alike.values():
        for first in range(0, len(sums), life.joined_sums):
            together = sums[first : first + life.joined_sums]
            sent = max(time for time, _ in together)
            out.update((value, sent) for _, value in together)
    return out


def _sums_for_update(
    assignment: Assignment, op: Operator
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields an operator's results that are all-reduced and read only by the update.

    Each result comes with the mesh axes of its sum.
    """
    if op.kind == "return" or op.class_index not in assignment.independent.summing:
        return
    if op.class_index not in assignment.contraction.node_of:
        return
    for slot, value in enumerate(op.outputs):
        steps = assignment.result_steps(op, slot)
        axes = next((s.axes for s in steps if s.kind in SUMS), None)
        if axes is not None:
            yield value, axes
