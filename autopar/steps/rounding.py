"""Arrays of float32 that XLA's TPU compiler keeps and sends in bfloat16.

At JAX's default precision a matrix product of float32 is one pass of the matrix unit in
bfloat16 (`jax.default_matmul_precision`), so what it reads is rounded before. The
compiler moves that conversion as far up as it finds nothing else that reads the array.
Read from its programs for v5e (libtpu 0.0.42):

* a result that only such products read is written in bfloat16, and so are its
  transposes and reshapes. Sums of it, such as those for the gradient of a bias, are
  taken in the kernel that makes it, in float32. A product's kernel adds a bias before
  it writes, so that only the result of that is written;
* an array that such products read in another layout is rounded before it is gathered
  or exchanged, so that half the bytes are sent. The array itself stays in float32 where
  others read it as it lies: updates read parameters, element-wise operators and sums
  the gradients of a residual stream. That they read it as it lies is assumed;
* what element-wise operators read stays in float32, though they are fused into
  products: the input of a GELU, the scores of a softmax, the residual stream;
* sums over devices are taken in float32, before the conversion.

*Arrays of 16 bits on CPUs* are kept in 32 bits, or kept at all, as XLA's CPU compiler
computes them in float32 (``xla/service/cpu/cpu_float_support.cc`` and
``float_normalization.cc`` in openxla/xla). Read from its optimised programs (jaxlib
0.10.2, a CPU without products of 16 bits):

* a product's operands lie in memory in 32 bits; what reads them besides reads them in
  their own type;
* what a reduction reads stays in 32 bits for all its readers, because the compiler
  leaves out a rounding that is undone at once (``xla_allow_excess_precision``);
* what has been rounded and both passes read is kept for the backward pass. In 32 bits
  it would be made again where one array suffices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from autopar.steps.fusion import BOUNDARY, is_elementwise, is_product
from autopar.steps.nodes import Contraction
from autopar.steps.readings import ReadingGroup, Readings
from autopar.steps.uses import ValueClass, node_dims, value_class
from autopar_passes.graph.operators import PRODUCTS, Operator, OperatorGraph, readers
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation

# The part of its bytes that a rounded array of float32 takes.
ROUNDED = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """Values of float32 that are in bfloat16 for the products that read them.

    All values of a class (`autopar.steps.uses.ValueClass`) are, or none.

    Attributes:
      stored: those that are in memory in bfloat16 alone.
      brought: those that are in bfloat16 in all layouts but their own.
    """

    stored: frozenset[int] = frozenset()
    brought: frozenset[int] = frozenset()

    def part(self, value: int) -> float:
        """The part of its bytes that a value takes where it was made."""
        return ROUNDED if value in self.stored else 1.0

    def brought_part(self, value: int) -> float:
        """The part of its bytes that a value takes in another layout than its own."""
        return ROUNDED if value in self.brought else 1.0


NOT_ROUNDED = Rounded()


# Operators that a conversion moves through.
_MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy"}
)
# Taken where the array is made, in float32.
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
      contraction: its nodes.
      reading: what its operators read.
      equations: of the program, by index; they hold the precision of products.
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
    """Whether an operator is a product that rounds its operands of float32."""
    if op.kind not in PRODUCTS or not is_product(op) or op.equation not in equations:
        return False
    if not all(v is not None and _is_float32(graph, v) for v in op.inputs[:2]):
        return False
    given = equations[op.equation].params.get("precision")
    pair = given if isinstance(given, tuple) else (given,)
    return all(p is None or str(p) == "DEFAULT" for p in pair)


def _only_read_by(graph: OperatorGraph, single: Collection[int]) -> frozenset[int]:
    """The values of float32 that such products alone read, moved or not."""
    kept = graph.accumulated.union(v for v in graph.outputs if v is not None)
    read = readers(graph.operators)
    out: set[int] = set()

    def rounds(reader: Operator) -> bool:
        moved = reader.kind in _MOVING and reader.outputs[0] in out
        return reader.index in single or moved

    for op in reversed(graph.operators):
        made_here = op.kind not in _HANDED
        for value in op.outputs:
            if value in kept or not _is_float32(graph, value):
                continue
            # Sums of what a kernel makes are taken in that kernel.
            left = [
                r for r, _ in read.get(value, []) if not (made_here and r.kind == _SUM)
            ]
            if left and all(map(rounds, left)):
                out.add(value)
    return frozenset(out)


def _in_one_kernel(graph: OperatorGraph, rounded: Collection[int]) -> set[int]:
    """Results of products of which the same kernel makes what is rounded.

    It applies the element-wise operators behind a product, such as the addition of a
    bias, before it writes, if nothing else reads what they read.
    """
    kept = graph.accumulated.union(v for v in graph.outputs if v is not None)
    read = readers(graph.operators)
    ends, out = set(rounded), set[int]()

    def apply_rules(value: int) -> bool:
        after = [r for r, _ in read.get(value, []) if r.kind != _SUM]
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
    """The values that readings of a group need in other layouts than their own."""
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
    """Those of the values whose whole class is among them."""
    classes: dict[ValueClass, list[int]] = {}
    for op in graph.operators:
        for value in op.outputs:
            classes.setdefault(value_class(contraction, value), []).append(value)
    whole = (c for c in classes.values() if all(v in values for v in c))
    return frozenset(v for c in whole for v in c)


def _is_float32(graph: OperatorGraph, value: int) -> bool:
    return str(graph.values[value].dtype) == "float32"


# Bytes of the types that are widened, and the factor on them.
NARROW_BYTES, WIDER = 2, 2
_HANDING = BOUNDARY | {"slice_step", "optimization_barrier"}


@dataclasses.dataclass(frozen=True, slots=True)
class Widened:
    """Values of 16 bits.

    Attributes:
      operands: those that products read, in 32 bits.
      held: those that are in memory in 32 bits alone.
    """

    operands: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()


NOT_WIDENED = Widened()


def find_widened(graph: OperatorGraph) -> Widened:
    """The values of a program that are widened in memory."""
    read = readers(graph.operators)

    def reduces(value: int) -> bool:
        return any(r.kind.startswith("reduce_") for r, _ in read.get(value, []))

    products = [op for op in graph.operators if op.kind in PRODUCTS]
    operands = {v for op in products for v in op.inputs}
    held = {
        op.inputs[0]
        for op in graph.operators
        if op.kind == "convert_element_type" and any(map(reduces, op.outputs))
    }
    return Widened(_narrow(graph, operands - held), _narrow(graph, held))


def rounded_results(graph: OperatorGraph, floating: frozenset[int]) -> frozenset[int]:
    """Element-wise results of 16 bits that both passes read.

    Args:
      graph: the operator graph.
      floating: values that each reader makes anew.
    """
    read = readers(graph.operators)
    both = {Role.FORWARD, Role.BACKWARD}
    found = {
        value
        for op in graph.operators
        if is_elementwise(op) and op.kind not in _HANDING
        for value in op.outputs
        if both <= {r.role for r, _ in read.get(value, [])}
    }
    return _narrow(graph, found - floating)


def is_narrow(graph: OperatorGraph, value: int) -> bool:
    """Whether an array has 16 bits an element."""
    return graph.values[value].dtype.itemsize == NARROW_BYTES


def _narrow(graph: OperatorGraph, values: set[int | None] | set[int]) -> frozenset[int]:
    return frozenset(v for v in values if v is not None and is_narrow(graph, v))
