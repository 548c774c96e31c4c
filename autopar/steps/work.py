"""The work of operators: how often they run, and what one run does."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar.steps.fusion import Fusion, is_elementwise, is_product, side_factors
from autopar.steps.rounded import NOT_ROUNDED, Rounded
from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.program.equations import Value

# Operators that read a part of their first operand, as large as their result.
_TAKING = frozenset({"slice", "dynamic_slice", "gather"})
# Operators that write into their first operand -> which operand is what they write.
_PLACING = {
    "dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter-mul": 2,
    "scatter-min": 2, "scatter-max": 2,
}  # fmt: skip


def class_trips(graph: OperatorGraph) -> dict[int, float]:
    """Returns how often the operators of each class run in a step, together."""
    out: dict[int, float] = {}
    for op in graph.operators:
        out[op.class_index] = out.get(op.class_index, 0.0) + op.trips
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of an operator, in any layout.

    Attributes:
      op: the operator.
      dtype: of its first operand, or what a kernel works on.
      itemsize: bytes of an element of it.
      traffic: values, and how many bytes of each it reads from memory or writes to it.
      kernel: whether it writes a result, so that it starts a kernel of its own.
      sides: of a product, the factors of its sides M, N and K; empty for others.
      looked_up: factors of the array that it takes parts of by index, or writes them
        into, which the parts do not have. Where an axis splits them no device knows
        which rows are its own before it has looked, so each goes through all of them.
    """

    op: Operator
    dtype: str
    itemsize: float
    traffic: tuple[tuple[int, float], ...]
    kernel: bool
    sides: tuple[tuple[int, ...], ...] = ()
    looked_up: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> float:
        """Bytes that it reads from memory and writes to it, of whole arrays."""
        return sum(n for _, n in self.traffic)

    def memory_parts(self, parts: Sequence[float]) -> float:
        """Into how many parts its memory traffic is split.

        Args:
          parts: into how many each factor of its rule is split.
        """
        return math.prod(n for f, n in enumerate(parts) if f not in self.looked_up)

    @property
    def is_matrix(self) -> bool:
        """Whether the matrix units do it."""
        kernel = self.op.kernel
        return bool(self.sides) if kernel is None else kernel.matrix

    @property
    def unfolds(self) -> bool:
        """Whether it is a convolution, which may unfold its patches."""
        return self.op.kind == "conv_general_dilated"


@dataclasses.dataclass(frozen=True, slots=True)
class InMemory:
    """The values of a graph that are in memory, with who makes and who reads them.

    Attributes:
      fusion: which of them are.
      makers: value -> the operator that makes it.
      readers: value -> how many operators read it.
      made_from: of each value that is not, what its kernel reads for it: arrays in
        memory, and the bytes. Empty: every operator is charged what it reads itself.
      rounded: values of float32 that are in memory in bfloat16.
    """

    fusion: Fusion
    makers: Mapping[int, Operator]
    readers: Mapping[int, int]
    made_from: Mapping[int, Mapping[int, float]] = dataclasses.field(
        default_factory=dict
    )
    rounded: Rounded = NOT_ROUNDED


def in_memory(
    graph: OperatorGraph,
    fusion: Fusion,
    *,
    by_kernel: bool = False,
    rounded: Rounded = NOT_ROUNDED,
) -> InMemory:
    """The values of a graph that are in memory after fusion.

    Args:
      graph: the operator graph.
      fusion: which of them are.
      by_kernel: whether a kernel is charged what it reads once, where it writes. Else
        each of its operators is charged what it reads itself.
      rounded: values of float32 that are in memory in bfloat16.
    """
    readers: Counter[int] = Counter()
    for op in graph.operators:
        readers.update({v for v in op.inputs if v is not None})
    made_from = _made_from(graph, fusion) if by_kernel else {}
    return InMemory(fusion, producers(graph.operators), readers, made_from, rounded)


def _made_from(graph: OperatorGraph, fusion: Fusion) -> dict[int, dict[int, float]]:
    """See `InMemory.made_from`. A value that nothing in memory goes into has none."""
    out: dict[int, dict[int, float]] = {}
    for op in graph.operators:
        fused = [v for v in op.outputs if v not in fusion.in_memory]
        if not fused:
            continue
        found: list[Mapping[int, float]] = []
        for slot, value in enumerate(op.inputs):
            if value is None:
                continue
            if value not in fusion.in_memory:
                found.append(out.get(value, {}))
                continue
            part = slot == 0 and op.kind in _TAKING
            read = op.outputs[0] if part else value
            found.append({value: float(graph.values[read].nbytes)})
        out.update(dict.fromkeys(fused, _most_of(found)))
    return out


def _most_of(found: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """The most bytes that are read of each array."""
    out: dict[int, float] = {}
    for read in found:
        for source, nbytes in read.items():
            out[source] = max(out.get(source, 0.0), nbytes)
    return out


def operator_work(graph: OperatorGraph, op: Operator, memory: InMemory) -> OperatorWork:
    """Returns what an operator does.

    Args:
      graph: the operator graph.
      op: the operator.
      memory: which of its values are in memory.
    """
    written = memory.fusion.in_memory
    # The first operand if it is an array; a callback may have neither it nor a result.
    arrays = (*op.inputs[:1], *op.outputs, *op.inputs[1:])
    read = [graph.values[v] for v in arrays if v is not None]
    value = read[0] if read else Value((), np.dtype(np.int32))
    dtype = str(value.dtype) if op.kernel is None else op.kernel.dtype
    return OperatorWork(
        op,
        dtype,
        value.nbytes / max(1, value.size),
        tuple((v, memory.rounded.part(v) * n) for v, n in _traffic(graph, op, memory)),
        any(v in written for v in op.outputs),
        side_factors(op.rule) if is_product(op) else (),
        _looked_up(op),
    )


def _looked_up(op: Operator) -> frozenset[int]:
    """The factors of rows that are found by index: see `OperatorWork.looked_up`."""
    if op.kind == "gather":
        part = op.rule.results[0]
    elif op.kind in _PLACING and op.kind.startswith("scatter"):
        part = op.rule.operands[_PLACING[op.kind]]
    else:
        return frozenset()
    return op.rule.factors_of(op.rule.operands[0]) - op.rule.factors_of(part)


def _copies(op: Operator, memory: InMemory) -> float:
    """How often a loop moves a step's part of an array once it is made.

    What makes it element by element writes it into its place; that is counted there.
    It writes it once more where the loop's body reads it, too. Of anything else the
    result is copied, read and written.
    """
    value = op.inputs[0]
    maker = None if value is None else memory.makers.get(value)
    if maker is None or not is_elementwise(maker):
        return 2.0
    assert value is not None
    return 1.0 if memory.readers[value] > 1 else 0.0


def _traffic(
    graph: OperatorGraph, op: Operator, memory: InMemory
) -> tuple[tuple[int, float], ...]:
    """The arrays that an operator reads from memory and writes to it, with the bytes.

    What takes a part of an array reads no more than the part, and what writes into an
    array writes no more, in its place (openxla/xla, ``HloCostAnalysis``: HandleSlice,
    HandleGather, HandleDynamicUpdateSlice, HandleScatter).
    """
    fusion, values = memory.fusion, graph.values
    if memory.made_from and fusion.in_memory.isdisjoint(op.outputs):
        return ()

    def held(found: Sequence[int | None]) -> list[tuple[int, float]]:
        sources = (memory.made_from.get(v, {}) for v in found if v is not None)
        read = _most_of(sources)
        known = [v for v in found if v is not None and v in fusion.in_memory]
        return [
            *((v, float(values[v].nbytes)) for v in known),
            *((v, n) for v, n in read.items() if v not in known),
        ]

    made = op.outputs[0] if op.outputs else None
    if made is not None and op.kind == "slice_step":
        # Without a buffer of its own its readers read it where it lies.
        copied = 2.0 * values[made].nbytes if made in fusion.buffers else 0.0
        return ((made, copied),)
    if made is not None and op.kind == "stack_step":
        layers = max(1, values[made].shape[0])
        return ((made, _copies(op, memory) * values[made].nbytes / layers),)
    if made is not None and op.kind in _TAKING and op.inputs[0] in fusion.in_memory:
        part = float(values[made].nbytes)
        return ((made, part), *held(op.inputs[1:]), *held(op.outputs))
    slot = _PLACING.get(op.kind, 0)
    update = op.inputs[slot] if 0 < slot < len(op.inputs) else None
    if update is not None:
        read = 2.0 if op.kind.startswith("scatter-") else 1.0
        return (*held(op.inputs[1:]), (update, read * values[update].nbytes))
    return tuple(held((*op.inputs, *op.outputs)))
