"""When values are made and last needed, and which have a buffer of their own.

This part of the memory model does not depend on any layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.steps.work import is_elementwise
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import Role

# Element-wise operators that XLA does not compute once for each reader
# (openxla/xla, HloInstruction::IsExpensive as instruction fusion applies it).
_COSTLY = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan2", "cbrt", "cos", "digamma", "div",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p",
        "logistic", "pow", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
# Readers into which nothing is fused.
_OPAQUE = frozenset(
    {
        "dot_general", "conv_general_dilated", "sort", "top_k", "enter", "carry",
        "merge", "slice_step", "stack_step", "scatter-add", "scatter", "return",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetimes:
    """What does not depend on the assignment: when values are made and read.

    Attributes:
      time: when each operator runs; an update runs once its gradient is there.
      written: values with a buffer of their own.
      reads: per operator, when its results are last needed (its own time, or
        that of the readers it is fused into).
    """

    time: tuple[int, ...]
    written: frozenset[int]
    reads: tuple[int, ...]


def lifetimes(graph: OperatorGraph, floating: frozenset[int]) -> Lifetimes:
    """Derives the order of operators and what is fused into what."""
    readers: dict[int, list[Operator]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v is not None:
                readers.setdefault(v, []).append(op)
    time = _schedule(graph)
    outputs = {v for v in graph.outputs if v is not None}
    written: set[int] = set()
    reads = list(time)
    for op in reversed(graph.operators):
        for slot, v in enumerate(op.outputs):
            users = readers.get(v, [])
            if v not in floating and (v in outputs or _needs_buffer(op, slot, users)):
                written.add(v)
        if not any(v in written for v in op.outputs) and op.kind != "return":
            ends = [reads[r.index] for v in op.outputs for r in readers.get(v, [])]
            reads[op.index] = max([time[op.index], *ends])
    return Lifetimes(tuple(time), frozenset(written), tuple(reads))


def _needs_buffer(op: Operator, slot: int, users: Sequence[Operator]) -> bool:
    if op.kind in ("input", "enter"):
        return False
    if op.kind == "carry":
        # Inside and after the loop a carry is one buffer: that of the last output.
        return slot == len(op.outputs) - 1
    if op.kind == "slice_step":
        # One step of a scanned array is read where it lies.
        return any(r.kind in _OPAQUE for r in users)
    if not is_elementwise(op):
        return True
    if any(r.kind in _OPAQUE for r in users):
        return True
    if len({r.index for r in users}) < 2:
        return False
    if op.kind in _COSTLY:
        return True
    # What is cheap to make from one array is made again from that, if it is kept.
    arrays = {v for v in op.inputs if v is not None}
    return len({r.role for r in users}) > 1 and len(arrays) > 1


def _schedule(graph: OperatorGraph) -> list[int]:
    """Program order, but for updates, which run once what they read is there."""
    made: dict[int, int] = {}
    time: list[int] = []
    for op in graph.operators:
        when = op.index
        if op.role is Role.UPDATE and op.inputs:
            when = max((made.get(v, 0) for v in op.inputs if v is not None), default=0)
        time.append(when)
        made.update((v, when) for v in op.outputs)
    return time
