"""Moves the state of a step from one layout to another.

A `StateLayout` describes the arrays of a state and their shardings, without devices. A
`Transport` knows the devices and moves the arrays. This module does not
move the state of codecs, because residuals change shape with the number of workers
(`autopar.runtime.gradients.codec_state`).

`move_array` moves one array between shardings of one process, block by block. Each
device gets the elements that it lacks from the blocks of other devices. So neither a
device nor the host ever holds more than one block in addition to the old and the new
array. JAX's own ``device_put`` needs more: between different sets of devices it copies
the whole array to the host, and between some layouts of the same devices it gathers the
whole array.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.cluster import Cluster
from autopar.errors import PlanError, RunError
from autopar.plans import Plan
from autopar.plans.schema import Spec
from autopar.runtime import placement
from autopar.runtime.creation import flat_state, plan_shardings
from autopar.runtime.placement import stage_meshes
from autopar.steps.analysis import Analysis
from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.layouts import HOST_MEMORY
from autopar_passes.program.static_leaves import StaticError

# For each dim of a block: its first index, and the index after its last.
Block = tuple[tuple[int, int], ...]


def is_movable(array: Any, sharding: Any) -> bool:
    """Whether `move_array` should move an array to a sharding.

    `move_array` should move an array if all old and new devices belong to this process,
    and are CPUs or two different sets of devices. Within one set of accelerators,
    ``device_put`` is better: JAX then moves the array over the links of the devices.
    """
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return False
    if not sharding.is_fully_addressable or array.sharding == sharding:
        return False
    if jax.typeof(array).weak_type or not array.committed:
        return False
    same = array.sharding.device_set == sharding.device_set
    on_host = all(d.platform == "cpu" for d in sharding.device_set)
    return on_host or not same


def move_array(array: jax.Array, sharding: Any) -> Any:
    """Returns the array with another sharding.

    A block that stays on its device shares its memory with the old array.

    Args:
      array: the array; typed keys are moved as their integers.
      sharding: the new sharding.
    """
    bits: jax.Array = jax_compat.key_bits(array)
    shape = bits.shape
    source = _blocks(bits)
    here = {
        (device, block): data
        for block, shards in source.items()
        for device, data in shards
        if bits.sharding.memory_kind == sharding.memory_kind
    }
    parts: list[jax.Array] = []
    made: dict[Block, jax.Array] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        block = _block(index, shape)
        part = here.get((device, block))
        if part is None:
            whole = source.get(block)
            given = whole[0][1] if whole else made.get(block)
            if given is None:
                given = _assemble_block(block, source, bits.dtype)
            where = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            part = jax.device_put(given, where)
            made.setdefault(block, part)
        parts.append(part)
    new = jax.make_array_from_single_device_arrays(
        shape, sharding, parts, dtype=bits.dtype
    )
    return jax_compat.with_dtype(new, array.dtype)


def shares_memory(one: Any, other: Any) -> bool:
    """Whether some block of one array has the same memory as a block of the other."""
    pointers = [
        {
            shard.data.unsafe_buffer_pointer()
            for shard in jax_compat.key_bits(x).addressable_shards
            if shard.data.size
        }
        for x in (one, other)
    ]
    return bool(pointers[0] & pointers[1])


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 if the system does not report it.

    The value is read from ``/proc``.
    """
    with contextlib.suppress(OSError, AttributeError, ValueError):
        words = pathlib.Path("/proc/self/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def return_memory(but: int) -> None:
    """Returns memory that this process has freed to the operating system.

    The C library of Linux does not return memory that is freed in small pieces to the
    system. Without this function, a state that is moved array by array may therefore
    take twice its memory. Other C libraries have no function to return memory.
    Returning memory takes as much time as the move itself, so small amounts stay with
    the process.

    Args:
      but: the function does nothing if the process uses at most this many bytes.
    """
    if 0 < resident_bytes() <= but:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _blocks(bits: jax.Array) -> dict[Block, list[tuple[Any, jax.Array]]]:
    """Returns the blocks of an array, each with its devices and their data."""
    out: dict[Block, list[tuple[Any, jax.Array]]] = {}
    for shard in bits.addressable_shards:
        block = _block(shard.index, bits.shape)
        out.setdefault(block, []).append((shard.device, shard.data))
    return out


def _block(index: Sequence[slice], shape: Sequence[int]) -> Block:
    return tuple(
        (s.start or 0, n if s.stop is None else s.stop)
        for s, n in zip(index, shape, strict=True)
    )


def _assemble_block(
    block: Block, source: Mapping[Block, list[tuple[Any, jax.Array]]], dtype: Any
) -> np.ndarray:
    """Returns a block on the host, assembled from the source blocks that overlap it."""
    out = np.empty([end - begin for begin, end in block], dtype)
    for given, shards in source.items():
        common = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, given, strict=True)
        ]
        if all(begin < end for begin, end in common):
            data = np.asarray(shards[0][1])
            out[_within(common, block)] = data[_within(common, given)]
    return out


def _within(common: Sequence[tuple[int, int]], block: Block) -> tuple[slice, ...]:
    """Returns the slices that select a part from a block."""
    return tuple(
        slice(begin - first, end - first)
        for (begin, end), (first, _) in zip(common, block, strict=True)
    )


# If `move` consumes the old state, it frees moved arrays whenever their copies exceed
# this many bytes.
IN_FLIGHT_BYTES = 16 << 20
# Bytes of freed memory that the process keeps during a move, for the next arrays.
_KEPT_BYTES = 24 << 20
# The name and size of each axis of a mesh, outermost axis first.
Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafLayout:
    """The shape, dtype and sharding of one array of a state.

    Attributes:
      shape: the shape of the whole array.
      dtype: the name of the dtype, such as ``float32`` or ``key<fry>``.
      spec: for each dim, the names of the mesh axes that split it.
      stage: the number of the stage whose devices hold the array, or the number of the
        mesh of all stages (`Plan.home_axes`).
      on_host: whether the array is in host memory.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    stage: int = 0
    on_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The arrays of a state, and their shardings over the meshes of the stages.

    Attributes:
      leaves: path of an array -> its layout, in the order of the state.
      meshes: the axes of each stage's mesh, and the axes of the mesh of all stages if
        the plan uses that mesh.

    Raises:
      InputError: an array is on a stage or an axis that does not exist.
    """

    leaves: dict[str, LeafLayout]
    meshes: tuple[Axes, ...]

    def __post_init__(self) -> None:
        """Checks stages and axes."""
        for path, leaf in self.leaves.items():
            if not 0 <= leaf.stage < len(self.meshes):
                raise InputError(
                    f"StateLayout: '{path}' is of stage {leaf.stage}, and there are "
                    f"{len(self.meshes)} stages."
                )
            names = {name for name, _ in self.meshes[leaf.stage]}
            if unknown := {a for axes in leaf.spec for a in axes} - names:
                raise InputError(
                    f"StateLayout: '{path}' is split over {', '.join(sorted(unknown))}"
                    f", which stage {leaf.stage} does not have."
                )

    def to_json(self) -> str:
        """Returns the layout as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, data: str | bytes) -> StateLayout:
        """Reads a layout from the JSON text of `to_json`.

        Raises:
          InputError: the text is no layout.
        """
        try:
            return _LAYOUT.decode(data)
        except msgspec.MsgspecError as error:
            raise InputError(f"StateLayout: not a layout: {error}.") from error


# The decoder is created at import, because msgspec crashes if two threads inspect the
# same type for the first time at once.
_LAYOUT = msgspec.json.Decoder(StateLayout)


class Transport(Protocol):
    """Moves an array to another layout; the old array stays valid."""

    def carry(self, array: Any, source: LeafLayout | None, target: LeafLayout) -> Any:
        """Returns the array in the target layout.

        Args:
          array: an array in the source layout.
          source: the current layout; None if it is not known.
          target: the new layout.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePut:
    """A transport that uses ``jax.device_put``.

    Within a process it moves any array to any devices of the process. If the devices
    change, it moves the array block by block (`move_array`): no device and no host
    holds a copy of the whole array.

    If devices of several processes are involved, it can move two kinds of arrays: an
    array that already lies on the devices of the target's mesh, and an array of which
    each process holds a whole copy. It cannot move an array to processes that do not
    hold it.

    Attributes:
      meshes: the mesh of each stage.
    """

    meshes: tuple[Mesh, ...]

    def carry(self, array: Any, source: LeafLayout | None, target: LeafLayout) -> Any:
        """See `Transport`."""
        del source  # JAX knows the array's devices
        wanted = sharding(self.meshes[target.stage], target)
        _check_reachable(array, wanted)
        if is_movable(array, wanted):
            array = move_array(array, wanted)
        return placement.place(array, wanted)


def _check_reachable(array: Any, wanted: NamedSharding) -> None:
    """Checks that JAX can move an array that spans processes to a sharding.

    Raises:
      PlanError: JAX cannot, because the devices differ.
    """
    if not placement.is_global(array) or array.sharding.device_set == wanted.device_set:
        return
    raise PlanError(
        f"the state lies on {len(array.sharding.device_set)} devices of several "
        f"processes, and the new plan is for {len(wanted.device_set)}: JAX moves it "
        "between the same devices only. Start the script with `autopar run` and train "
        "with autopar.elastic, which form a world of other processes; or save a "
        "checkpoint and restore it (page 'What a checkpoint holds' of the "
        "documentation)."
    )


def sharding(mesh: Mesh, leaf: LeafLayout) -> NamedSharding:
    """Returns the sharding of an array on the mesh of its stage."""
    entries = [axes or None for axes in leaf.spec]
    while entries and entries[-1] is None:
        # Trailing None entries are dropped, as in the program, so that equal
        # shardings compare equal.
        entries.pop()
    names = (x[0] if x and len(x) == 1 else x for x in entries)
    kind = HOST_MEMORY if leaf.on_host else None
    return NamedSharding(mesh, PartitionSpec(*names), memory_kind=kind)


def state_layout(
    analysis: Analysis, plan: Plan, count: int | None = None
) -> StateLayout:
    """Returns the layout that a plan gives the state of a step.

    The state is the first ``count`` flat inputs of the step. Without a ``count``, the
    state is those inputs that the step returns for the next call.
    """
    chosen = sorted(analysis.carried_arguments) if count is None else range(count)
    graph = analysis.graph
    leaves: dict[str, LeafLayout] = {}
    for given in (graph.inputs[k] for k in chosen):
        value = graph.values[given.value]
        stage = plan.home(given.path)
        leaves[given.path] = LeafLayout(
            shape=tuple(value.shape),
            dtype=str(value.dtype),
            spec=plan.home_spec(given.path),
            stage=stage,
            on_host=value.on_host,
        )
    return StateLayout(leaves=leaves, meshes=plan.home_axes)


def move(
    state: Mapping[str, Any],
    source: StateLayout | None,
    target: StateLayout,
    transport: Transport,
    *,
    consume: bool = False,
) -> dict[str, Any]:
    """Returns the state in another layout.

    Args:
      state: the arrays of the state, by path.
      source: the current layout; None if it is not known.
      target: the new layout.
      transport: moves the arrays.
      consume: whether each array is freed as soon as it has been moved. Memory then
        holds at most the larger of the old and the new state, plus `IN_FLIGHT_BYTES` or
        the largest array, whichever is more. If False, the given state stays valid.

    Raises:
      PlanError: state, source and target do not have the same arrays.
      RunError: a move failed after arrays were consumed.
    """
    check_alike(layout_of(state), target)
    if source is not None:
        check_alike(source, target)
    out: dict[str, Any] = {}
    moving = _Consumed(state.values()) if consume else None
    for path, leaf in target.leaves.items():
        given = None if source is None else source.leaves[path]
        if moving is not None:
            moving.make_room(state[path])
        try:
            out[path] = transport.carry(state[path], given, leaf)
        except Exception as error:
            if moving is not None and moving.count:
                raise RunError(
                    f"moving '{path}' failed after {moving.count} arrays of the state "
                    f"had been moved and freed: {error} Restore a checkpoint."
                ) from error
            raise
        if moving is not None:
            moving.add(state[path], out[path])
    if moving is not None:
        moving.free()
    return out


class _Consumed:
    """Arrays that have been moved and are freed once their copies are complete."""

    def __init__(self, state: Iterable[Any]) -> None:
        """Starts without arrays.

        An array that occurs twice in the state is never freed, because the other
        occurrence is still needed.
        """
        counts = collections.Counter(id(x) for x in state)
        self._kept = {k for k, times in counts.items() if times > 1}
        self.count = 0
        self._pairs: list[tuple[jax.Array, Any]] = []
        self._bytes = 0
        self._begin_bytes = resident_bytes()

    def make_room(self, old: Any) -> None:
        """Frees the moved arrays if the next would exceed `IN_FLIGHT_BYTES`."""
        if isinstance(old, jax.Array):
            size = placement.local_bytes(old)
            if self._bytes + size > IN_FLIGHT_BYTES:
                self.free()

    def add(self, old: Any, new: Any) -> None:
        """Adds an array and its copy. NumPy arrays belong to the caller and are not
        freed.
        """
        if old is new or not isinstance(old, jax.Array) or id(old) in self._kept:
            return
        self._pairs.append((old, new))
        self._bytes += max(placement.local_bytes(x) for x in (old, new))
        if self._bytes >= IN_FLIGHT_BYTES:
            self.free()

    def free(self) -> None:
        """Waits for the copies; frees moved arrays that share no memory with them."""
        jax.block_until_ready([new for _, new in self._pairs])
        for old, new in self._pairs:
            if not old.is_deleted() and not shares_memory(old, new):
                old.delete()
                self.count += 1
        self._pairs, self._bytes = [], 0
        return_memory(but=self._begin_bytes + _KEPT_BYTES)


def layout_of(state: Mapping[str, Any]) -> StateLayout:
    """Returns the layout of unsharded arrays, such as arrays on the host."""
    leaves = {
        path: LeafLayout(
            shape=tuple(np.shape(x)),
            dtype=str(jax.typeof(x).dtype),
            spec=((),) * np.ndim(x),
        )
        for path, x in state.items()
    }
    return StateLayout(leaves=leaves, meshes=((),))


def check_alike(first: StateLayout, second: StateLayout) -> None:
    """Checks that two layouts have the same arrays; shardings may differ.

    Raises:
      PlanError: paths, shapes or dtypes differ.
    """
    if differ := list(first.leaves.keys() ^ second.leaves.keys()):
        some = ", ".join(f"'{path}'" for path in sorted(differ)[:4])
        raise PlanError(f"the state is of another step: only one of them has {some}.")
    for path, a in first.leaves.items():
        b = second.leaves[path]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise PlanError(
                f"the state is of another step: '{path}' is {a.dtype}{list(a.shape)}, "
                f"where {b.dtype}{list(b.shape)} is expected."
            )


_ADVICE = (
    "the state is not what the step's first arguments hold. Pass the carried arguments "
    "in the step's order, several of them as a tuple, such as (params, opt_state)."
)


def name_arrays(
    name: str, analysis: Analysis, state: Any, *, structs: bool = False
) -> dict[str, Any]:
    """Returns the arrays of a state by path, as the first inputs of the step.

    Args:
      name: the name of the step, for errors.
      analysis: the step.
      state: one pytree, or a tuple of the leading arguments.
      structs: whether the state may hold ``ShapeDtypeStruct``s.

    Raises:
      PlanError: the shapes or dtypes differ from those of the step's first inputs.
    """
    try:
        leaves, _ = flat_state(state)
    except StaticError as error:
        raise PlanError(f"{name}: {_ADVICE} ({error})") from error
    graph = analysis.graph
    want = [
        (tuple(graph.values[i.value].shape), str(graph.values[i.value].dtype))
        for i in graph.inputs[: len(leaves)]
    ]
    have = [
        (tuple(np.shape(x)), str(jax.typeof(x).dtype))
        if _is_array(x) or (structs and isinstance(x, jax.ShapeDtypeStruct))
        else None
        for x in leaves
    ]
    if not leaves or want != have:
        raise PlanError(f"{name}: {_ADVICE}")
    return {i.path: x for i, x in zip(graph.inputs, leaves, strict=False)}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float))


# For each dim, the range of elements that a device holds: a box.
_Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The bytes that devices receive when a state is moved.

    Attributes:
      nbytes: the sum over all devices.
      most_bytes: the bytes of the device that receives most.
    """

    nbytes: float
    most_bytes: float


def move_of(
    shardings: Sequence[Any], structs: Sequence[Any], plan: Plan, devices: Sequence[Any]
) -> Move:
    """Returns the bytes that must be moved to give a state a plan's shardings.

    Only elements that a device lacks are counted.

    Args:
      shardings: the current shardings of the arrays.
      structs: shapes and dtypes of the arrays.
      plan: the plan with the new shardings.
      devices: the devices of the plan's cluster.
    """
    wanted = plan_shardings(plan, stage_meshes(plan, devices), len(structs))
    lacking: dict[Any, float] = {}
    known: dict[Any, Mapping[Any, int]] = {}
    for old, new, struct in zip(shardings, wanted, structs, strict=True):
        key = (old, new, struct.shape)
        if key not in known:
            known[key] = _lacking(old, new, struct.shape)
        for device, count in known[key].items():
            more = count * struct.dtype.itemsize
            lacking[device] = lacking.get(device, 0.0) + more
    counts = list(lacking.values())
    return Move(nbytes=math.fsum(counts), most_bytes=max(counts, default=0.0))


def _lacking(old: Any, new: Any, shape: tuple[int, ...]) -> dict[Any, int]:
    """Returns, for each device of the new sharding, the number of elements it lacks."""
    held = {d: _box(x, shape) for d, x in old.devices_indices_map(shape).items()}
    found: dict[Any, int] = {}
    for device, index in new.devices_indices_map(shape).items():
        box = _box(index, shape)
        found[device] = _size(box) - _common(box, held.get(device))
    return found


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> _Box:
    return tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))


def _size(box: _Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _common(box: _Box, other: _Box | None) -> int:
    """Returns the number of elements that two boxes share."""
    if other is None:
        return 0
    pairs = zip(box, other, strict=True)
    return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def slowest_bytes_per_s(cluster: Cluster) -> float:
    """Returns the bandwidth of a cluster's slowest links, in bytes/s per device."""
    links = [
        level.link
        for part in cluster.groups or (cluster,)
        for level in part.levels
        if level.size > 1
    ]
    links += [cluster.between] if cluster.between is not None else []
    return min((x.bandwidth_bytes_per_s for x in links), default=math.inf)
