"""Which values a fusing compiler writes to memory: one notion for time and memory.

An element-wise result is fused into its readers. It is written where a reader is
opaque to fusion (a product, a sort, a boundary), where it is costly and read more than
once, or where the forward and the backward pass both read it. Every result of an
operator that is not element-wise is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from autopar_passes.graph.operators import PRODUCTS, Operator, OperatorGraph
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

# Boundary operators hand values over; they compute nothing.
BOUNDARY = frozenset({"input", "return", "enter", "carry", "merge"})
# Element-wise operators that XLA does not compute once for each reader
# (openxla/xla, HloInstruction::IsExpensive as instruction fusion applies it).
_COSTLY = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan2", "cbrt", "cos", "digamma", "div",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p",
        "logistic", "pow", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
# Those of them that take over 150 clock cycles an element on an H100
# (openxla/xla, ``xla/service/gpu/model/hlo_op_profiles_data.h``).
_DEAR = _COSTLY - {"div", "exp", "exp2", "logistic", "rem", "rsqrt", "sqrt", "tanh"}
# Of float32 it is made again: GPTs and an MLP mixer keep what GELU takes it of.
_KEPT = {("tanh", "bfloat16"), ("tanh", "float16")}
# Readers into which nothing is fused, `is_product` beside them.
_OPAQUE = frozenset(
    {
        "sort", "top_k", "enter", "carry", "merge", "slice_step", "stack_step",
        "scatter-add", "scatter", "return",
    }
)  # fmt: skip

# What is no element-wise operator, whatever its factors are, `is_product` beside them.
_APART = BOUNDARY | {
    "slice_step", "stack_step", "random_bits", "threefry2x32", "gather", "scatter-add",
    "sort", "top_k",
}  # fmt: skip

_CALLS = BOUNDARY | {
    "slice_step", "stack_step", "sort", "top_k", "optimization_barrier",
}  # fmt: skip

# A kernel does not read more arrays than this; the limit only bounds the work here.
_MOST_SOURCES = 32
# A kernel takes no operator that it would compute at over so many places for each
# element (openxla/xla, ``kMaxEvaluationsPerNode`` of FusionNodeEvaluations).
_MOST_PLACES = 15
# Operators that read their operands at other places than they write.
_SHIFTING = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice", "split"})
_OWN_PLACE = frozenset({0})
# Operators whose results lie in the buffer of what they hand over.
_HANDING = BOUNDARY | {"slice_step"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """The values of a program that are in memory after fusion.

    Attributes:
      buffers: values with a buffer of their own.
      in_memory: these, and values that lie in the buffer of another: inputs, what
        loops hand over, and one step of a scanned array. Reading or making them
        costs memory traffic.
    """

    buffers: frozenset[int]
    in_memory: frozenset[int]


def fusion(graph: OperatorGraph, floating: frozenset[int]) -> Fusion:
    """Decides which values are written to memory.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
    """
    readers = _readers(graph)
    outputs = _handed_out(graph)

    def writes(op: Operator, slot: int, value: int) -> bool:
        return value in outputs or _needs_buffer(op, slot, readers.get(value, []))

    return _find_fusion(graph, floating, writes)


def _find_fusion(
    graph: OperatorGraph,
    floating: frozenset[int],
    writes: Callable[[Operator, int, int], bool],
) -> Fusion:
    """The values in memory, in program order.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
      writes: whether an operator writes a result: the operator, the slot, the value.
    """
    buffers: set[int] = set()
    handed: set[int] = set()
    for op in graph.operators:
        if op.kind in _HANDING:
            handed.update(op.outputs)
        if op.kind == "enter" and not floating.isdisjoint(op.inputs):
            # A loop takes arrays: what its readers could make anew is made before it.
            buffers.update(op.outputs)
        buffers.update(v for slot, v in enumerate(op.outputs) if writes(op, slot, v))
    kept = frozenset(buffers - floating)
    return Fusion(kept, kept | (handed - floating))


def is_product(op: Operator) -> bool:
    """Whether the matrix units may do the operator.

    A `dot_general` needs more than one element along each of its sides M, N and K.
    Compilers write the others as a multiplication of elements, with a sum of them
    where something is contracted (openxla/xla, AlgebraicSimplifierVisitor::HandleDot).
    """
    if op.kind != "dot_general":
        return op.kind in PRODUCTS
    sizes = op.rule.sizes
    return all(math.prod(sizes[f] for f in side) > 1 for side in side_factors(op.rule))


def side_factors(rule: FactorRule) -> tuple[tuple[int, ...], ...]:
    """The factors of the sides M, N and K of a product.

    M is only in the left operand and the result, N only in the right one and the
    result, K is reduced.
    """
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    result = rule.factors_of(rule.results[0])
    sides = ((left - right) & result, (right - left) & result, (left & right) - result)
    return tuple(tuple(sorted(side)) for side in sides)


def made_again(
    graph: OperatorGraph, floating: frozenset[int], *, into_products: bool = False
) -> Fusion:
    """`fusion`, by a compiler that makes element-wise results again in each reader.

    XLA's GPU compiler fuses an element-wise result, a costly one too, into all its
    readers where that moves fewer bytes (openxla/xla,
    ``xla/service/gpu/transforms/priority_fusion.cc``). Made from arrays of L bytes in
    memory, a result of V bytes with c readers costs ``c L`` fused, and ``L + (1 + c)
    V`` written. What takes over 150 clock cycles an element is not made again. So the
    softmax of a forward pass leaves its scores in memory, and the
    backward pass takes the exponential again.

    XLA's TPU compiler fuses element-wise results into products, too, whatever they
    cost: the matrix unit takes operands that the vector unit makes tile by tile in
    on-chip memory, and the vector unit is idle meanwhile.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
      into_products: as the compiler for TPUs does.
    """
    known = _Again.of(graph, floating, into_products=into_products)
    return _find_fusion(graph, floating, known.writes)


def looked_up(
    graph: OperatorGraph, floating: frozenset[int], fused: Fusion
) -> dict[tuple[int, int], bool]:
    """Element-wise results that are written for a gather alone.

    A gather reads at addresses that it computes, so its array is in memory. The other
    readers make the result again from what it is made of.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
      fused: what is written anyway.

    Returns:
      The values, each with its gather: False, for it is made when that reads it (as in
      `autopar.steps.orders.copies_in_orders`).
    """
    maker = {v: op for op in graph.operators for v in op.outputs}
    arrays = ((op.inputs[0], op) for op in graph.operators if op.kind == "gather")
    return {
        (v, op.index): False
        for v, op in arrays
        if v in maker
        and v not in fused.in_memory | floating
        and is_elementwise(maker[v])
    }


def spread(
    graph: OperatorGraph, floating: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Arrays that are written at the size of a larger one that both passes read.

    XLA's CPU compiler makes an element-wise result of smaller arrays in each reader,
    as others do. But it writes the smaller arrays broadcast to the size of the result,
    and keeps them for the backward pass (read from its programs, jaxlib 0.10.2). So a
    LayerNorm keeps its scale and its deviations at the size of its activations.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.

    Returns:
      The results, each with the arrays that are broadcast for it.
    """
    read = _readers(graph)
    out: dict[int, tuple[int, ...]] = {}
    for op in graph.operators:
        arrays = [v for v in op.inputs if v is not None]
        if len(arrays) < 2 or not is_elementwise(op):
            continue
        for value in floating.intersection(op.outputs):
            size = graph.values[value].size
            roles = {r.role for r in read.get(value, [])}
            if len(roles) > 1 and all(graph.values[v].size < size for v in arrays):
                out[value] = tuple(v for v in arrays if v not in floating)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
    """What `made_again` knows of the operators before the present one.

    Attributes:
      graph: the operator graph.
      floating: values that each reader makes anew.
      readers: the operators that read each value.
      outputs: of the graph.
      made_of: of what is fused, the values in memory that it is made of.
      places: of what is fused, the places at which it reads those: the operators that
        shift them, one after the other. Not of what reads at its own place alone.
      scattered: zeros that something is scattered into.
      into_products: whether products make what they read.
    """

    graph: OperatorGraph
    floating: frozenset[int]
    readers: Mapping[int, Sequence[Operator]]
    outputs: frozenset[int]
    made_of: dict[int, frozenset[int]]
    places: dict[int, frozenset[int]]
    scattered: set[int]
    into_products: bool

    @classmethod
    def of(
        cls, graph: OperatorGraph, floating: frozenset[int], *, into_products: bool
    ) -> Self:
        """Knows nothing yet."""
        outputs = _handed_out(graph)
        readers = _readers(graph)
        return cls(graph, floating, readers, outputs, {}, {}, set(), into_products)

    def writes(self, op: Operator, slot: int, value: int) -> bool:
        """Whether an operator writes a result; operators come in program order."""
        arrays = (v for v in op.inputs if v is not None)
        sources = frozenset[int]().union(
            *(self.made_of.get(v, frozenset({v})) for v in arrays)
        )
        places = self._places(op)
        written = self._is_written(op, slot, value, sources)
        written |= len(places) > _MOST_PLACES
        compared = self.into_products and value in self.floating
        fused = is_elementwise(op)
        if not written and (fused or compared):
            self.made_of[value] = sources
            if places != _OWN_PLACE:
                self.places[value] = places
        elif value in self.floating and not fused:
            self.scattered.add(value)
        return written

    def _places(self, op: Operator) -> frozenset[int]:
        """The places at which an operator reads what is in memory, as numbers."""
        read = frozenset[int]().union(
            *(self.places.get(v, _OWN_PLACE) for v in op.inputs if v is not None)
        )
        if op.kind not in _SHIFTING:
            return read
        shifts = range(len(op.inputs) if op.kind == "concatenate" else 1)
        return frozenset(hash((p, op.index, k)) for p in read for k in shifts)

    def _is_written(
        self, op: Operator, slot: int, value: int, sources: frozenset[int]
    ) -> bool:
        users = self.readers.get(value, [])
        if self.into_products and value in self.floating:
            return False
        if value in self.outputs or not self.scattered.isdisjoint(op.inputs):
            # What is added to a scatter into zeros is what it scatters into.
            return True
        dtype = str(self.graph.values[value].dtype)
        if self.into_products:
            again = _is_streamed(op, users)
        else:
            again = _again(op, users) and (op.kind, dtype) not in _KEPT
        if not again or len(sources) > _MOST_SOURCES:
            return _needs_buffer(op, slot, users)
        return _saves(self.graph, value, sources, len({r.index for r in users}))


def _again(op: Operator, users: Sequence[Operator]) -> bool:
    """Whether a result may be made again in every reader."""
    if op.kind in _DEAR or not is_elementwise(op):
        return False
    return not any(_is_opaque(r) for r in users)


def _is_streamed(op: Operator, users: Sequence[Operator]) -> bool:
    """Whether a result may be made again in every reader, products among them."""
    opaque = any(_is_opaque(r) and not is_product(r) for r in users)
    return is_elementwise(op) and not opaque


def _saves(
    graph: OperatorGraph, value: int, sources: frozenset[int], count: int
) -> bool:
    """Whether writing a result with so many readers moves fewer bytes."""
    read = sum(graph.values[s].nbytes for s in sources)
    return (count - 1) * read > (count + 1) * graph.values[value].nbytes


def _handed_out(graph: OperatorGraph) -> frozenset[int]:
    """The values that leave the program, or what a microbatch runs of it."""
    return graph.accumulated.union(v for v in graph.outputs if v is not None)


def _readers(graph: OperatorGraph) -> dict[int, list[Operator]]:
    """The operators that read each value."""
    found: dict[int, list[Operator]] = {}
    for op in graph.operators:
        for v in set(op.inputs):
            if v is not None:
                found.setdefault(v, []).append(op)
    return found


def is_elementwise(op: Operator) -> bool:
    """Whether a compiler fuses the operator into its readers."""
    if op.kind in _APART or op.kernel is not None or is_product(op):
        return False
    return FactorKind.REDUCE not in op.rule.kinds or not any(
        kind is FactorKind.REDUCE and size > 1
        for size, kind in zip(op.rule.sizes, op.rule.kinds, strict=True)
    )


def is_cloned(op: Operator) -> bool:
    """Whether a GPU's compiler clones the operator rather than keep its result.

    It does not clone what calls a library or a kernel, and loops.
    """
    return op.kind not in _CALLS and op.kernel is None and not is_product(op)


def _is_opaque(op: Operator) -> bool:
    """Whether nothing is fused into an operator: hand-written kernels read memory."""
    return op.kind in _OPAQUE or is_product(op) or op.kernel is not None


def _needs_buffer(op: Operator, slot: int, users: Sequence[Operator]) -> bool:
    if op.kind in ("input", "enter"):
        return False
    if op.kind == "carry":
        # Inside and after the loop a carry is one buffer: that of the last output.
        return slot == len(op.outputs) - 1
    if op.kind == "slice_step":
        # One step of a scanned array is read where it lies.
        return any(_is_opaque(r) for r in users)
    if not is_elementwise(op):
        return True
    if any(_is_opaque(r) for r in users):
        return True
    if len({r.index for r in users}) < 2:
        return False
    if op.kind in _COSTLY:
        return True
    # What is cheap to make from one array is made again from that, if it is kept.
    arrays = {v for v in op.inputs if v is not None}
    return len({r.role for r in users}) > 1 and len(arrays) > 1
