"""The work of operators: the number of runs, and the work of one run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar.steps.batch import DimLabels
from autopar.steps.fusion import Fusion, is_elementwise, is_product, side_factors
from autopar.steps.nodes import Contraction
from autopar.steps.ragged import ragged_groups, sums_groups
from autopar.steps.rounding import NOT_ROUNDED, Rounded
from autopar_passes.graph.operators import (
    TO_DEVICES,
    TO_HOST,
    Operator,
    OperatorGraph,
    producers,
)
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Value

# Operators that read only a part of their first operand. The part has the size of the
# result.
_TAKING = frozenset({"slice", "dynamic_slice", "gather"})
# Operator that writes into its first operand -> the position of the operand with the
# data that it writes.
_PLACING = {
    "dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter-mul": 2,
    "scatter-min": 2, "scatter-max": 2,
}  # fmt: skip


def class_trips(graph: OperatorGraph) -> dict[int, float]:
    """Returns the total number of runs of the operators of each class in a step."""
    out: dict[int, float] = {}
    for op in graph.operators:
        out[op.class_index] = out.get(op.class_index, 0.0) + op.trips
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of an operator on whole arrays, before sharding.

    Attributes:
      op: the operator.
      dtype: the dtype of the first operand, or the dtype in which a kernel computes.
      itemsize: bytes of an element of the first operand.
      traffic: pairs of a value and the number of its bytes that the operator reads from
        memory or writes to it.
      kernel: whether the operator writes a result to memory, so that it needs a
        separate kernel.
      sides: for a product, the factors of its sides M, N and K; empty for other
        operators.
      looked_up: for a gather or scatter, the factors of the indexed array that the
        gathered or written rows lack. If a mesh axis splits such a factor, a device
        must check every index to find the rows in its own shard, so it processes all
        rows.
      groups: for a ragged product, the number of its groups; 1 for other operators.
    """

    op: Operator
    dtype: str
    itemsize: float
    traffic: tuple[tuple[int, float], ...]
    kernel: bool
    sides: tuple[tuple[int, ...], ...] = ()
    looked_up: frozenset[int] = frozenset()
    groups: int = 1

    @property
    def nbytes(self) -> float:
        """Bytes of memory traffic of the operator on whole arrays, without sharding."""
        return sum(n for _, n in self.traffic)

    @property
    def is_matrix(self) -> bool:
        """Whether the matrix units compute the operator."""
        kernel = self.op.kernel
        return bool(self.sides) if kernel is None else kernel.matrix

    @property
    def copies_memory(self) -> bool:
        """Whether the operator copies between the memories of a host and its devices.

        Its traffic is then that of the link between the two.
        """
        return self.op.kind in (TO_HOST, TO_DEVICES)

    @property
    def unfolds(self) -> bool:
        """Whether the operator is a convolution, which may copy patches to memory."""
        return self.op.kind == "conv_general_dilated"


@dataclasses.dataclass(frozen=True, eq=False)
class WorkTable:
    """The work of a step's operators as arrays with one row for each class.

    Attributes:
      works: the work of the first operator of each class.
      operators: int ``[rows]``, the position of the first operator of the class.
      trips: ``[rows]``, the total number of runs of the operators of the class in a
        step.
      update: bool ``[rows]``, whether the operators belong to the update.
      kernels: bool ``[rows]``, whether each operator needs a separate kernel.
      matrix: bool ``[rows]``, whether the matrix units compute the operators.
      flops: ``[rows]``, FLOPs of one run on whole arrays.
      flops_degree: int ``[rows]``, the number of factors of the operator that grow with
        the batch.
      nbytes: ``[rows, degrees]``, bytes of memory traffic of one run. Entry ``[:, d]``
        is the traffic of arrays with ``d`` dimensions that grow with the batch.
      sides: ``[rows, 3]``, the sizes M, N and K of products; 1 for other operators.
      sides_degree: int ``[rows, 3]``, the number of factors of each side that grow with
        the batch.
      split_by: int ``[rows, factors]``, for each factor of a rule, the position in
        `node_splits` of the number of its shards; 0 where there is no factor.
      memory_split_by: like ``split_by``, but only for the factors whose sharding
        divides the memory traffic.
      sides_split_by: int ``[rows, 3, factors]``, like ``split_by`` for the factors of
        each side of a product.
      alike: groups of rows of this table for which one formula gives the seconds.
    """

    works: tuple[OperatorWork, ...]
    operators: np.ndarray
    trips: np.ndarray
    update: np.ndarray
    kernels: np.ndarray
    matrix: np.ndarray
    flops: np.ndarray
    flops_degree: np.ndarray
    nbytes: np.ndarray
    sides: np.ndarray
    sides_degree: np.ndarray
    split_by: np.ndarray
    memory_split_by: np.ndarray
    sides_split_by: np.ndarray
    alike: tuple[np.ndarray, ...]


def first_splits(contraction: Contraction) -> list[int]:
    """Returns the position of each node's first factor in the list of all splits.

    The list has the number of shards of each factor of each node.

    Position 0 of the list stands for factors that are not split.

    Args:
      contraction: the nodes.
    """
    sizes = [len(node.factors) for node in contraction.nodes]
    return np.cumsum([1, *sizes])[:-1].tolist()


def work_table(
    works: Mapping[int, OperatorWork],
    contraction: Contraction,
    labels: DimLabels,
    trips: Mapping[int, float],
) -> WorkTable:
    """Returns the work of a step as arrays.

    Args:
      works: class -> the work of one of its operators.
      contraction: the nodes that choose the sharding of the operators.
      labels: the dimensions and factors that grow with the batch.
      trips: class -> the total number of runs of its operators in a step.
    """
    first, rows = first_splits(contraction), list(works.values())
    splits: list[list[int]] = []
    memory: list[list[int]] = []
    sides: list[list[list[int]]] = []
    growing: list[frozenset[int]] = []
    alike: dict[object, list[int]] = {}
    for row, work in enumerate(rows):
        op = work.op
        node = contraction.node(op)
        own = node.members[op.class_index]
        places = [first[node.index] + k if k >= 0 else 0 for k in own]
        splits.append(places)
        memory.append([0 if f in work.looked_up else k for f, k in enumerate(places)])
        sides.append([[places[f] for f in side] for side in work.sides or ((),) * 3])
        growing.append(labels.batch_factors(op.index))
        kernel = None if op.kernel is None else (op.kernel.dtype, op.kernel.efficiency)
        kind = work.dtype, work.itemsize, work.is_matrix, kernel, work.unfolds
        kind = *kind, work.copies_memory, work.groups
        kind = *kind, work.groups > 1 and sums_groups(op.rule)
        alike.setdefault((*kind, bool(work.sides)), []).append(row)
    traffic = [[(labels.degree(v), n) for v, n in work.traffic] for work in rows]
    degrees = 1 + max((d for own in traffic for d, _ in own), default=0)
    nbytes = np.zeros((len(rows), degrees))
    for row, own in enumerate(traffic):
        for degree, size in own:
            nbytes[row, degree] += size
    whole = [
        [math.prod(w.op.rule.sizes[f] for f in side) for side in w.sides or ((),) * 3]
        for w in rows
    ]
    grow = [
        [sum(f in own for f in side) for side in w.sides or ((),) * 3]
        for w, own in zip(rows, growing, strict=True)
    ]
    longest = max((len(places) for places in splits), default=0)
    flat = _pad_rows([side for own in sides for side in own], longest)
    return WorkTable(
        works=tuple(rows),
        operators=np.array([w.op.index for w in rows], int),
        trips=np.array([trips[member] for member in works], float),
        update=np.array([w.op.role is Role.UPDATE for w in rows], bool),
        kernels=np.array([w.kernel for w in rows], bool),
        matrix=np.array([w.is_matrix for w in rows], bool),
        flops=np.array([w.op.flops for w in rows], float),
        flops_degree=np.array([len(own) for own in growing], int),
        nbytes=nbytes,
        sides=np.array(whole, float).reshape(len(rows), 3),
        sides_degree=np.array(grow, int).reshape(len(rows), 3),
        split_by=_pad_rows(splits, longest),
        memory_split_by=_pad_rows(memory, longest),
        sides_split_by=flat.reshape(len(rows), 3, longest),
        alike=tuple(np.array(own, int) for own in alike.values()),
    )


def _pad_rows(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Pads rows of positions with 0, the position of factors that are not split."""
    out = np.zeros((len(rows), length), int)
    for k, places in enumerate(rows):
        out[k, : len(places)] = places
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class InMemory:
    """The values of a graph that are in memory, with their producers and readers.

    Attributes:
      fusion: the values that are in memory after fusion.
      makers: value -> the operator that computes it.
      readers: value -> the number of operators that read it.
      made_from: value that is not in memory -> the arrays in memory from which the
        kernel computes the value, with the bytes read from each. If this mapping is
        empty, every operator is charged for its own reads.
      rounded: float32 values that are in memory in bfloat16.
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
    """Returns the values of a graph that are in memory after fusion.

    Args:
      graph: the operator graph.
      fusion: the values that are in memory after fusion.
      by_kernel: whether the bytes that a fused kernel reads are charged once, to the
        operator that writes its result. Otherwise each operator of the kernel is
        charged for its own reads.
      rounded: float32 values that are in memory in bfloat16.
    """
    readers: Counter[int] = Counter()
    for op in graph.operators:
        readers.update({v for v in op.inputs if v is not None})
    made_from = _made_from(graph, fusion) if by_kernel else {}
    return InMemory(fusion, producers(graph.operators), readers, made_from, rounded)


def _made_from(graph: OperatorGraph, fusion: Fusion) -> dict[int, dict[int, float]]:
    """Returns `InMemory.made_from`.

    A value that is computed from no array in memory has an empty entry.
    """
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
    """Returns, for each array, the largest number of bytes in any of the mappings."""
    out: dict[int, float] = {}
    for read in found:
        for source, nbytes in read.items():
            out[source] = max(out.get(source, 0.0), nbytes)
    return out


def operator_work(graph: OperatorGraph, op: Operator, memory: InMemory) -> OperatorWork:
    """Returns the work of an operator.

    Args:
      graph: the operator graph.
      op: the operator.
      memory: the values of the graph that are in memory.
    """
    written = memory.fusion.in_memory
    # The first operand gives the dtype if it is an array, otherwise the first result. A
    # callback may have neither.
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
        ragged_groups(op),
    )


def _looked_up(op: Operator) -> frozenset[int]:
    """Returns `OperatorWork.looked_up`, the factors of the rows of an indexed array."""
    if op.kind == "gather":
        part = op.rule.results[0]
    elif op.kind in _PLACING and op.kind.startswith("scatter"):
        part = op.rule.operands[_PLACING[op.kind]]
    else:
        return frozenset()
    return op.rule.factors_of(op.rule.operands[0]) - op.rule.factors_of(part)


def _copies(op: Operator, memory: InMemory) -> float:
    """Returns how often a loop copies one iteration's part of a stack.

    The operator that computes the part does not count these moves as its work.

    An element-wise operator writes the part directly into the stack; its own work
    counts this writing. It writes the part once more if the body of the loop also reads
    the part. The result of any other operator is copied into the stack, which reads and
    writes the part.
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
    """Returns the arrays that an operator reads or writes in memory, with the bytes.

    An operator that takes a part of an array reads only the part. An operator that
    writes a part of an array writes only the part, in place (in ``HloCostAnalysis`` of
    openxla/xla, see HandleSlice, HandleGather, HandleDynamicUpdateSlice and
    HandleScatter).
    """
    fusion, values = memory.fusion, graph.values
    if op.kind in (TO_HOST, TO_DEVICES):
        return ((op.outputs[0], float(values[op.outputs[0]].nbytes)),)
    if memory.made_from and fusion.in_memory.isdisjoint(op.outputs):
        return ()

    def held_parts(found: Sequence[int | None]) -> list[tuple[int, float]]:
        sources = (memory.made_from.get(v, {}) for v in found if v is not None)
        read = _most_of(sources)
        known = [v for v in found if v is not None and v in fusion.in_memory]
        return [
            *((v, float(values[v].nbytes)) for v in known),
            *((v, n) for v, n in read.items() if v not in known),
        ]

    made = op.outputs[0] if op.outputs else None
    if made is not None and op.kind == "slice_step":
        # A part without a buffer of its own is read in the stack.
        copied = 2.0 * values[made].nbytes if made in fusion.buffers else 0.0
        return ((made, copied),)
    if made is not None and op.kind == "stack_step":
        layers = max(1, values[made].shape[0])
        return ((made, _copies(op, memory) * values[made].nbytes / layers),)
    if made is not None and op.kind in _TAKING and op.inputs[0] in fusion.in_memory:
        part = float(values[made].nbytes)
        return ((made, part), *held_parts(op.inputs[1:]), *held_parts(op.outputs))
    slot = _PLACING.get(op.kind, 0)
    update = op.inputs[slot] if 0 < slot < len(op.inputs) else None
    if update is not None:
        read = 2.0 if op.kind.startswith("scatter-") else 1.0
        return (*held_parts(op.inputs[1:]), (update, read * values[update].nbytes))
    return tuple(held_parts((*op.inputs, *op.outputs)))
