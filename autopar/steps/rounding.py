"""Arrays of float32 that XLA's TPU compiler keeps and sends in bfloat16.

At JAX's default precision, a float32 matrix product is one pass of the matrix unit in
bfloat16 (`jax.default_matmul_precision`). The operands are therefore rounded before the
product. The compiler moves this conversion before earlier operators, as long as nothing
else reads the array. The following rules were read from programs for v5e (libtpu
0.0.42):

* if only products that round their operands read a result, the result is written in
  bfloat16, and so are its transposes and reshapes. Sums of the result, such as the
  gradient of a bias, are computed in float32 in the kernel that computes the result.
  The kernel of a product adds a bias before it writes, so only the array with the
  bias is written;
* if products that round their operands read an array in another layout, the array is
  rounded before the gather or the all-to-all, which then sends half the bytes. The
  array itself stays in float32 if other operators read it in its own layout. For
  example, updates read parameters, and element-wise operators and sums read the
  gradients of a residual stream. The model assumes that these operators read the arrays
  in their own layout;
* the operands of element-wise operators stay in float32, even if the operators are
  fused into products. Examples are the input of a GELU, the scores of a softmax and the
  residual stream;
* sums over devices are computed in float32, before the conversion.

*16-bit arrays on CPUs.* XLA's CPU compiler computes 16-bit types in float32
(``xla/service/cpu/cpu_float_support.cc`` and ``float_normalization.cc`` in
openxla/xla). As a consequence it stores some 16-bit arrays in 32 bits, and keeps some
arrays that it would otherwise recompute. The following rules were read from optimised
programs (jaxlib 0.10.2, on a CPU without 16-bit products):

* the operands of a product are in memory in 32 bits. Other operators read these arrays
  in their own 16-bit type;
* the operand of a reduction stays in 32 bits for all its readers, because the compiler
  drops a rounding to 16 bits that is followed by a conversion to 32 bits
  (``xla_allow_excess_precision``);
* a rounded result that the forward and the backward pass read is kept for the backward
  pass. If this result were of type float32 and depended on only one array, the compiler
  would recompute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from autopar.steps.fusion import BOUNDARY, is_elementwise, is_product
from autopar.steps.nodes import Contraction
from autopar.steps.uses import (
    ReadingGroup,
    Readings,
    ValueClass,
    node_dims,
    value_class,
)
from autopar_passes.graph.operators import PRODUCTS, Operator, OperatorGraph, users
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation

# The bytes of a float32 array after rounding to bfloat16, as a fraction of its bytes.
ROUNDED = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """Values of float32 that are in bfloat16 for the products that read them.

    Either all values of a class (`autopar.steps.uses.ValueClass`) are rounded, or none.

    Attributes:
      stored: the values that are in memory only in bfloat16.
      brought: the values whose copies in other layouts are in bfloat16.
    """

    stored: frozenset[int] = frozenset()
    brought: frozenset[int] = frozenset()

    def part(self, value: int) -> float:
        """The bytes of a value in its own layout, divided by its float32 bytes."""
        return ROUNDED if value in self.stored else 1.0

    def brought_part(self, value: int) -> float:
        """The bytes of a value in another layout, divided by its float32 bytes."""
        return ROUNDED if value in self.brought else 1.0


NOT_ROUNDED = Rounded()


# The compiler moves a conversion to bfloat16 from after to before these operators.
_MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy"}
)
# A sum over elements. The kernel that computes the operand also computes this sum, in
# float32.
_SUM = "reduce_sum"
_HANDED = BOUNDARY | {"slice_step", "stack_step", "optimization_barrier"}


def find_rounded(
    graph: OperatorGraph,
    contraction: Contraction,
    reading: Readings,
    equations: Mapping[int, Equation],
) -> Rounded:
    """The values of a program that are in bfloat16 for the products that read them.

    Args:
      graph: the operator graph.
      contraction: the nodes of the graph.
      reading: the operands of its operators.
      equations: index -> equation of the program, which states the precision of a
        product.
    """
    single = frozenset(
        op.index for op in graph.operators if _single_pass(graph, op, equations)
    )
    only = _only_read_by(graph, single)
    made = {v for v in only if contraction.producer[v].kind not in _HANDED}
    made |= _in_one_kernel(graph, made)
    brought: set[ValueClass] = set()
    kept: set[ValueClass] = set()
    for group in reading.groups:
        op = group.operator
        rounds = op.index in single or (op.kind in _MOVING and op.outputs[0] in only)
        if not rounds and (op.kind == _SUM or is_elementwise(op)):
            continue
        classes = (value_class(contraction, v) for v in _foreign(contraction, group))
        (brought if rounds else kept).update(classes)
    brought -= kept
    return Rounded(
        _whole_classes(graph, contraction, made),
        frozenset(
            v
            for v in contraction.homes
            if _is_float32(graph, v) and value_class(contraction, v) in brought
        ),
    )


def _single_pass(
    graph: OperatorGraph, op: Operator, equations: Mapping[int, Equation]
) -> bool:
    """Whether an operator is a product that rounds its float32 operands to bfloat16."""
    if op.kind not in PRODUCTS or not is_product(op) or op.equation not in equations:
        return False
    if not all(v is not None and _is_float32(graph, v) for v in op.inputs[:2]):
        return False
    given = equations[op.equation].params.get("precision")
    pair = given if isinstance(given, tuple) else (given,)
    return all(p is None or str(p) == "DEFAULT" for p in pair)


def _only_read_by(graph: OperatorGraph, single: Collection[int]) -> frozenset[int]:
    """The values of float32 that only rounding products read, also after transposes."""
    kept = graph.accumulated.union(v for v in graph.outputs if v is not None)
    read = users(graph.operators)
    out: set[int] = set()

    def rounds(reader: Operator) -> bool:
        moved = reader.kind in _MOVING and reader.outputs[0] in out
        return reader.index in single or moved

    for op in reversed(graph.operators):
        made_here = op.kind not in _HANDED
        for value in op.outputs:
            if value in kept or not _is_float32(graph, value):
                continue
            # The kernel that computes a value also computes sums of it.
            left = [
                r for r in read.get(value, []) if not (made_here and r.kind == _SUM)
            ]
            if left and all(map(rounds, left)):
                out.add(value)
    return frozenset(out)


def _in_one_kernel(graph: OperatorGraph, rounded: Collection[int]) -> set[int]:
    """Results of products whose kernels go on to compute a rounded result.

    The kernel of a product applies the element-wise operators that follow, such as the
    addition of a bias, before it writes, if no other operator reads their operands.
    """
    kept = graph.accumulated.union(v for v in graph.outputs if v is not None)
    read = users(graph.operators)
    ends, out = set(rounded), set[int]()

    def apply_rules(value: int) -> bool:
        after = [r for r in read.get(value, []) if r.kind != _SUM]
        if len(after) != 1 or value in kept or not is_elementwise(after[0]):
            return False
        size = graph.values[value].size
        others = (v for v in after[0].inputs if v is not None and v != value)
        smaller = all(graph.values[v].size < size for v in others)
        return smaller and not ends.isdisjoint(after[0].outputs)

    for op in reversed(graph.operators):
        for value in op.outputs:
            if (
                op.kind not in _HANDED
                and _is_float32(graph, value)
                and apply_rules(value)
            ):
                ends.add(value)
                if op.kind in PRODUCTS:
                    out.add(value)
    return out


def _foreign(contraction: Contraction, group: ReadingGroup) -> list[int]:
    """Returns the values that operators of a group may need in another layout."""
    op = group.operator
    node = contraction.node_of[op.class_index]
    dims = node_dims(contraction, op, op.rule.operands[group.slot])
    out: list[int] = []
    for source, part in group.parts:
        home = contraction.homes[source]
        wanted = tuple(dims[d[0]] if d else () for d in part)
        if (node, wanted) != (home.node, home.dims):
            out.append(source)
    return out


def _whole_classes(
    graph: OperatorGraph, contraction: Contraction, values: Collection[int]
) -> frozenset[int]:
    """Returns the values whose classes have only values from ``values``."""
    classes: dict[ValueClass, list[int]] = {}
    for op in graph.operators:
        for value in op.outputs:
            classes.setdefault(value_class(contraction, value), []).append(value)
    whole = (c for c in classes.values() if all(v in values for v in c))
    return frozenset(v for c in whole for v in c)


def _is_float32(graph: OperatorGraph, value: int) -> bool:
    return str(graph.values[value].dtype) == "float32"


# Bytes of an element of a 16-bit type. In 32 bits, it has twice as many bytes.
NARROW_BYTES, WIDER = 2, 2
_HANDING = BOUNDARY | {"slice_step", "optimization_barrier"}


@dataclasses.dataclass(frozen=True, slots=True)
class Widened:
    """The 16-bit values that are in memory in 32 bits.

    Attributes:
      operands: the values that products read in 32 bits.
      held: the values that are in memory only in 32 bits.
    """

    operands: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()


NOT_WIDENED = Widened()


def find_widened(graph: OperatorGraph) -> Widened:
    """Finds the 16-bit values of a program that are in memory in 32 bits."""
    read = users(graph.operators)

    def reduces(value: int) -> bool:
        return any(r.kind.startswith("reduce_") for r in read.get(value, []))

    products = [op for op in graph.operators if op.kind in PRODUCTS]
    operands = {v for op in products for v in op.inputs}
    held = {
        op.inputs[0]
        for op in graph.operators
        if op.kind == "convert_element_type" and any(map(reduces, op.outputs))
    }
    return Widened(_narrow(graph, operands - held), _narrow(graph, held))


def rounded_results(graph: OperatorGraph, floating: frozenset[int]) -> frozenset[int]:
    """Returns 16-bit element-wise results that forward and backward pass read.

    Args:
      graph: the operator graph.
      floating: values that each reader recomputes (`autopar.steps.nodes`).
    """
    read = users(graph.operators)
    both = {Role.FORWARD, Role.BACKWARD}
    found = {
        value
        for op in graph.operators
        if is_elementwise(op) and op.kind not in _HANDING
        for value in op.outputs
        if both <= {r.role for r in read.get(value, [])}
    }
    return _narrow(graph, found - floating)


def is_narrow(graph: OperatorGraph, value: int) -> bool:
    """Whether an element of an array has 16 bits."""
    return graph.values[value].dtype.itemsize == NARROW_BYTES


def _narrow(graph: OperatorGraph, values: set[int | None] | set[int]) -> frozenset[int]:
    return frozenset(v for v in values if v is not None and is_narrow(graph, v))
