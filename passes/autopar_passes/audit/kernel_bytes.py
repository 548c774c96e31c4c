"""The bytes that a kernel of a compiled program reads and writes.

A kernel that slices an array reads the slice alone, as one of a loop over layers does
with the stacked weights, and one that writes a slice in place writes no more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from autopar_passes.audit.hlo_text import Computation, HloModule, Instruction, Shape
from autopar_passes.audit.hlo_values import Scope

# They read of their first operand as many elements as are wanted of their result.
_PARTIAL = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})
# They write a part of their first operand in place: the number of the part.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}


def kernel_bytes(module: HloModule, scope: Scope, op: Instruction) -> float:
    """The bytes of what a kernel reads and writes.

    Args:
      module: with the computation that a fusion calls.
      scope: the instruction's.
      op: the kernel.
    """
    operands = [scope.instruction(name) for name in op.operands]
    if op.opcode == "fusion":
        return _fusion_bytes(module.computations[op.called[0]], operands, op)
    if op.opcode in _IN_PLACE:
        return 2 * _size(operands[_IN_PLACE[op.opcode]].shapes)
    written = _size(op.shapes)
    if op.opcode in _PARTIAL:
        first, *rest = operands
        read = min(_size(first.shapes), written)
        return written + read + sum(_size(x.shapes) for x in rest)
    return written + sum(_size(x.shapes) for x in operands)


def _size(shapes: tuple[Shape, ...]) -> float:
    """Bytes of arrays, without a library's work space, which is a row of bytes."""
    return sum(s.nbytes for s in shapes if s.dtype != "s8" or len(s.dims) > 1)


def _fusion_bytes(
    body: Computation, operands: list[Instruction], op: Instruction
) -> float:
    wanted = _wanted(body)
    total = sum(_written(body, body.instructions[name]) for name in _roots(body))
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


def _written(body: Computation, root: Instruction) -> float:
    update = _updated(body, root)
    return _size(root.shapes if update is None else update.shapes)


def _updated(body: Computation, root: Instruction) -> Instruction | None:
    """What a result writes in place of a part of an operand; None: it is anew."""
    while root.opcode == "bitcast":
        root = body.instructions[root.operands[0]]
    part = _IN_PLACE.get(root.opcode)
    return None if part is None else body.instructions[root.operands[part]]


def _count(op: Instruction) -> float:
    return float(max(1, math.prod(op.shapes[0].dims))) if op.shapes else 1.0


def _wanted(body: Computation) -> dict[str, float]:
    """How many elements of each value of a fusion are made or read, at the most."""
    wanted: defaultdict[str, float] = defaultdict(float)
    in_place: set[str] = set()
    for name in _roots(body):
        root = body.instructions[name]
        update = _updated(body, root)
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
    """How many elements an instruction reads of each operand for those it makes."""
    for slot, name in enumerate(op.operands):
        count = _count(body.instructions[name])
        if op.opcode in _IN_PLACE and in_place:
            yield name, 0.0 if slot == 0 else count
        elif op.opcode in _PARTIAL or op.opcode == "bitcast":
            yield name, min(count, made) if slot == 0 else count
        else:
            yield name, count * made / _count(op)
