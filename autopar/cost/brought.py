"""Buffers of arrays that are resharded, transposed or converted for their readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.cost.local import Buffer, local_bytes
from autopar.layouts.assignment import Assignment, Way
from autopar.layouts.layout import Layout
from autopar.steps.lifetimes import Lifetimes
from autopar.steps.readings import Reading
from autopar.steps.rounding import WIDER
from autopar_passes.graph.operators import PRODUCTS, Operator
from autopar_passes.graph.roles import Role

# Convolutions run on copies of their operands, in the dimension order of their kernels.
_COPIES_OPERANDS = frozenset({"conv_general_dilated"})
# A resharded array: the value's number, whether the backward pass gathers it again, and
# its layouts on the way from the first to the last.
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

    def read_all(self, among: Sequence[Operator]) -> None:
        """Records what operators read.

        Most operators read values in the values' own layouts, orders and types. For
        these reads only the last time is recorded.
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
            # The copy is made from the operands of the value's own operator, in the
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
            return
        _extend(self.widened if wide else self.ends, source, until)
        if product and not wide and self._overtaken(op, source):
            _extend(self.copied, source, until)

    def _overtaken(self, op: Operator, source: int) -> bool:
        """Whether a parameter's update may run before an operator that reads it.

        The update runs only after the gradients that it needs.
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

    def bytes_of(self, value: int, layout: Layout) -> float:
        """Bytes of an array's shard on one device, in the array's own type."""
        return local_bytes(self.assignment, value, layout, tiled=self.life.tiled)

    def buffers(self) -> Iterator[Buffer]:
        """Yields the buffers of all recorded copies."""
        yield from self.moved
        for (value, *_), (nbytes, (start, end)) in self.forms.items():
            yield Buffer(value, nbytes, start, end, "gathered copies")
            # The buffer into which the collective writes, before the result is copied
            # into a buffer of its own.
            yield Buffer(value, nbytes, start, start, "collective buffers")
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
    # A compiler that does none of these needs no copies of operands that are not
    # resharded.
    wide = life.early or life.widened.operands or life.replacing.waits_for
    apart = PRODUCTS if wide else _COPIES_OPERANDS
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
