"""A compiled program as the sequence of what one device does: its schedule.

An accelerator's program is scheduled: its text lists the instructions in the order
in which they are issued. A collective begins at its ``-start`` and is waited for at
its ``-done``; the kernels in between run beside it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from autopar_passes.audit.collectives import AuditedCollective, MeshAxes
from autopar_passes.audit.compiled import Reader
from autopar_passes.audit.hlo_text import HloModule, Instruction
from autopar_passes.audit.hlo_values import Scope
from autopar_passes.audit.kernel_bytes import kernel_bytes

# They hand values on; no kernel runs for them.
_FREE: Final = frozenset(
    {
        "after-all", "bitcast", "constant", "get-tuple-element", "iota",
        "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple",
    }
)  # fmt: skip
_COLLECTIVES: Final = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)')


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one device.

    Attributes:
      name: of its instruction.
      flops: floating point operations of products and convolutions in it.
      nbytes: bytes that it reads and writes.
      dtype: NumPy name of the type of what it multiplies, or of its result.
      cycles: the compiler's own estimate; 0 where it gives none.
    """

    name: str
    flops: float
    nbytes: float
    dtype: str
    cycles: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A collective begins.

    Attributes:
      name: of its instruction.
      collectives: its arrays; they share one message.
      waits: whether nothing runs beside it.
    """

    name: str
    collectives: tuple[AuditedCollective, ...]
    waits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The device waits for a collective that `Start` began under this name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Events that run several times; of a branch, once."""

    trips: float
    body: tuple[Event, ...]


Event = Kernel | Start | Done | Loop


def events(text: str, mesh: MeshAxes = ()) -> tuple[Event, ...]:
    """Returns what one device does, in the order of an optimized program's text.

    Of a conditional every branch counts, as it does in an audit.

    Args:
      text: the text of the scheduled module.
      mesh: names and sizes of the mesh axes, to name the axes of each group.
    """
    reader = Reader(text, mesh, True)
    return tuple(_events(reader, reader.top()))


def _events(reader: Reader, scope: Scope) -> Iterator[Event]:
    for op in scope.computation.instructions.values():
        kind = op.opcode.removesuffix("-start").removesuffix("-done")
        if kind in _COLLECTIVES or kind == "async":
            yield from _communication(reader, scope, op, kind)
        elif op.opcode == "while":
            body = reader.inside(scope, op, op.callee("body"))
            yield Loop(reader.loop_count(op), tuple(_events(reader, body)))
        elif op.opcode in ("call", "conditional"):
            for name in op.called:
                yield from _events(reader, reader.inside(scope, op, name))
        elif op.opcode not in _FREE and not op.opcode.startswith("copy-"):
            yield _kernel(reader.module, scope, op)


def _communication(
    reader: Reader, scope: Scope, op: Instruction, kind: str
) -> Iterator[Event]:
    if op.opcode.endswith("-done"):
        yield Done(op.operands[0])
        return
    if kind == "async":
        inner = [c for n in op.called for c in _of(reader, scope, op, n)]
    else:
        inner = [f.collective for f in reader.collective(scope, op, 1.0)]
    if inner:
        sync = not op.opcode.endswith("-start") or '"is_sync":true' in op.attributes
        yield Start(op.name, tuple(inner), sync)


def _of(
    reader: Reader, scope: Scope, op: Instruction, name: str
) -> Iterator[AuditedCollective]:
    inner = reader.inside(scope, op, name)
    yield from (f.collective for f in reader.computation(inner, 1.0))


def _kernel(module: HloModule, scope: Scope, op: Instruction) -> Kernel:
    operands = [s for n in op.operands for s in scope.instruction(n).shapes]
    products = [
        (inner, instruction)
        for inner, instruction in _instructions(module, scope, op)
        if instruction.opcode in ("dot", "convolution", "custom-call")
    ]
    first = operands[0] if products and operands else None
    dtype = (first or (op.shapes[0] if op.shapes else None)) or None
    cycles = re.search(r'"estimated_cycles":"?(\d+)', op.attributes)
    return Kernel(
        op.name,
        sum(_flops(inner, instruction) for inner, instruction in products),
        kernel_bytes(module, scope, op),
        _NUMPY.get(dtype.dtype, "float32") if dtype else "float32",
        int(cycles[1]) if cycles else 0,
    )


_NUMPY: Final = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s8": "int8", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


def _instructions(
    module: HloModule, scope: Scope, op: Instruction
) -> Iterator[tuple[Scope, Instruction]]:
    """An instruction, or those of the fusion that it calls."""
    yield scope, op
    if op.opcode == "fusion":
        inner = Scope(module.computations[op.called[0]], op, scope)
        for instruction in inner.computation.instructions.values():
            yield from _instructions(module, inner, instruction)


def _flops(scope: Scope, op: Instruction) -> float:
    """Floating point operations of a product; a multiply-add counts two."""
    shapes = [scope.instruction(n).shapes[0].dims for n in op.operands[:2]]
    if len(shapes) < 2 or not op.shapes:
        return 0.0
    result = op.shapes[0].dims
    found = _CONTRACTED.search(op.attributes)
    if found is not None:
        dims = [int(n) for n in re.findall(r"\d+", found[1])]
        return 2.0 * math.prod(result) * math.prod(shapes[0][d] for d in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->", op.attributes)
    if labels is None:
        return 0.0
    return _convolution_flops(op, (*shapes, result), labels[2])


def _convolution_flops(
    op: Instruction, shapes: Sequence[tuple[int, ...]], kernel_labels: str
) -> float:
    """``2 |output| |kernel| / output channels``, whichever of the three is made."""
    kernel, output = 1, 2
    if "convBackwardFilter" in op.attributes:
        kernel, output = 2, 1
    elif "convBackwardInput" in op.attributes:
        output = 0
    channels = shapes[kernel][kernel_labels.index("o")]
    work = math.prod(shapes[output]) * math.prod(shapes[kernel])
    return 2.0 * work / channels
