"""Moves an array between shardings of one process, block by block.

Each device gets what it needs of the blocks that others have. JAX moves an array
between different sets of devices by way of a copy of the whole on the host, and
between some layouts of the same devices by gathering it; here no device and no host
holds more than a block at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar_passes import jax_compat

# Of each dim of a block, its first index and the one behind its last.
Block = tuple[tuple[int, int], ...]


def movable(array: Any, sharding: Any) -> bool:
    """Whether `move_array` is the way: among own devices, and not by links.

    Accelerators that keep an array among themselves move it over their links.
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
    """The array in another sharding; blocks that stay where they are are shared.

    Args:
      array: keys are moved as their numbers.
      sharding: where it must lie.
    """
    bits: jax.Array = jax_compat.key_bits(array)
    shape = bits.shape
    source = _blocks(bits)
    here = {
        (device, block): data
        for block, shards in source.items()
        for device, data in shards
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
            part = jax.device_put(given, device)
            made.setdefault(block, part)
        parts.append(part)
    new = jax.make_array_from_single_device_arrays(
        shape, sharding, parts, dtype=bits.dtype
    )
    return jax_compat.with_dtype(new, array.dtype)


def shares_memory(one: Any, other: Any) -> bool:
    """Whether a block of one array is a block of the other."""
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
    """The memory of this process that lies in the machine's; 0 where nobody tells."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        words = pathlib.Path("/proc/self/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def return_memory(but: int = 0) -> None:
    """Gives memory that was freed back to the system.

    The C library of Linux keeps what is freed in pieces, so a state that is moved
    piece by piece may lie there twice; others have no such function. Pages that are
    given back cost as much again as the move itself, so nothing is done for little.

    Args:
      but: nothing is done where the process holds at most so many bytes.
    """
    if 0 < resident_bytes() <= but:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _blocks(bits: jax.Array) -> dict[Block, list[tuple[Any, jax.Array]]]:
    """The blocks of an array, each with the devices that have it."""
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
    """A block on the host, put together of the blocks that it overlaps."""
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
    """Where a common part lies in a block."""
    return tuple(
        slice(begin - first, end - first)
        for (begin, end), (first, _) in zip(common, block, strict=True)
    )
