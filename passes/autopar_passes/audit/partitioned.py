"""Reads the communication of a partitioned program from the compiler itself.

`shardy_collectives` runs the compiler's partitioner on a lowered program, and needs no
device. Later compiler passes for accelerators rewrite two patterns, so
`shardy_collectives` rewrites them too. First, an all-reduce of which each device uses
only a slice counts as a reduce-scatter. Second, two equal collectives of the same array
count once. Only the first rewrite applies to collectives that the program itself
requests inside a `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import passmanager

from autopar_passes.graph.emit import UNKNOWN_TRIPS
from autopar_passes.jax_compat import EXPECTED_RUNS

# Name and size of each axis of the device mesh.
MeshAxes = Sequence[tuple[str, int]]


def sent_ratio(kind: str, group: int) -> float:
    """Bytes that one device sends, divided by the collective's size in bytes.

    In a ring of k devices, a device sends ``(k - 1) / k`` of the size, and twice as
    much for an all-reduce. In a permutation, a device sends the whole size.

    >>> sent_ratio("all_reduce", 4)
    1.5

    Args:
      kind: the kind of collective, as in `autopar.cost.collectives`.
      group: number of devices in the collective's group.
    """
    if kind == "collective_permute":
        return 1.0
    part = (group - 1) / group
    return 2 * part if kind == "all_reduce" else part


@dataclasses.dataclass(frozen=True, slots=True)
class AuditedCollective:
    """One collective that the compiler will run.

    Attributes:
      kind: the kind of collective, as in `autopar.cost.collectives`.
      axes: names of the mesh axes of the group.
      group: number of devices in the group.
      nbytes: the size in bytes: for an all-gather the bytes of the result on one
        device, for any other kind the bytes that one device contributes.
      trips: the number of runs in a step.
      source: the operation's name in the program.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    nbytes: float
    trips: float
    source: str

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in one step."""
        return sent_ratio(self.kind, self.group) * self.nbytes * self.trips


def differing_axes(mesh: MeshAxes, group: np.ndarray) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ.

    >>> differing_axes((("data", 2), ("model", 4)), np.array([0, 4]))
    ('data',)
    """
    if not mesh:
        return ()
    places = np.unravel_index(group, [size for _, size in mesh])
    return tuple(
        name
        for (name, _), place in zip(mesh, places, strict=True)
        if (place != place[0]).any()
    )


_PARTITION = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives))"
)
_KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_reduce": "all_reduce",
    "sdy.reduce_scatter": "reduce_scatter",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "collective_permute",
}
# Collectives that a program requests inside a manual computation.
_ASKED_KINDS = {
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}
# The number of operations in the condition of a loop that counts: the bound, the
# comparison, the return.
_COUNTING_OPERATIONS = 3
_SHARDED = "sdy.sharding"
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_SHARDING = re.compile(
    r"out_sharding=<@\w+, \[(.*?)\]"
    r"(?:, replicated=\{[^}]*\})?(?:, unreduced=\{[^}]*\})?>"
)


def shardy_collectives(lowered: Any) -> tuple[AuditedCollective, ...]:
    """Partitions a lowered program and lists its collectives.

    Args:
      lowered: a ``jax.stages.Lowered`` of a program with shardings.
    """
    module = lowered.compiler_ir("stablehlo").operation.clone()
    with module.context:
        _spread_host_calls(module)
        passmanager.PassManager.parse(_PARTITION).run(module)
        found = _Auditor(module).functions()
        # The compiler never sends an empty array.
        return tuple(c for c in found if c.nbytes)


def _spread_host_calls(operation: Any) -> None:
    """Removes the annotation that a host callback runs on one device.

    Shardy has no collective that sends a value from one device to all devices, so it
    would fail on this annotation.
    """
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                inner = op.operation
                placed = _SHARDED in inner.attributes
                if placed and "maximal" in str(inner.attributes[_SHARDED]):
                    del inner.attributes[_SHARDED]
                _spread_host_calls(inner)


class _Auditor:
    def __init__(self, module: Any) -> None:
        self.bodies: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        for op in module.regions[0].blocks[0].operations:
            name = op.operation.name
            if name == "sdy.mesh":
                found = re.findall(
                    r'"([^"]+)"=(\d+)', str(op.operation.attributes["mesh"])
                )
                self.sizes.update((axis, int(size)) for axis, size in found)
            elif name == "func.func":
                self.bodies[op.attributes["sym_name"].value] = op

    def functions(self) -> Iterator[AuditedCollective]:
        yield from self.region(self.bodies["main"].regions[0], 1.0)

    def region(self, region: Any, trips: float) -> Iterator[AuditedCollective]:
        seen: set[tuple[Any, ...]] = set()
        for block in region.blocks:
            for op in block.operations:
                name = op.operation.name
                if name in _KINDS:
                    key = (name, hash(op.operands[0]), _attributes(op))
                    if key not in seen:
                        seen.add(key)
                        yield from self.collective(op, name, trips)
                elif name in _ASKED_KINDS:
                    yield from self.manual_collective(op, _ASKED_KINDS[name], trips)
                elif name in ("func.call", "call"):
                    callee = self.bodies[op.attributes["callee"].value]
                    yield from self.region(callee.regions[0], trips)
                elif name == "stablehlo.while":
                    count = _loop_count(op)
                    for inner in op.regions:
                        yield from self.region(inner, trips * count)
                else:
                    for inner in op.regions:
                        yield from self.region(inner, trips)

    def collective(
        self, op: Any, name: str, trips: float
    ) -> Iterator[AuditedCollective]:
        text = _header(op)
        after = self.shard_bytes(op.results[0], text)
        source = _source(op)
        axes = self.axis_names(text.split("%", 1)[0])
        kind = _KINDS[name]
        if kind == "all_to_all":
            for part in re.findall(r"\{([^}]*)\}: \d+->\d+", text):
                names, group = self.axis_names(part)
                yield AuditedCollective(kind, names, group, after, trips, source)
            return
        if kind == "all_reduce":
            yield from self.reduction(op, text, after, trips, source)
            return
        names, group = axes
        if kind == "collective_permute":
            names, group = (), 2
        nbytes = after * group if kind == "reduce_scatter" else after
        yield AuditedCollective(kind, names, group, nbytes, trips, source)

    def manual_collective(
        self, op: Any, kind: str, trips: float
    ) -> Iterator[AuditedCollective]:
        """Yields a collective inside a ``shard_map``, whose arrays are per device."""
        arrays = op.results if kind == "all_gather" else op.operands
        nbytes = sum(_array_bytes(value) for value in arrays)
        source = _source(op)
        if kind == "collective_permute":
            pairs = _integers(op.attributes["source_target_pairs"])
            sending = int(np.sum(pairs[:, 0] != pairs[:, 1]))
            sent = nbytes * sending / math.prod(self.sizes.values())
            yield AuditedCollective(kind, (), 2, sent, trips, source)
            return
        groups = _integers(op.attributes["replica_groups"])
        axes, size = (
            differing_axes(tuple(self.sizes.items()), groups[0]),
            groups.shape[1],
        )
        if kind == "all_reduce" and _keeps_part(op, size):
            kind = "reduce_scatter"
        if size > 1:
            yield AuditedCollective(kind, axes, size, nbytes, trips, source)

    def reduction(
        self, op: Any, text: str, nbytes: float, trips: float, source: str
    ) -> Iterator[AuditedCollective]:
        """Splits an all-reduce into a part that is sliced afterwards and the rest."""
        entries = [self.entry(m) for m in _AXIS.finditer(text.split("%", 1)[0])]
        scattered = self.sliced_axes(op, set(entries))
        for name, size in scattered:
            yield AuditedCollective(
                "reduce_scatter", (name,), size, nbytes, trips, source
            )
            nbytes /= size
        rest = [e for e in entries if e not in scattered]
        if rest:
            group = math.prod(s for _, s in rest)
            names = tuple(n for n, _ in rest)
            yield AuditedCollective("all_reduce", names, group, nbytes, trips, source)

    def sliced_axes(
        self, op: Any, reduced: set[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Returns the reduced mesh axes over which every reader only slices the result.

        The axes are in the order of the slices. The result is empty if the slice is
        also over other axes, because XLA then generates no reduce-scatter.
        """
        out: list[tuple[str, int]] = []
        while True:
            users = [u.owner for u in op.results[0].uses]
            if len(users) != 1 or users[0].operation.name != "sdy.all_slice":
                return out
            op = users[0]
            cut = _header(op).split("%", 1)[0].split("=", 1)[-1]
            axes = [self.entry(m) for m in _AXIS.finditer(cut)]
            if not reduced.issuperset(axes):
                return out
            out.extend(axes)

    def entry(self, match: re.Match[str]) -> tuple[str, int]:
        name, _, size = match.groups()
        return name, int(size) if size else self.sizes[name]

    def axis_names(self, text: str) -> tuple[tuple[str, ...], int]:
        entries = [self.entry(m) for m in _AXIS.finditer(text)]
        return tuple(n for n, _ in entries), math.prod(s for _, s in entries)

    def shard_bytes(self, value: Any, text: str) -> float:
        """Returns the bytes of one shard of a collective's result."""
        shape = list(value.type.shape)
        bits = _bits(value.type.element_type)
        match = _SHARDING.search(text)
        group = self.axis_names(match.group(1))[1] if match else 1
        return math.prod(shape) * bits / 8 / group


def _keeps_part(op: Any, size: int) -> bool:
    """Whether each device uses only one of ``size`` slices of a result."""
    users = [use.owner for value in op.results for use in value.uses]
    if len(users) != 1 or users[0].operation.name != "stablehlo.dynamic_slice":
        return False
    whole, part = (math.prod(o.results[0].type.shape) for o in (op, users[0]))
    return whole == size * part


def _header(op: Any) -> str:
    """Returns the first line of an operation, without its result names."""
    line = str(op.operation).split("\n", 1)[0]
    return line.split(" = ", 1)[-1]


def _attributes(op: Any) -> str:
    return re.sub(r"%\w+", "%", _header(op))


def _source(op: Any) -> str:
    found = re.search(r'"([^"]+)"', str(op.operation.location))
    return found.group(1) if found else ""


def _array_bytes(value: Any) -> float:
    """Returns the bytes of an array inside a ``shard_map``."""
    return math.prod(value.type.shape) * _bits(value.type.element_type) / 8


def _integers(attribute: Any) -> np.ndarray:
    """Returns the integer matrix of an attribute."""
    rows, columns = attribute.type.shape
    numbers = [int(n) for n in attribute]
    if attribute.is_splat:
        numbers = [attribute.get_splat_value().value] * (rows * columns)
    return np.array(numbers).reshape(rows, columns)


def _bits(element: Any) -> int:
    text = str(element)
    if text.startswith("complex<"):
        return 2 * _bits(text.removeprefix("complex<").removesuffix(">"))
    if text == "i1":
        return 8
    found = re.search(r"\d+", text)
    return int(found.group()) if found else 32


_ATTRIBUTES = "mhlo.frontend_attributes"


def _loop_count(op: Any) -> float:
    """Reads the trips of a loop ``while i < bound`` where ``i`` starts constant.

    Other loops may say how often they are expected to run
    (`autopar_passes.jax_compat.expecting_runs`).
    """
    own = _ATTRIBUTES in op.attributes and op.attributes[_ATTRIBUTES]
    if own and EXPECTED_RUNS in own:
        return float(own[EXPECTED_RUNS].value)
    block = op.regions[0].blocks[0]
    compares = [o for o in block.operations if "compare" in o.operation.name]
    if len(compares) != 1 or len(list(block.operations)) > _COUNTING_OPERATIONS:
        return UNKNOWN_TRIPS
    counter, bound = (_initial(op, v) for v in compares[0].operands)
    if counter is None or bound is None:
        return UNKNOWN_TRIPS
    return max(0.0, bound - counter)


def _initial(loop: Any, value: Any) -> float | None:
    """Returns the initial value of a scalar in a loop's condition."""
    position = _argument_position(value, loop.regions[0].blocks[0])
    return _constant(value if position is None else loop.operands[position])


def _constant(value: Any) -> float | None:
    owner = value.owner
    if not hasattr(owner, "operation") or "constant" not in owner.operation.name:
        return None
    found = re.search(r"dense<(-?\d+)>", str(owner.operation))
    return float(found.group(1)) if found else None


def _argument_position(value: Any, block: Any) -> int | None:
    for position, argument in enumerate(block.arguments):
        if argument == value:
            return position
    return None
