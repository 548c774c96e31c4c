"""Parses the text of a compiled program into computations and instructions.

Only what an audit needs is kept: opcodes, shapes, operands, the computations
that are called, and attributes as text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
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
    """One array of a type; a tuple type has several."""

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
      name: its name, unique in the computation.
      opcode: such as ``all-reduce``.
      shapes: the arrays of its result, tuples flattened.
      operands: names of its operands.
      literal: the text between its parentheses.
      attributes: the text after them.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def called_names(self) -> tuple[str, ...]:
        """Names of the computations that it calls, in the order of the text."""
        found = _CALLED.findall(self.attributes)
        return tuple(n for text in found for n in _NAME.findall(text))

    @property
    def source(self) -> str:
        """Returns where in the user's program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def callee(self, role: str) -> str:
        """Returns the computation called in a role, such as ``body``; '' for none."""
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
        """The instructions that read each instruction."""
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
      computations: all of them by name.
      entry: name of the one that runs.
      num_devices: number of devices that run it together.
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
    """Returns the groups of devices that a collective joins, one per row.

    Three notations occur: lists ``{{0,1},{2,3}}``, ``[2,2]<=[4]`` (an iota,
    reshaped and perhaps transposed), and axes of a mesh.

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
    """Returns the device numbers of ``[..]<=[dims]T(permutation)``, flat."""
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
    # A part of an axis, (major)size, splits it into major, size and minor.
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
