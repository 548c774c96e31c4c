"""Places the arrays of a batch of which each process passes its own rows.

A plan may need rows in a process that passes other rows. Groups of successive processes
then exchange their rows by one program for all arrays. The arrays of one element size
are packed, so the program has one all-gather for each element size. Over gloo a program
with a collective takes some 10 ms for each array of its own, whatever its bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime import placement

MOST_EXTRA = 2
"""A group exchanges rows if it has at most this many times the rows that a process
needs. If not, JAX moves each array, which sends fewer bytes and takes longer for each
array.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The rows of one array that one process passes.

    Attributes:
      shape: shape of these rows.
      dim: the dimension of the rows.
      dtype: type of the elements.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: np.dtype

    @property
    def rows_first(self) -> tuple[int, ...]:
        """The shape with the rows as the first dimension."""
        rest = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        return (self.shape[self.dim], *rest)

    @property
    def packs(self) -> bool:
        """Whether the bits of an element fill whole bytes, and can be reinterpreted."""
        if self.dtype == np.bool_:
            return True
        if jnp.issubdtype(self.dtype, jnp.integer):
            return jnp.iinfo(self.dtype).bits == 8 * self.dtype.itemsize
        if jnp.issubdtype(self.dtype, jnp.floating):
            return jnp.finfo(self.dtype).bits == 8 * self.dtype.itemsize
        return False


class Rows(NamedTuple):
    """An array of a batch.

    Attributes:
      leaf: the rows that this process passes. Each process passes an equal number.
      shape: shape of the whole array.
      sharding: the sharding that the array gets.
    """

    leaf: Any
    shape: tuple[int, ...]
    sharding: NamedSharding


def place_rows(batch: Mapping[int, Rows]) -> dict[int, Any]:
    """Places arrays of a batch; returns them under the same keys."""
    placed: dict[int, Any] = {}
    exchanged: dict[Mesh, list[tuple[int, np.ndarray, Part]]] = {}
    for k, (leaf, shape, sharding) in batch.items():
        local = np.asarray(leaf, jax.typeof(leaf).dtype)
        part = Part(local.shape, placement.rows_dim(local.shape, shape), local.dtype)
        devices = by_process(sharding.mesh)
        group = group_size(shape, part.dim, sharding, len(devices))
        if group == 1:
            placed[k] = _own_shards(local, part.dim, shape, sharding)
        elif group == 0 or not part.packs:
            placed[k] = _moved(local, part.dim, shape, sharding)
        else:
            mesh = group_mesh(devices, group)
            exchanged.setdefault(mesh, []).append((k, local, part))
    for mesh, found in exchanged.items():
        parts = tuple(part for _, _, part in found)
        buffers = [
            _of_processes(buffer, mesh)
            for buffer in pack([local for _, local, _ in found], parts)
        ]
        gathered = exchange(mesh, parts)(*buffers)
        for (k, _, _), array in zip(found, gathered, strict=True):
            placed[k] = cut(array, batch[k].sharding)
    return placed


@functools.lru_cache(maxsize=64)
def by_process(mesh: Any) -> tuple[tuple[Any, ...], ...]:
    """The devices of each process of a mesh, in the order of the processes."""
    found: dict[int, list[Any]] = {}
    for device in sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id)):
        found.setdefault(device.process_index, []).append(device)
    return tuple(map(tuple, found.values()))


@functools.lru_cache(maxsize=1024)
def group_size(
    shape: tuple[int, ...], dim: int, sharding: NamedSharding, count: int
) -> int:
    """How many successive processes exchange the rows of an array.

    Args:
      shape: shape of the whole array.
      dim: the dimension of the rows.
      sharding: the sharding that the array gets.
      count: number of processes, each with an equal number of successive devices, if
        the devices are sorted by process and number.

    Returns:
      The least number of processes of which each group has all the rows that its
      processes need; 1 if each process needs only its own rows; 0 if a group would have
      more than `MOST_EXTRA` times the rows that a process needs.
    """
    rows = shape[dim] // count
    order = [device for own in by_process(sharding.mesh) for device in own]
    local = len(order) // count
    needs = [(shape[dim], 0)] * count
    for device, index in sharding.devices_indices_map(shape).items():
        begin, end, _ = index[dim].indices(shape[dim])
        own = order.index(device) // local
        needs[own] = min(needs[own][0], begin), max(needs[own][1], end)
    for size in range(1, count + 1):
        if count % size:
            continue
        held = size * rows
        if all(
            k // size * held <= begin and end <= (k // size + 1) * held
            for k, (begin, end) in enumerate(needs)
        ):
            most = max(end - begin for begin, end in needs)
            return size if size == 1 or held <= MOST_EXTRA * most else 0
    raise AssertionError(shape)


@functools.lru_cache(maxsize=64)
def group_mesh(devices: tuple[tuple[Any, ...], ...], group: int) -> Mesh:
    """The mesh of groups of processes: groups, their processes, and their devices."""
    grid = np.array(devices, dtype=object)
    return Mesh(grid.reshape(-1, group, grid.shape[1]), ("group", "member", "local"))


def pack(locals_: Sequence[np.ndarray], parts: Sequence[Part]) -> list[np.ndarray]:
    """Packs the rows of this process, one buffer for each element size."""
    out: list[np.ndarray] = []
    for size in _sizes(parts):
        flat = [
            np.moveaxis(local, part.dim, 0).reshape(-1).view(_bits(size))
            for local, part in zip(locals_, parts, strict=True)
            if part.dtype.itemsize == size
        ]
        out.append(np.concatenate(flat))
    return out


@functools.lru_cache(maxsize=256)
def exchange(mesh: Mesh, parts: tuple[Part, ...]) -> Callable[..., list[jax.Array]]:
    """Returns the program that gathers and unpacks buffers.

    Args:
      mesh: the result of `group_mesh`.
      parts: what each process has packed.

    Returns:
      A function of the buffers of all processes, ``[processes, elements]`` each, split
      over the processes. It returns the arrays, whose rows are split over the groups.
    """

    def gathered(*buffers: jax.Array) -> list[jax.Array]:
        found: dict[int, jax.Array] = {}
        for size, buffer in zip(_sizes(parts), buffers, strict=True):
            whole = jax.lax.all_gather(buffer[0], "member")
            at = 0
            for k, part in enumerate(parts):
                if part.dtype.itemsize == size:
                    end = at + math.prod(part.shape)
                    found[k] = _unpacked(whole[:, at:end], part)
                    at = end
        return [found[k] for k in range(len(parts))]

    rows = PartitionSpec(("group", "member"))
    results = [PartitionSpec(*[None] * part.dim, "group") for part in parts]
    return jax.jit(
        jax.shard_map(
            gathered, mesh=mesh, in_specs=rows, out_specs=results, check_vma=False
        )
    )


def cut(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array with another sharding, whose shards lie within the old ones."""
    held = array.sharding.devices_indices_map(array.shape)
    wanted = sharding.devices_indices_map(array.shape)
    shards: list[jax.Array] = []
    for shard in array.addressable_shards:
        old, new = held[shard.device], wanted[shard.device]
        within = _within(new, old, array.shape)
        whole = all(
            s == slice(0, n) for s, n in zip(within, shard.data.shape, strict=True)
        )
        shards.append(shard.data if whole else shard.data[within])
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _within(
    new: Sequence[slice], old: Sequence[slice], shape: Sequence[int]
) -> tuple[slice, ...]:
    """An index into the array at the index ``old``, instead of into the whole array."""
    out: list[slice] = []
    for own, around, size in zip(new, old, shape, strict=True):
        begin, end, _ = own.indices(size)
        first = around.indices(size)[0]
        out.append(slice(begin - first, end - first))
    return tuple(out)


def _unpacked(flat: jax.Array, part: Part) -> jax.Array:
    """The array of a group from its elements, ``[members, elements]``."""
    rows, *rest = part.rows_first
    array = flat.reshape(flat.shape[0] * rows, *rest)
    if part.dtype == np.bool_:
        array = array != 0
    else:
        array = jax.lax.bitcast_convert_type(array, part.dtype)
    return jnp.moveaxis(array, 0, part.dim)


def _sizes(parts: Sequence[Part]) -> list[int]:
    return sorted(Counter(part.dtype.itemsize for part in parts))


def _bits(size: int) -> np.dtype:
    return np.dtype(f"u{size}")


def _of_processes(buffer: np.ndarray, mesh: Mesh) -> jax.Array:
    """The buffers of all processes, ``[processes, elements]``, split over them."""
    lies = NamedSharding(mesh, PartitionSpec(("group", "member")))
    own = [
        jax.device_put(buffer[None], device)
        for device in mesh.devices.flat
        if device in lies.addressable_devices
    ]
    shape = (mesh.shape["group"] * mesh.shape["member"], buffer.size)
    return jax.make_array_from_single_device_arrays(shape, lies, own)


def _own_shards(
    local: np.ndarray, dim: int, shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """Places an array of which each process needs only its own rows."""
    first = min(
        index[dim].indices(shape[dim])[0]
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    )
    begin = first - first % local.shape[dim]
    own = [slice(0, n) for n in shape]
    own[dim] = slice(begin, begin + local.shape[dim])
    return jax.make_array_from_callback(
        shape, sharding, lambda index: local[_within(cast(Any, index), own, shape)]
    )


def _moved(
    local: np.ndarray, dim: int, shape: tuple[int, ...], sharding: NamedSharding
) -> Any:
    """Places an array by JAX's own move between two shardings."""
    mesh = group_mesh(by_process(sharding.mesh), 1)
    lies = NamedSharding(mesh, PartitionSpec(*[None] * dim, "group"))
    whole = jax.make_array_from_process_local_data(lies, local, shape)
    return placement.place(whole, sharding)
