"""A compiled program as the sequence of what one device does: its schedule.

An accelerator's program is scheduled: its text lists the instructions in the order
in which they are issued. A collective begins at its ``-start`` and is waited for at
its ``-done``; the kernels in between run beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from autopar_passes.audit.collectives import AuditedCollective, MeshAxes
from autopar_passes.audit.compiled import Reader
from autopar_passes.audit.hlo_text import Instruction
from autopar_passes.audit.hlo_values import Scope
from autopar_passes.audit.kernels import Kernel, kernel_of

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
class EventLoop:
    """Events that run several times; of a branch, once."""

    trips: float
    body: tuple[Event, ...]


Event = Kernel | Start | Done | EventLoop


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
            yield EventLoop(reader.loop_count(op), tuple(_events(reader, body)))
        elif op.opcode in ("call", "conditional"):
            for name in op.called_names:
                yield from _events(reader, reader.inside(scope, op, name))
        elif op.opcode not in _FREE and not op.opcode.startswith("copy-"):
            yield kernel_of(reader.module, scope, op)


def _communication(
    reader: Reader, scope: Scope, op: Instruction, kind: str
) -> Iterator[Event]:
    if op.opcode.endswith("-done"):
        yield Done(op.operands[0])
        return
    if kind == "async":
        inner = [c for n in op.called_names for c in _of(reader, scope, op, n)]
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
