"""Parses the text of a compiled program into computations and instructions.

Only the data that an audit needs is kept: opcodes, shapes, operands, the called
computations, and attributes as text.

The module also follows values through a compiled program, to find the part of a result
that is used. XLA's CPU compiler never generates a reduce-scatter. Instead it generates
an all-reduce, and each device keeps a slice of the result. The slice comes after layout
operations and inside fusions. Its offset is computed from the device's number, so this
module evaluates the offset for every device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from autopar_errors import InputError

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_LEAF = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_BITS: Final = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array of a type; a tuple type has several arrays."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> float:
        """Bytes of the array."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            found = re.search(r"\d+", self.dtype)
            bits = int(found.group()) if found else 32
        return math.prod(self.dims) * bits / 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: the name of the instruction, unique in the computation.
      opcode: the operation, such as ``all-reduce``.
      shapes: the arrays of the result, with tuples flattened.
      operands: the names of the operands.
      literal: the text between the parentheses.
      attributes: the text after the parentheses.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def called_names(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls, in text order."""
        found = _CALLED.findall(self.attributes)
        return tuple(n for text in found for n in _NAME.findall(text))

    @property
    def source(self) -> str:
        """Returns the name of the operation in the user's program."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def callee(self, role: str) -> str:
        """Returns the computation that an attribute such as ``body`` names, or ''."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """One computation: its instructions in order, by name."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Returns, for each instruction, the instructions that read it."""
        out: dict[str, list[Instruction]] = {n: [] for n in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                out[operand].append(instruction)
        return {name: tuple(users) for name, users in out.items()}

    @functools.cached_property
    def parameters(self) -> Mapping[int, str]:
        """The parameters by number."""
        return {
            int(i.literal): i.name
            for i in self.instructions.values()
            if i.opcode == "parameter"
        }


@dataclasses.dataclass(frozen=True, eq=False)
class HloModule:
    """A compiled program.

    Attributes:
      computations: all computations by name.
      entry: name of the computation that is run.
      num_devices: number of devices that run the program together.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse_module(text: str) -> HloModule:
    """Parses the text of an optimized module.

    >>> module = parse_module('''HloModule m, num_partitions=2
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   ROOT %x = f32[4]{0} parameter(0)
    ... }''')
    >>> module.computations[module.entry].instructions["x"].shapes[0].nbytes
    16.0
    """
    header = text.split("\n", 1)[0]
    found = list(_computations(text))
    entries = [c.name for c, is_entry in found if is_entry]
    if not header.startswith("HloModule") or not entries:
        raise InputError(
            "parse_module: expected the text of an HLO module with an ENTRY "
            f"computation, got {header[:60]!r}; pass compiled.as_text()."
        )
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    devices = math.prod(int(c) for c in counts)
    return HloModule({c.name: c for c, _ in found}, entries[0], devices)


def _computations(text: str) -> Iterator[tuple[Computation, bool]]:
    """Yields each computation and whether it is the entry."""
    name, is_entry, root = "", False, ""
    body: dict[str, Instruction] = {}
    for line in text.split("\n"):
        if not name:
            found = _HEADER.match(line)
            if found:
                is_entry, name, body, root = bool(found[1]), found[2], {}, ""
        elif line.startswith("}"):
            yield Computation(name, body, root), is_entry
            name = ""
        elif found := _INSTRUCTION.match(line):
            body[found[2]] = _instruction(found[2], found[3])
            root = found[2] if found[1] else root


def _instruction(name: str, text: str) -> Instruction:
    """Parses ``type opcode(operands), attributes``."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opens = text.find("(", end)
    if end < 0 or opens < 0:
        raise InputError(f"hlo: {text!r} is not an instruction.")
    shapes = tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _LEAF.findall(text[:end])
    )
    closes = _closing(text, opens)
    literal = text[opens + 1 : closes]
    return Instruction(
        name=name,
        opcode=text[end:opens].strip(),
        shapes=shapes,
        operands=tuple(_NAME.findall(literal)),
        literal=literal,
        attributes=text[closes + 1 :],
    )


def _closing(text: str, opens: int) -> int:
    """Returns the position of the parenthesis that closes the one at ``opens``."""
    depth = 0
    for position in range(opens, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise InputError(f"hlo: no closing parenthesis in {text[opens : opens + 80]!r}.")


def device_groups(instruction: Instruction, num_devices: int) -> np.ndarray:
    """Returns the groups of devices that a collective connects, one group per row.

    Three notations occur: lists ``{{0,1},{2,3}}``, reshaped and possibly transposed
    iotas ``[2,2]<=[4]``, and mesh axes.

    >>> iota = parse_instruction("%a = f32[] all-reduce(), replica_groups=[2,2]<=[4]")
    >>> device_groups(iota, 4).tolist()
    [[0, 1], [2, 3]]
    """
    text = instruction.attributes.partition("replica_groups=")[2]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        found = _IOTA.match(text)
        assert found is not None
        return _iota(found).reshape(_ints(found[1]))
    lists = re.match(r"\{(\{[\d,]*\},?)*\}", text)
    groups = [_ints(g) for g in re.findall(r"\{([\d,]+)\}", lists[0])] if lists else []
    return np.array(groups) if groups else np.arange(num_devices)[None, :]


def parse_instruction(line: str) -> Instruction:
    """Parses one line of a computation."""
    found = _INSTRUCTION.match(" " + line.strip())
    if found is None:
        raise InputError(f"hlo: {line!r} is not an instruction.")
    return _instruction(found[2], found[3])


def _iota(found: re.Match[str]) -> np.ndarray:
    """Returns the device numbers of ``[..]<=[dims]T(permutation)`` as a flat array."""
    dims = _ints(found[2] or found[1])
    devices = np.arange(math.prod(dims)).reshape(dims)
    order = _ints(found[3]) if found[3] else range(len(dims))
    return devices.transpose(order).reshape(-1)


def _mesh_groups(text: str) -> np.ndarray:
    """Groups of ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2}``."""
    mesh, _, rest = text.removeprefix("mesh").partition("]")
    found = re.match(r"[^{]*", rest)
    order = _IOTA.search(found[0]) if found else None
    axes = [(m[1], int(m[2])) for m in _AXIS.finditer(mesh)]
    joined = rest[rest.index("{") : rest.index("}")]
    # A part of an axis is written ``(major)size``: the axis is split into the
    # dimensions major, size and minor.
    sizes: list[int] = []
    within: list[bool] = []
    parts = {m[1]: m for m in _AXIS.finditer(joined)}
    for name, size in axes:
        part = parts.get(name)
        major, inner = 1, size if part else 1
        if part and part[3]:
            major, inner = int(part[3]), int(part[4])
        outside = (major, size // major // inner) if part else (size, 1)
        sizes += [outside[0], inner, outside[1]]
        within += [False, True, False]
    devices = _iota(order) if order else np.arange(math.prod(sizes))
    keep = [k for k, inside in enumerate(within) if not inside]
    join = [k for k, inside in enumerate(within) if inside]
    group = math.prod(sizes[k] for k in join)
    return devices.reshape(sizes).transpose(keep + join).reshape(-1, group)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


# Operations that keep every element, or change only its dtype.
LAYOUT_OPCODES: Final = frozenset(
    ("bitcast", "convert", "copy", "optimization-barrier", "reshape", "transpose")
)
_REDUCTIONS: Final = frozenset(("all-reduce", "all-reduce-start"))
_BINARY: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "divide": np.floor_divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "remainder": np.remainder,
    "subtract": np.subtract,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A computation together with the instruction that calls it."""

    computation: Computation
    call: Instruction | None = None
    outer: Scope | None = None

    def instruction(self, name: str) -> Instruction:
        """Returns the instruction with this name."""
        return self.computation.instructions[name]


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The part of a value that each device uses.

    Attributes:
      fraction: size of one slice divided by the size of the value; 1 if a device uses
        the whole value.
      slices: for each device, the identifiers of the slices that it uses. Equal slices
        have equal identifiers. Empty if the slices are unknown.
    """

    fraction: float = 1.0
    slices: tuple[frozenset[tuple[int, ...]], ...] = ()

    @property
    def share(self) -> float:
        """The share of the value that one device uses."""
        count = max((len(s) for s in self.slices), default=1)
        return min(1.0, count * self.fraction)

    def join_groups(self, groups: np.ndarray) -> Need:
        """Returns the slices that all devices of a group use, for each device."""
        if self.fraction == 1.0:
            return self
        if not self.slices:
            return Need(min(1.0, self.fraction * groups.shape[1]))
        union: dict[int, frozenset[tuple[int, ...]]] = {}
        for group in groups.tolist():
            together = frozenset[tuple[int, ...]]().union(
                *(self.slices[d] for d in group)
            )
            union.update((device, together) for device in group)
        slices = tuple(union.get(d, s) for d, s in enumerate(self.slices))
        return Need(self.fraction, slices)


WHOLE: Final = Need()


@dataclasses.dataclass(frozen=True, slots=True)
class ValueReading:
    """One reader of a value; layout operations and fusions in between are skipped."""

    scope: Scope
    reader: Instruction | None
    operand: int


@dataclasses.dataclass(frozen=True, slots=True)
class ValueFollower:
    """Follows values of one module."""

    module: HloModule

    def readings(
        self, scope: Scope, name: str, index: int | None, through: frozenset[str]
    ) -> Iterator[ValueReading]:
        """Yields the readers of a value.

        Args:
          scope: the scope in which the value is computed.
          name: the instruction that computes the value.
          index: the position of the value in a tuple; None for an array.
          through: opcodes to skip.
        """
        if name == scope.computation.root:
            yield from self.readings_outside(scope, index, through)
        for user in scope.computation.users[name]:
            for position in _positions(user, name):
                match user.opcode:
                    case "get-tuple-element":
                        if element_index(user) == (index or 0):
                            yield from self.readings(scope, user.name, None, through)
                    case "fusion":
                        inner = self.inside(scope, user)
                        parameter = inner.computation.parameters[position]
                        yield from self.readings(inner, parameter, None, through)
                    case "tuple" if user.name == scope.computation.root:
                        yield from self.readings_outside(scope, position, through)
                    case opcode if opcode in through or opcode.endswith("-done"):
                        yield from self.readings(scope, user.name, index, through)
                    case _:
                        yield ValueReading(scope, user, position)

    def readings_outside(
        self, scope: Scope, index: int | None, through: frozenset[str]
    ) -> Iterator[ValueReading]:
        """Yields the readers of a value that its computation returns.

        The result of a fusion is followed to its readers. If the computation is no
        fusion, its caller counts as one reader that uses the whole value.
        """
        if scope.call is None or scope.call.opcode != "fusion" or scope.outer is None:
            yield ValueReading(scope, None, 0)
        else:
            yield from self.readings(scope.outer, scope.call.name, index, through)

    def inside(self, scope: Scope, call: Instruction) -> Scope:
        """Returns the scope of a fusion's computation."""
        return Scope(self.module.computations[call.called_names[0]], call, scope)

    def need(self, scope: Scope, name: str, index: int | None) -> Need:
        """Returns the part of a value that each device uses.

        If slices of several sizes are taken, smaller slices are assumed to be inside
        larger ones.
        """
        needs = [
            self.need_of(reading)
            for reading in self.readings(scope, name, index, LAYOUT_OPCODES)
        ]
        largest = max((n.fraction for n in needs), default=1.0)
        if largest == 1.0:
            return WHOLE
        needs = [n for n in needs if n.fraction == largest]
        if not all(n.slices for n in needs):
            return Need(largest)
        per_device = zip(*(n.slices for n in needs), strict=True)
        return Need(largest, tuple(frozenset().union(*slices) for slices in per_device))

    def need_of(self, reading: ValueReading) -> Need:
        """Returns the part of a value that each device uses in one reader."""
        reader = reading.reader
        if reader is None:
            return WHOLE
        if reader.opcode == "dynamic-slice" and reading.operand == 0:
            return self.slice_need(reading.scope, reader)
        if reader.opcode in _REDUCTIONS:
            index = reading.operand if len(reader.operands) > 1 else None
            groups = device_groups(reader, self.module.num_devices)
            return self.need(reading.scope, reader.name, index).join_groups(groups)
        return WHOLE

    def slice_need(self, scope: Scope, reader: Instruction) -> Need:
        """Returns the slice that each device takes, if it depends on the device."""
        whole = scope.instruction(reader.operands[0]).shapes[0].dims
        part = reader.shapes[0].dims
        offsets: list[np.ndarray] = []
        for name, size, kept in zip(reader.operands[1:], whole, part, strict=True):
            if kept < size:
                offset = self.per_device(scope, name)
                if offset is None and not self.depends_on_device(scope, name):
                    return WHOLE
                offsets.append(np.full(0, 0) if offset is None else offset.reshape(-1))
        fraction = math.prod(part) / max(math.prod(whole), 1)
        if any(o.size == 0 for o in offsets):
            return Need(fraction)
        if all((o == o[0]).all() for o in offsets):
            return WHOLE
        rows = np.stack(offsets, axis=1).astype(int).tolist()
        return Need(fraction, tuple(frozenset((tuple(row),)) for row in rows))

    def per_device(self, scope: Scope, name: str) -> np.ndarray | None:
        """Returns an integer value on each device; None if it is unknown.

        Returns:
          The value's array, with the devices as first dimension.
        """
        scope, instruction = self.resolve(scope, name)
        parts = [self.per_device(scope, n) for n in instruction.operands]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        devices = self.module.num_devices
        match instruction.opcode:
            case "partition-id":
                return np.arange(devices)
            case "constant":
                return _constant(instruction, devices)
            case "dynamic-slice" if len(known) == 2:
                last = known[0].shape[1] - 1
                at = np.clip(known[1].reshape(-1).astype(int), 0, last)
                return known[0][np.arange(devices), at].reshape(devices, 1)
            case "clamp":
                low, value, high = (k.reshape(devices, -1) for k in known)
                return np.clip(value, low, high)
            case "bitcast" | "convert" | "copy" | "reshape" | "broadcast":
                return known[0]
            case opcode if opcode in _BINARY:
                left, right = (k.reshape(devices, -1) for k in known)
                return _BINARY[opcode](left, right)
            case _:
                return None

    def depends_on_device(self, scope: Scope, name: str) -> bool:
        """Returns whether a value is computed from the device's number."""
        scope, instruction = self.resolve(scope, name)
        if instruction.opcode == "partition-id":
            return True
        if math.prod(instruction.shapes[0].dims) > self.module.num_devices:
            return False
        return instruction.opcode != "get-tuple-element" and any(
            self.depends_on_device(scope, n) for n in instruction.operands
        )

    def resolve(self, scope: Scope, name: str) -> tuple[Scope, Instruction]:
        """Finds the maker of a value through parameters, fusions and loops."""
        instruction = scope.instruction(name)
        if instruction.opcode == "parameter" and scope.call and scope.outer:
            number = int(instruction.literal)
            if number < len(scope.call.operands):
                return self.resolve(scope.outer, scope.call.operands[number])
        if instruction.opcode == "fusion" and len(instruction.shapes) == 1:
            inner = self.inside(scope, instruction)
            return self.resolve(inner, inner.computation.root)
        if instruction.opcode == "get-tuple-element":
            return self.resolve_element(scope, instruction)
        return scope, instruction

    def origin(
        self, scope: Scope, name: str, through: frozenset[str] = LAYOUT_OPCODES
    ) -> tuple[Scope, Instruction]:
        """Returns the maker of a value; skips layout operations."""
        scope, op = self.resolve(scope, name)
        while op.opcode in through and op.operands:
            scope, op = self.resolve(scope, op.operands[0])
        return scope, op

    def resolve_element(
        self, scope: Scope, element: Instruction
    ) -> tuple[Scope, Instruction]:
        """Finds the maker of a tuple's element, also through loops that return it."""
        holder = scope.instruction(element.operands[0])
        if holder.opcode == "tuple":
            return self.resolve(scope, holder.operands[element_index(element)])
        if holder.opcode == "parameter" and scope.call and scope.outer:
            root = scope.instruction(scope.computation.root)
            kept = root.opcode == "tuple" and root.operands[element_index(element)]
            if scope.call.opcode == "while" and kept == element.name:
                start = scope.outer.instruction(scope.call.operands[0])
                if start.opcode == "tuple":
                    return self.resolve(
                        scope.outer, start.operands[element_index(element)]
                    )
        return scope, element


def split_groups(need: Need, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits an all-reduce into a reduce-scatter and an all-reduce of the rest.

    Returns the groups of devices of the reduce-scatter, and those of the all-reduce.
    """
    size = groups.shape[1]
    ratio = round(need.join_groups(groups).share / need.share)
    of_slice: dict[frozenset[tuple[int, ...]], list[int]] = {}
    if need.slices:
        for device in groups[0].tolist():
            of_slice.setdefault(need.slices[device], []).append(device)
    kept = list(of_slice.values())
    if len(kept) == ratio and len({len(devices) for devices in kept}) == 1:
        return np.array([[devices[0] for devices in kept]]), np.array(kept[:1])
    # The groups are uncertain here: it is unknown which devices keep the same slice, or
    # slices overlap in part. Only the number of slices is used.
    ratio = math.gcd(max(ratio, 1), size)
    parts = groups[:1].reshape(ratio, size // ratio)
    return parts[:, :1].T, parts[:1]


def _positions(user: Instruction, name: str) -> tuple[int, ...]:
    return tuple(k for k, operand in enumerate(user.operands) if operand == name)


def element_index(element: Instruction) -> int:
    """Returns the position that a ``get-tuple-element`` reads."""
    found = re.search(r"\bindex=(\d+)", element.attributes)
    return int(found[1]) if found else 0


def _constant(instruction: Instruction, devices: int) -> np.ndarray | None:
    """Returns a constant's integers; None if the text omits them."""
    if "..." in instruction.literal or not instruction.shapes:
        return None
    numbers = [int(n) for n in re.findall(r"-?\b\d+\b", instruction.literal)]
    if len(numbers) != math.prod(instruction.shapes[0].dims):
        return None
    return np.broadcast_to(np.array(numbers), (devices, len(numbers)))
