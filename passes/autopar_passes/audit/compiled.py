"""Reads the communication and memory of a compiled program.

`hlo_collectives` lists the collectives of the optimized program in the terms of a plan.
A compiler may replace a collective by other instructions. `hlo_collectives` lists them
with the kind and bytes of the original collective, and `compiled_audit` also lists them
as exceptions.

The module also reads a compiled program as a schedule: the sequence of events on one
device. The text of a program for an accelerator lists the instructions in the order in
which they are issued. A collective begins at its ``-start`` instruction, and the device
waits for it at its ``-done`` instruction. The kernels between the two run at the same
time as the collective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from autopar_passes.audit.hlo_text import (
    LAYOUT_OPCODES,
    WHOLE,
    HloModule,
    Instruction,
    Scope,
    ValueFollower,
    device_groups,
    element_index,
    parse_module,
    split_groups,
)
from autopar_passes.audit.kernels import Kernel, kernel_of
from autopar_passes.audit.partitioned import AuditedCollective, MeshAxes, differing_axes
from autopar_passes.jax_compat import EXPECTED_RUNS

SCATTERED: Final = "reduce-scatter run as all-reduce"
GATHERED: Final = "all-gather run as all-reduce"
WIDENED: Final = "bf16 widened to f32"

_KINDS: Final = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_OTHERS: Final = ("collective-broadcast", "ragged-all-to-all", "send", "recv")
_WIDENED_TO: Final = "f32"
_NARROW: Final = ("bf16", "f16")
_CALLERS: Final = ("call", "fusion", "conditional", "async-start")


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledAudit:
    """The communication and the memory of a compiled step, on one device.

    Attributes:
      collectives: all collectives, by the kinds that a plan uses.
      communication_bytes: bytes that one device sends in one step.
      peak_memory_bytes: bytes of arguments, of results that are not arguments updated
        in place, and of temporary buffers.
      argument_bytes: bytes of the arguments.
      output_bytes: bytes of the results.
      alias_bytes: bytes of results that reuse an argument's buffer.
      temp_bytes: bytes of the temporary buffers.
      exceptions: notes on collectives whose instructions differ from the plan's
        collectives in a known way.
    """

    collectives: tuple[AuditedCollective, ...]
    communication_bytes: float
    peak_memory_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    exceptions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A collective, and notes on how its instructions differ from what a plan lists."""

    collective: AuditedCollective
    exceptions: tuple[str, ...] = ()

    def but(self, exception: str) -> Found:
        """Returns this collective with one more note in ``exceptions``."""
        return Found(self.collective, (*self.exceptions, exception))


def hlo_collectives(
    text: str, mesh: MeshAxes = (), *, as_run: bool = False
) -> tuple[AuditedCollective, ...]:
    """Lists the collectives of an optimized program.

    A collective inside a loop counts once for each iteration of the loop. The size of a
    permute is multiplied by the share of devices that send to another device. A permute
    in which no device sends to another is not listed. If each device keeps only a slice
    of an all-reduce, the all-reduce is listed as a reduce-scatter. A second all-reduce
    is listed for the part of the sum that the reduce-scatter does not cover. An
    all-reduce after a reduce-scatter counts only the bytes of the slice that the
    reduce-scatter leaves. An array that was widened from 16 to 32 bits only for sending
    counts the bytes that it has in 16 bits.

    Args:
      text: the text of the optimized module, such as ``compiled.as_text()``.
      mesh: names and sizes of the mesh axes, to name the axes of each group; without
        them no axes are named.
      as_run: whether to list the instructions that the program really runs, instead of
        the original collectives.
    """
    reader = Reader(text, mesh, as_run)
    return tuple(found.collective for found in reader.entry())


def compiled_audit(compiled: Any, mesh: MeshAxes = ()) -> CompiledAudit:
    """Reads communication and memory of a ``jax.stages.Compiled``.

    Args:
      compiled: the compiled step.
      mesh: as in `hlo_collectives`.
    """
    reader = Reader(compiled.as_text(), mesh, False)
    found = tuple(reader.entry())
    names = {name for f in found for name in f.exceptions} | reader.unknown
    memory = compiled.memory_analysis()
    arguments = int(memory.argument_size_in_bytes)
    outputs = int(memory.output_size_in_bytes)
    aliases = int(memory.alias_size_in_bytes)
    temporaries = int(memory.temp_size_in_bytes)
    return CompiledAudit(
        collectives=tuple(f.collective for f in found),
        communication_bytes=sum(f.collective.sent_bytes for f in found),
        peak_memory_bytes=arguments + outputs - aliases + temporaries,
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=aliases,
        temp_bytes=temporaries,
        exceptions=tuple(sorted(names)),
    )


class Reader:
    """Lists the collectives of one module by the rules of `hlo_collectives`.

    Attributes:
      module: the module.
      follow: follows the values of the module.
      mesh: names and sizes of the mesh axes.
      as_run: whether to list the instructions that the program really runs, instead of
        the original collectives.
      unknown: notes on collectives that are not counted, or whose number of runs is
        uncertain.
    """

    def __init__(self, text: str, mesh: MeshAxes, as_run: bool) -> None:
        """Parses the text of a module. See the attributes for the arguments."""
        self.module: HloModule = parse_module(text)
        self.follow = ValueFollower(self.module)
        self.mesh = tuple(mesh)
        self.as_run = as_run
        self.unknown: set[str] = set()
        self.chains: set[tuple[str, ...]] = set()

    def top(self) -> Scope:
        """Returns the scope of the module's entry computation."""
        return Scope(self.module.computations[self.module.entry])

    def inside(self, scope: Scope, op: Instruction, name: str) -> Scope:
        """Returns the scope of a computation that an instruction calls."""
        return Scope(self.module.computations[name], op, scope)

    def entry(self) -> Iterator[Found]:
        """Yields the collectives of the whole program."""
        yield from self.computation(self.top(), 1.0)

    def computation(self, scope: Scope, trips: float) -> Iterator[Found]:
        """Yields the collectives of one computation, with the number of their runs."""
        for op in scope.computation.instructions.values():
            if op.opcode.removesuffix("-start") in _KINDS:
                yield from self.collective(scope, op, trips)
            elif op.opcode == "while":
                inner = trips * self.loop_count(op)
                for name in (op.callee("condition"), op.callee("body")):
                    yield from self.in_called(scope, op, name, inner)
            elif op.opcode in _CALLERS:
                for name in op.called_names:
                    yield from self.in_called(scope, op, name, trips)
            elif op.opcode in _OTHERS:
                self.unknown.add(f"{op.opcode} not counted")

    def in_called(
        self, scope: Scope, op: Instruction, name: str, trips: float
    ) -> Iterator[Found]:
        """Yields the collectives of a computation that an instruction calls."""
        yield from self.computation(self.inside(scope, op, name), trips)

    def loop_count(self, op: Instruction) -> float:
        """Returns a loop's annotated iterations, or its condition's largest bound."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', op.attributes)
        if noted:
            return float(noted[1])
        expected = re.search(rf'{EXPECTED_RUNS}="([\d.e-]+)"', op.attributes)
        if expected:
            return float(expected[1])
        bound = max(self._constants(op.callee("condition")), default=0)
        if bound == 0:
            self.unknown.add("loop of unknown length counted once")
        return float(max(bound, 1))

    def _constants(self, name: str) -> Iterator[int]:
        for op in self.module.computations[name].instructions.values():
            if op.opcode == "constant" and re.fullmatch(r"\d+", op.literal):
                yield int(op.literal)
            for inner in op.called_names:
                yield from self._constants(inner)

    def collective(
        self, scope: Scope, op: Instruction, trips: float
    ) -> Iterator[Found]:
        """Yields the collectives of one instruction, one for each array."""
        kind = _KINDS[op.opcode.removesuffix("-start")]
        if self._again(op):
            return
        sizes = [scope.instruction(n).shapes[0].nbytes for n in op.operands]
        if kind == "collective_permute":
            yield from self._permute(scope, op, sum(sizes), trips)
            return
        groups = device_groups(op, self.module.num_devices)
        if kind == "all_to_all":
            # An all-to-all has one operand for each device, or one operand that is
            # split.
            yield self._describe(scope, op, 0, kind, groups, sum(sizes), trips)
            return
        for index, nbytes in enumerate(sizes):
            if kind == "all_reduce":
                yield from self._reduction(scope, op, index, groups, nbytes, trips)
            else:
                result = nbytes * (groups.shape[1] if kind == "all_gather" else 1)
                yield self._describe(scope, op, index, kind, groups, result, trips)

    def _again(self, op: Instruction) -> bool:
        """Returns whether a collective is a later piece of one already counted.

        TPU programs write an asynchronous collective into every fusion that runs at the
        same time. All these pieces have the same channel and the same value of the
        attribute ``chain``.
        """
        chain = re.search(r'\bchain_id="(\d+)"', op.attributes)
        channel = re.search(r"\bchannel_id=(\d+)", op.attributes)
        if chain is None or channel is None:
            return False
        key = (op.opcode, channel[1], chain[1])
        known = key in self.chains
        self.chains.add(key)
        return known

    def _permute(
        self, scope: Scope, op: Instruction, nbytes: float, trips: float
    ) -> Iterator[Found]:
        text = op.attributes.partition("source_target_pairs=")[2].partition("}}")[0]
        pairs = [p.split(",") for p in re.findall(r"\d+,\d+", text)]
        sending = [(int(a), int(b)) for a, b in pairs if a != b]
        if sending:
            sent = nbytes * len(sending) / self.module.num_devices
            kind = "collective_permute"
            yield self._describe(scope, op, 0, kind, np.array(sending), sent, trips)

    def _reduction(
        self,
        scope: Scope,
        op: Instruction,
        index: int,
        groups: np.ndarray,
        nbytes: float,
        trips: float,
    ) -> Iterator[Found]:
        """Splits an all-reduce into a part that is sliced afterwards and the rest."""
        need = WHOLE
        if self.as_run and scope.call is not None and scope.call.opcode == "fusion":
            # TPU programs write a reduce-scatter as a fusion of an all-reduce and a
            # slice of its result.
            kind = "reduce_scatter"
            yield self._describe(scope, op, index, kind, groups, nbytes, trips)
            return
        if not self.as_run:
            position = index if len(op.operands) > 1 else None
            need = self.follow.need(scope, op.name, position)
            if self._placed_in_zeros(scope, op.operands[index]):
                kind = "all_gather"
                found = self._describe(scope, op, index, kind, groups, nbytes, trips)
                yield found.but(GATHERED)
                return
            nbytes *= self._arriving(scope, op.operands[index])
        scattered, reduced = split_groups(need, groups)
        if (parts := scattered.shape[1]) > 1:
            kind = "reduce_scatter"
            found = self._describe(scope, op, index, kind, scattered, nbytes, trips)
            yield found.but(SCATTERED)
            nbytes /= parts
        if reduced.shape[1] > 1:
            yield self._describe(scope, op, index, "all_reduce", reduced, nbytes, trips)

    def _describe(
        self,
        scope: Scope,
        op: Instruction,
        index: int,
        kind: str,
        groups: np.ndarray,
        nbytes: float,
        trips: float,
    ) -> Found:
        narrow = not self.as_run and self._narrow(scope, op, index)
        made = AuditedCollective(
            kind=kind,
            axes=differing_axes(self.mesh, groups[0]),
            group=groups.shape[1],
            nbytes=nbytes / 2 if narrow else nbytes,
            trips=trips,
            source=self._source(scope, op, index),
        )
        return Found(made, (WIDENED,) if narrow else ())

    def _source(self, scope: Scope, op: Instruction, index: int) -> str:
        """Returns the user's operation that computed the array of a collective.

        A combined all-reduce has one name for each array.
        """
        if len(op.operands) > 1 and op.opcode != "all-to-all":
            for user in scope.computation.users[op.name]:
                if re.search(rf"\bindex={index}\b", user.attributes):
                    return user.source or op.source
        return op.source

    def _narrow(self, scope: Scope, op: Instruction, index: int) -> bool:
        """Returns whether an array has 16 bits before and after a 32-bit collective.

        All readers of the result must convert it back to 16 bits, and the operand must
        be converted from 16 bits. For an all-reduce only the readers are checked,
        because its operand is a sum in 32 bits.
        """
        operand = op.operands[index]
        if scope.instruction(operand).shapes[0].dtype != _WIDENED_TO:
            return False
        reduced = op.opcode.startswith("all-reduce")
        if not reduced and not self._converted_from(scope, operand):
            return False
        position = index if len(op.operands) > 1 else None
        readers = self.follow.readings(scope, op.name, position, _MOVES)
        return all(
            u.reader is not None
            and u.reader.opcode == "convert"
            and u.reader.shapes[0].dtype in _NARROW
            for u in readers
        )

    def _converted_from(self, scope: Scope, name: str) -> bool:
        """Returns whether a value was widened from 16 bits just before."""
        scope, op = self.follow.origin(scope, name, _MOVES)
        if op.opcode != "convert":
            return False
        return scope.instruction(op.operands[0]).shapes[0].dtype in _NARROW

    def _arriving(self, scope: Scope, name: str) -> float:
        """Returns an array's share on each device after earlier reduce-scatters."""
        scope, op = self.follow.origin(scope, name)
        index = None
        if op.opcode == "get-tuple-element":
            index = element_index(op)
            op = scope.instruction(op.operands[0])
        if op.opcode != "all-reduce":
            return 1.0
        groups = device_groups(op, self.module.num_devices)
        scattered, _ = split_groups(self.follow.need(scope, op.name, index), groups)
        return self._arriving(scope, op.operands[index or 0]) / scattered.shape[1]

    def _placed_in_zeros(self, scope: Scope, name: str) -> bool:
        """Returns whether a value is one shard, written into an array of zeros."""
        scope, op = self.follow.origin(scope, name)
        if op.opcode != "dynamic-update-slice":
            return False
        scope, base = self.follow.origin(scope, op.operands[0])
        if base.opcode == "broadcast":
            scope, base = self.follow.origin(scope, base.operands[0])
        return base.opcode == "constant" and base.literal == "0"


# Operations that change only the layout of an array, and not its dtype.
_MOVES: Final = (LAYOUT_OPCODES - {"convert"}) | {
    "concatenate",
    "dynamic-slice",
    "slice",
}


# Instructions that only pass values to other instructions, so no kernel runs for them.
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
    """The start of a collective.

    Attributes:
      name: the name of the instruction.
      collectives: the collectives of the arrays, which share one message.
      waits: whether the device waits for the end of the collective at once, so that no
        kernel runs at the same time.
    """

    name: str
    collectives: tuple[AuditedCollective, ...]
    waits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The event at which the device waits for the collective of a `Start`."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class EventLoop:
    """Events of a loop that runs ``trips`` times."""

    trips: float
    body: tuple[Event, ...]


Event = Kernel | Start | Done | EventLoop


def device_events(text: str, mesh: MeshAxes = ()) -> tuple[Event, ...]:
    """Returns the events on one device, in the order of an optimized program's text.

    The events include those of all branches of each conditional.

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
