"""The kernels of a compiled program: products, and the bytes that each moves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from autopar_passes.audit.hlo_text import HloModule, Instruction, Shape
from autopar_passes.audit.hlo_values import Scope
from autopar_passes.audit.kernel_bytes import kernel_bytes

# Dimensions of a product's left operand, as an instruction or a library names them.
_DIMS: Final = r'lhs_{}_dim(?:s=\{{|ensions":\[)([\d",]*)'
_NUMPY: Final = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s8": "int8", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape in a kernel.

    Attributes:
      batch: how many.
      rows: M, of the left operand.
      columns: N, of the right operand.
      depth: K, which is summed.
      dtype: NumPy name of the operands' type.
      itemsize: bytes of an element of it.
    """

    batch: float
    rows: float
    columns: float
    depth: float
    dtype: str
    itemsize: float

    @property
    def flops(self) -> float:
        """Floating point operations; a multiply-add counts two."""
        return 2.0 * self.batch * self.rows * self.columns * self.depth


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one device.

    Attributes:
      name: of its instruction.
      flops: floating point operations of products and convolutions in it.
      nbytes: bytes that it reads and writes.
      dtype: NumPy name of the type of what it multiplies, or of its result.
      cycles: the compiler's own estimate; 0 where it gives none.
      products: the products and convolutions in it.
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
      scope: of the instruction.
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
    """An instruction, or those of the fusion that it calls."""
    yield scope, op
    if op.opcode == "fusion":
        inner = Scope(module.computations[op.called[0]], op, scope)
        for instruction in inner.computation.instructions.values():
            yield from _instructions(module, inner, instruction)


def product(scope: Scope, op: Instruction) -> Product | None:
    """The products that an instruction stands for; None: it is none."""
    if op.opcode not in ("dot", "convolution", "custom-call") or len(op.operands) < 2:
        return None
    left, right = (scope.instruction(n).shapes[0] for n in op.operands[:2])
    if not op.shapes:
        return None
    summed = _named(op, "contracting")
    if summed is not None:
        batched = _named(op, "batch") or ()
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


def _named(op: Instruction, role: str) -> tuple[int, ...] | None:
    """Dimensions of the left operand in a role; None where the text names none."""
    found = re.search(_DIMS.format(role), op.attributes)
    return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else None


def _convolution(
    op: Instruction, shapes: Sequence[Shape], labels: Sequence[str]
) -> Product:
    """A convolution as products: ``2 |output| |kernel| / output channels`` FLOPs.

    Its output has one row for each position and one column for each channel. That of
    a kernel's gradient has a row for each weight of an output channel. The labels
    stand for the input, the kernel and the output of the forward pass, whichever of
    the three is made.
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
