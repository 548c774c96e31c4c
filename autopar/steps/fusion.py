"""Finds the values that a fusing compiler writes to memory.

The models of time and of memory share these results. A *boundary* operator passes a
value into or out of the body of a loop or branch.

A compiler fuses an operator with an element-wise result into the operators that read
the result. It writes such a result to memory only in three cases: nothing can be fused
into a reader (a product, a sort, the boundary of a loop); the result is costly and read
more than once; or the forward and the backward pass both read the result. A compiler
writes all results of operators that are not element-wise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from autopar_passes.graph.operators import (
    PRODUCTS,
    TO_DEVICES,
    TO_HOST,
    Operator,
    OperatorGraph,
    producers,
    users,
)
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

# Boundary operators pass values into and out of regions; they compute nothing.
BOUNDARY = frozenset({"input", "return", "enter", "carry", "merge"})
# Costly element-wise operators, which XLA does not recompute for each reader
# (openxla/xla, HloInstruction::IsExpensive, as used by instruction fusion).
_COSTLY = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan2", "cbrt", "cos", "digamma", "div",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p",
        "logistic", "pow", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh",
    }
)  # fmt: skip

# Costly operators that need more than 150 clock cycles per element on an H100
# (openxla/xla, ``xla/service/gpu/model/hlo_op_profiles_data.h``).
_DEAR = _COSTLY - {"div", "exp", "exp2", "logistic", "rem", "rsqrt", "sqrt", "tanh"}
# XLA keeps a tanh of these types. It recomputes a tanh of float32: in compiled GPTs and
# an MLP mixer, it keeps the operand of the tanh in GELU.
_KEPT = {("tanh", "bfloat16"), ("tanh", "float16")}
# Operators into which nothing is fused. The same holds for operators with `is_product`.
_OPAQUE = frozenset(
    {
        "sort", "top_k", "enter", "carry", "merge", "slice_step", "stack_step",
        "scatter-add", "scatter", "return", TO_HOST,
    }
)  # fmt: skip

# Operators that are not element-wise, whatever their factors are. An operator with
# `is_product` is not element-wise either.
_APART = BOUNDARY | {
    "slice_step", "stack_step", "random_bits", "threefry2x32", "gather", "scatter-add",
    "sort", "top_k",
}  # fmt: skip

_CALLS = BOUNDARY | {
    "slice_step", "stack_step", "sort", "top_k", "optimization_barrier",
}  # fmt: skip

# The most arrays that a fused kernel reads. The limit only bounds the work of this
# analysis.
_MOST_SOURCES = 32
# An operator is not fused into a kernel that would evaluate it at more than this number
# of positions per element (openxla/xla, ``kMaxEvaluationsPerNode`` of
# FusionNodeEvaluations).
_MOST_PLACES = 15
# Operators that read elements at other positions of their operands than those of the
# result.
_SHIFTING = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice", "split"})
_OWN_PLACE = frozenset({0})
# Operators whose results share the buffer of an operand.
_HANDING = BOUNDARY | {"slice_step"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """The values of a program that are in memory after fusion.

    Attributes:
      buffers: values that have a separate buffer.
      in_memory: the values in `buffers`, and values that share the buffer of another
        value: inputs, values that loops pass on, and one iteration's part of a scanned
        array. Reading or writing any of them causes memory traffic.
    """

    buffers: frozenset[int]
    in_memory: frozenset[int]


def fusion(graph: OperatorGraph, floating: frozenset[int]) -> Fusion:
    """Returns the values that a compiler writes to memory.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
    """
    readers = users(graph.operators)
    outputs = _handed_out(graph)

    def writes(op: Operator, slot: int, value: int) -> bool:
        return value in outputs or _needs_buffer(op, slot, readers.get(value, []))

    return _find_fusion(graph, floating, writes)


def _find_fusion(
    graph: OperatorGraph,
    floating: frozenset[int],
    writes: Callable[[Operator, int, int], bool],
) -> Fusion:
    """Finds the values in memory; visits the operators in program order.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
      writes: a function that returns whether an operator writes a result, from the
        operator, the slot of the result and the value.
    """
    buffers: set[int] = set()
    handed: set[int] = set()
    for op in graph.operators:
        if op.kind in _HANDING:
            handed.update(op.outputs)
        if op.kind == "enter" and not floating.isdisjoint(op.inputs):
            # A loop reads arrays in memory, so a floating operand is written before the
            # loop.
            buffers.update(op.outputs)
        buffers.update(v for slot, v in enumerate(op.outputs) if writes(op, slot, v))
    kept = frozenset(buffers - floating)
    return Fusion(kept, kept | (handed - floating))


def is_product(op: Operator) -> bool:
    """Whether the matrix units may compute the operator.

    A `dot_general` needs more than one element along each of its sides M, N and K.
    Compilers turn any other `dot_general` into an element-wise multiplication, followed
    by a sum if a dimension is contracted (openxla/xla,
    AlgebraicSimplifierVisitor::HandleDot).
    """
    if op.kind != "dot_general":
        return op.kind in PRODUCTS
    sizes = op.rule.sizes
    return all(math.prod(sizes[f] for f in side) > 1 for side in side_factors(op.rule))


def side_factors(rule: FactorRule) -> tuple[tuple[int, ...], ...]:
    """Returns the factors of the sides M, N and K of a product.

    The left operand and the result have the factors of M. The right operand and the
    result have the factors of N. Both operands have the factors of K, which the product
    reduces.
    """
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    result = rule.factors_of(rule.results[0])
    sides = ((left - right) & result, (right - left) & result, (left & right) - result)
    return tuple(tuple(sorted(side)) for side in sides)


def made_again(
    graph: OperatorGraph, floating: frozenset[int], *, into_products: bool = False
) -> Fusion:
    """`fusion`, for a compiler that recomputes element-wise results in each reader.

    XLA's GPU compiler fuses an element-wise result, even a costly one, into all its
    readers if that moves fewer bytes (openxla/xla,
    ``xla/service/gpu/transforms/priority_fusion.cc``). Suppose that the result has V
    bytes and c readers, and is made from arrays of L bytes in memory. The traffic is
    ``c L`` bytes if the result is fused, and ``L + (1 + c) V`` bytes if it is written.
    The compiler does not recompute operators that take more than 150 clock cycles per
    element. As an example, the softmax of a forward pass leaves its scores in memory,
    and the backward pass computes the exponential again.

    XLA's TPU compiler also fuses element-wise results into products, whatever the
    results cost. The vector unit computes the operands tile by tile in on-chip memory,
    and the matrix unit reads them there. The vector unit would otherwise be idle during
    the product.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
      into_products: whether to fuse results into products, as the TPU compiler does.
    """
    known = _Again.of(graph, floating, into_products=into_products)
    return _find_fusion(graph, floating, known.writes)


def looked_up(
    graph: OperatorGraph, floating: frozenset[int], fused: Fusion
) -> dict[tuple[int, int], bool]:
    """Finds element-wise results that are written only because a gather reads them.

    A gather computes the addresses that it reads, so its array must be in memory. The
    other readers recompute the result from the operands of its operator.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
      fused: the values that are in memory for other reasons.

    Returns:
      Value and gather -> False. As in `autopar.steps.orders.copies_in_orders`, False
      means that the value is computed when the gather reads it.
    """
    maker = producers(graph.operators)
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
    """Finds arrays that the compiler writes in the larger shape of a result.

    Like other compilers, XLA's CPU compiler does not keep an element-wise result of
    smaller arrays that both passes read: it recomputes the result in each reader. But
    it broadcasts the smaller arrays to the shape of the result, writes them in that
    shape, and keeps them for the backward pass (read from its programs, jaxlib 0.10.2).
    For example, a LayerNorm keeps its scale and its deviations in the shape of its
    activations.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).

    Returns:
      Result -> the arrays that are broadcast for the result.
    """
    read = users(graph.operators)
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
    """The state of `made_again` while it visits the operators in program order.

    Attributes:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
      readers: value -> the operators that read it.
      outputs: the outputs of the graph.
      made_of: fused value -> the values in memory from which it is computed.
      places: fused value -> the positions at which it reads the values in memory. A
        number stands for a chain of operators that shift positions. Values that read
        only at their own positions have no entry.
      scattered: arrays of zeros that a scatter writes into.
      into_products: whether element-wise operands are computed within products.
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
        """Creates the state of a search that has not visited any operator."""
        outputs = _handed_out(graph)
        readers = users(graph.operators)
        return cls(graph, floating, readers, outputs, {}, {}, set(), into_products)

    def writes(self, op: Operator, slot: int, value: int) -> bool:
        """Whether an operator writes a result; must be called in program order."""
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
        """The numbers of the positions at which an operator reads values in memory."""
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
        if op.kind == TO_DEVICES:
            return True
        if value in self.outputs or not self.scattered.isdisjoint(op.inputs):
            # The sum of an array and a scatter into zeros becomes a scatter into this
            # array.
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
    """Whether a result may be recomputed in every reader."""
    if op.kind in _DEAR or not is_elementwise(op):
        return False
    return not any(_is_opaque(r) for r in users)


def _is_streamed(op: Operator, users: Sequence[Operator]) -> bool:
    """Whether a result may be recomputed in every reader, including products."""
    opaque = any(_is_opaque(r) and not is_product(r) for r in users)
    return is_elementwise(op) and not opaque


def _saves(
    graph: OperatorGraph, value: int, sources: frozenset[int], count: int
) -> bool:
    """Whether writing a result moves fewer bytes than fusing it into all readers.

    The result has ``count`` readers.
    """
    read = sum(graph.values[s].nbytes for s in sources)
    return (count - 1) * read > (count + 1) * graph.values[value].nbytes


def _handed_out(graph: OperatorGraph) -> frozenset[int]:
    """Returns the values that the program, or its part for one microbatch, returns."""
    return graph.accumulated.union(v for v in graph.outputs if v is not None)


def is_elementwise(op: Operator) -> bool:
    """Whether a compiler fuses the operator into its readers."""
    if op.kind in _APART or op.kernel is not None or is_product(op):
        return False
    return FactorKind.REDUCE not in op.rule.kinds or not any(
        kind is FactorKind.REDUCE and size > 1
        for size, kind in zip(op.rule.sizes, op.rule.kinds, strict=True)
    )


def is_cloned(op: Operator) -> bool:
    """Whether the GPU compiler may rematerialise the result by cloning the operator.

    The compiler does not clone loops, or calls of libraries or hand-written kernels.
    """
    return op.kind not in _CALLS and op.kernel is None and not is_product(op)


def _is_opaque(op: Operator) -> bool:
    """Whether nothing is fused into an operator, such as a hand-written kernel."""
    return op.kind in _OPAQUE or is_product(op) or op.kernel is not None


def _needs_buffer(op: Operator, slot: int, users: Sequence[Operator]) -> bool:
    if op.kind in ("input", "enter"):
        return False
    if op.kind == TO_DEVICES:
        return True
    if op.kind == "carry":
        # A carry has one buffer inside and after the loop, and it belongs to the
        # carry's last output.
        return slot == len(op.outputs) - 1
    if op.kind == "slice_step":
        # Readers read one iteration's part of a scanned array in the buffer of the
        # whole array.
        return any(_is_opaque(r) for r in users)
    if not is_elementwise(op):
        return True
    if any(_is_opaque(r) for r in users):
        return True
    if len({r.index for r in users}) < 2:
        return False
    if op.kind in _COSTLY:
        return True
    # If a result can be computed cheaply from one array, the compiler keeps that array
    # and recomputes the result.
    arrays = {v for v in op.inputs if v is not None}
    return len({r.role for r in users}) > 1 and len(arrays) > 1
