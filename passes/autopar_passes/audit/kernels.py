"""Reads the matrix products of compiled kernels, and the bytes that they move."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from autopar_passes.audit.hlo_text import (
    Computation,
    HloModule,
    Instruction,
    Scope,
    Shape,
)

# The bytes that a kernel of a compiled program reads and writes.
#
# A kernel that slices an array reads only the slice. For example, a kernel in a loop
# over layers reads one layer of the stacked weights. A kernel that updates a slice in
# place writes only the slice.

# Operations that read only those elements of their first operand that they return.
_PARTIAL = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})
# Operations that update their first operand in place -> the position of the operand
# with the new elements.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}


def kernel_bytes(module: HloModule, scope: Scope, op: Instruction) -> float:
    """Returns the bytes that a kernel reads and writes.

    Args:
      module: the module with the computation that a fusion calls.
      scope: the scope of the instruction.
      op: the kernel's instruction.
    """
    operands = [scope.instruction(name) for name in op.operands]
    if op.opcode == "fusion":
        return _fusion_bytes(module.computations[op.called_names[0]], operands, op)
    if op.opcode in _IN_PLACE:
        return 2 * _size(operands[_IN_PLACE[op.opcode]].shapes)
    written = _size(op.shapes)
    if op.opcode in _PARTIAL:
        first, *rest = operands
        read = min(_size(first.shapes), written)
        return written + read + sum(_size(x.shapes) for x in rest)
    return written + sum(_size(x.shapes) for x in operands)


def _size(shapes: tuple[Shape, ...]) -> float:
    """Returns the bytes of arrays, without byte vectors, which are work space."""
    return sum(s.nbytes for s in shapes if s.dtype != "s8" or len(s.dims) > 1)


def _fusion_bytes(
    body: Computation, operands: list[Instruction], op: Instruction
) -> float:
    wanted = _element_counts(body)
    total = sum(_written_bytes(body, body.instructions[name]) for name in _roots(body))
    for number, operand in enumerate(operands):
        name = body.parameters.get(number)
        share = 1.0
        if name is not None and len(operand.shapes) == 1:
            share = min(1.0, wanted[name] / _count(body.instructions[name]))
        total += share * _size(operand.shapes)
    return total or _size(op.shapes)


def _roots(body: Computation) -> tuple[str, ...]:
    root = body.instructions[body.root]
    return root.operands if root.opcode == "tuple" else (root.name,)


def _written_bytes(body: Computation, root: Instruction) -> float:
    update = _update_in_place(body, root)
    return _size(root.shapes if update is None else update.shapes)


def _update_in_place(body: Computation, root: Instruction) -> Instruction | None:
    """The update that a result writes in place; None if the whole result is written."""
    while root.opcode == "bitcast":
        root = body.instructions[root.operands[0]]
    part = _IN_PLACE.get(root.opcode)
    return None if part is None else body.instructions[root.operands[part]]


def _count(op: Instruction) -> float:
    return float(max(1, math.prod(op.shapes[0].dims))) if op.shapes else 1.0


def _element_counts(body: Computation) -> dict[str, float]:
    """Returns an upper bound of the number of used elements of each fusion value."""
    wanted: defaultdict[str, float] = defaultdict(float)
    in_place: set[str] = set()
    for name in _roots(body):
        root = body.instructions[name]
        update = _update_in_place(body, root)
        wanted[name] = _count(root if update is None else update)
        if update is not None:
            in_place.add(name)
    for op in reversed(tuple(body.instructions.values())):
        if op.opcode in ("parameter", "tuple"):
            continue
        if op.opcode == "bitcast" and op.name in in_place:
            in_place.add(op.operands[0])
        made = min(_count(op), wanted[op.name])
        for operand, elements in _reads(body, op, made, op.name in in_place):
            wanted[operand] += elements
    return wanted


def _reads(
    body: Computation, op: Instruction, made: float, in_place: bool
) -> Iterator[tuple[str, float]]:
    """Yields the number of elements that an instruction reads of each operand.

    ``made`` is the number of elements of its result that are used.
    """
    for slot, name in enumerate(op.operands):
        count = _count(body.instructions[name])
        if op.opcode in _IN_PLACE and in_place:
            yield name, 0.0 if slot == 0 else count
        elif op.opcode in _PARTIAL or op.opcode == "bitcast":
            yield name, min(count, made) if slot == 0 else count
        else:
            yield name, count * made / _count(op)


# Patterns that find the dimensions of a product's left operand, in an HLO instruction
# or in the configuration of a library call.
_DIMS: Final = r'lhs_{}_dim(?:s=\{{|ensions":\[)([\d",]*)'
_NUMPY: Final = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s8": "int8", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape in a kernel.

    Attributes:
      batch: the number of products.
      rows: M, the rows of the left operand.
      columns: N, the columns of the right operand.
      depth: K, the dimension that is summed.
      dtype: NumPy name of the operands' dtype.
      itemsize: bytes of an element of that dtype.
    """

    batch: float
    rows: float
    columns: float
    depth: float
    dtype: str
    itemsize: float

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts as two."""
        return 2.0 * self.batch * self.rows * self.columns * self.depth


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one device.

    Attributes:
      name: the name of the kernel's instruction.
      flops: floating-point operations of its products and convolutions.
      nbytes: bytes that it reads and writes.
      dtype: NumPy name of the dtype of its products' operands, or of its result.
      cycles: the compiler's own estimate of the kernel's clock cycles; 0 if there is
        none.
      products: its products and convolutions.
    """

    name: str
    flops: float
    nbytes: float
    dtype: str
    cycles: int = 0
    products: tuple[Product, ...] = ()


def kernel_of(module: HloModule, scope: Scope, op: Instruction) -> Kernel:
    """Reads one kernel.

    Args:
      module: the program.
      scope: the scope of the instruction.
      op: the instruction.
    """
    found = (product(inner, i) for inner, i in _instructions(module, scope, op))
    products = tuple(p for p in found if p is not None)
    cycles = re.search(r'"estimated_cycles":"?(\d+)', op.attributes)
    made = _NUMPY.get(op.shapes[0].dtype, "float32") if op.shapes else "float32"
    return Kernel(
        op.name,
        sum(p.flops for p in products),
        kernel_bytes(module, scope, op),
        products[0].dtype if products else made,
        int(cycles[1]) if cycles else 0,
        products,
    )


def _instructions(
    module: HloModule, scope: Scope, op: Instruction
) -> Iterator[tuple[Scope, Instruction]]:
    """Yields an instruction, and the instructions of the fusion that it calls."""
    yield scope, op
    if op.opcode == "fusion":
        inner = Scope(module.computations[op.called_names[0]], op, scope)
        for instruction in inner.computation.instructions.values():
            yield from _instructions(module, inner, instruction)


def product(scope: Scope, op: Instruction) -> Product | None:
    """Returns the products that an instruction computes; None if it computes none."""
    if op.opcode not in ("dot", "convolution", "custom-call") or len(op.operands) < 2:
        return None
    left, right = (scope.instruction(n).shapes[0] for n in op.operands[:2])
    if not op.shapes:
        return None
    summed = _dims_in_text(op, "contracting")
    if summed is not None:
        batched = _dims_in_text(op, "batch") or ()
        batch = math.prod(left.dims[d] for d in batched)
        depth = math.prod(left.dims[d] for d in summed)
        sides = [math.prod(s.dims) / batch / depth for s in (left, right)]
        return _product(left, batch, sides[0], sides[1], depth)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return None
    return _convolution(op, (left, right, op.shapes[0]), labels.groups())


def _product(
    of: Shape, batch: float, rows: float, columns: float, depth: float
) -> Product:
    itemsize = of.nbytes / max(1, math.prod(of.dims))
    dtype = _NUMPY.get(of.dtype, "float32")
    return Product(batch, rows, columns, depth, dtype, itemsize)


def _dims_in_text(op: Instruction, role: str) -> tuple[int, ...] | None:
    """The left operand's dims in a role, such as contracting; None if not named."""
    found = re.search(_DIMS.format(role), op.attributes)
    return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else None


def _convolution(
    op: Instruction, shapes: Sequence[Shape], labels: Sequence[str]
) -> Product:
    """Describes a convolution as matrix products.

    A convolution has ``2 |output| |weights| / output channels`` FLOPs.

    A forward convolution counts as a product with one row for each output position and
    one column for each output channel. The gradient of the convolution's weights counts
    as a product with one column for each output channel, and one row for each of the
    weights that belong to one output channel. The labels name the dimensions of input,
    weights (HLO's "kernel") and output of the forward pass, even if the instruction
    computes a gradient.
    """
    image, kernel, output = 0, 1, 2
    if "convBackwardFilter" in op.attributes:
        kernel, output = 2, 1
    elif "convBackwardInput" in op.attributes:
        image, output = 2, 0
    kernel_labels = labels[1]
    groups = re.search(r"feature_group_count=(\d+)", op.attributes)
    batch = float(groups[1]) if groups else 1.0
    weights = math.prod(shapes[kernel].dims)
    channels = shapes[kernel].dims[kernel_labels.index("o")]
    work = math.prod(shapes[output].dims) * weights / channels
    if kernel == 2:
        rows, columns = weights / channels, channels / batch
    else:
        made = shapes[image if image == 2 else output]
        features = made.dims[(labels[0] if image == 2 else labels[2]).index("f")]
        rows, columns = math.prod(made.dims) / features, features / batch
    depth = work / (batch * rows * columns)
    return _product(shapes[0], batch, rows, columns, depth)
