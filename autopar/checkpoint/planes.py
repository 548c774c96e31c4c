"""Stores floating-point arrays as planes of bytes, which need less room.

Nearly all bits of trained numbers are noise, but their exponents are few: of the 8 bits
of an exponent, a trained array uses 2 to 4. Byte 0 of all elements, byte 1 of all
elements and so on are stored apart, as *planes*, so that exponents lie side by side.
Before that, the bits of an element are rotated to the left by one. This moves the sign
to the end, and the exponent of ``float32`` and ``bfloat16`` fills the last byte. The
same idea is used by ZipNN [1], with a coder of its own; here the coder is Zstandard at
level 1, in TensorStore, which finds the planes of mantissas incompressible and copies
them.

An array ``[a, b]`` of elements of ``k`` bytes is stored as an array ``[k, a, b]`` of
bytes, in chunks of one plane of one block each.

[1] M. Hershcovitch et al., "ZipNN: Lossless compression for AI models" (2024).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from autopar.errors import CheckpointError

# Smaller arrays are stored as they are: the files of their planes would need more room.
_SMALLEST = 1 << 14
# Blocks that are split, compressed and written at the same time. Each needs memory.
_WRITERS = min(4, os.cpu_count() or 1)
# Elements that are rotated at a time, so that they stay in the processor's cache.
_CHUNK = 1 << 15
_COMPRESSOR = {"id": "zstd", "level": 1}


def pays(dtype: Any, num_bytes: int) -> bool:
    """Whether an array is worth storing as planes.

    >>> pays("bfloat16", 1 << 20), pays("int32", 1 << 20), pays("float32", 4)
    (True, False, False)

    Args:
      dtype: dtype of the elements; not of random keys.
      num_bytes: bytes of the whole array.
    """
    floating = jnp.issubdtype(dtype, jnp.floating)
    return floating and np.dtype(dtype).itemsize > 1 and num_bytes >= _SMALLEST


def split(block: np.ndarray) -> np.ndarray:
    """The planes of a block: ``uint8[k, *shape]``, the least significant byte first.

    Args:
      block: numbers of ``k`` = 2, 4 or 8 bytes, of any shape.
    """
    words = np.ascontiguousarray(block).reshape(-1).view(f"<u{block.itemsize}")
    planes = np.empty((words.itemsize, len(words)), np.uint8)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        turned = _rotated(part, 1)
        for k, plane in enumerate(planes):
            plane[begin : begin + len(part)] = turned >> part.dtype.type(8 * k)
    return planes.reshape(len(planes), *block.shape)


def join(planes: np.ndarray, dtype: Any) -> np.ndarray:
    """The block of which `split` returns the planes.

    Args:
      planes: ``uint8[k, *shape]``.
      dtype: dtype of the block.
    """
    flat = planes.reshape(len(planes), -1)
    words = np.empty(flat.shape[1], f"<u{len(planes)}")
    for begin in range(0, len(words), _CHUNK):
        part = flat[:, begin : begin + _CHUNK].astype(words.dtype)
        turned = part[0]
        for k, plane in enumerate(part[1:], 1):
            turned |= plane << words.dtype.type(8 * k)
        words[begin : begin + _CHUNK] = _rotated(turned, 8 * len(planes) - 1)
    return words.view(dtype).reshape(planes.shape[1:])


def _rotated(words: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers, rotated to the left."""
    right = 8 * words.itemsize - bits
    turned = words << words.dtype.type(bits)
    turned |= words >> words.dtype.type(right)
    return turned


def write(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes this process's blocks of arrays as planes.

    Args:
      folder: folder of the arrays; all processes may write there at the same time.
      arrays: name -> array without replicas, with numbers of 2, 4 or 8 bytes.

    Raises:
      ValueError: the file system refuses a write; TensorStore's message says why.
    """
    with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
        writes: list[concurrent.futures.Future[None]] = []
        for name, array in arrays.items():
            if not array.sharding.addressable_devices:
                continue
            opened = tensorstore.open(
                _spec(folder / name, array), create=True, open=True
            ).result()
            writes += [
                pool.submit(_write_block, opened, shard.index, shard.data)
                for shard in array.addressable_shards
            ]
        for one in writes:
            one.result()


def _write_block(opened: Any, index: Any, block: Any) -> None:
    opened[(slice(None), *index)].write(split(np.asarray(block))).result()


def _spec(place: pathlib.Path, array: jax.Array) -> dict[str, Any]:
    chunk = array.sharding.shard_shape(array.shape)
    return _place(place) | {
        "metadata": {
            "dtype": "|u1",
            "shape": [array.dtype.itemsize, *array.shape],
            "chunks": [1, *chunk],
            "compressor": _COMPRESSOR,
        }
    }


def _place(place: pathlib.Path) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(place)}}


async def read(place: pathlib.Path, wanted: Any) -> jax.Array:
    """Reads an array into its shards. Each block is read once, also for replicas.

    Args:
      place: folder of the array.
      wanted: ``jax.ShapeDtypeStruct`` with a sharding.

    Raises:
      CheckpointError: the array has another shape.
      ValueError: TensorStore cannot read the array.
    """
    opened = await tensorstore.open(_place(place), open=True)
    size = np.dtype(wanted.dtype).itemsize
    expected = (size, *wanted.shape)
    if opened.shape != expected:
        raise CheckpointError(
            f"its planes have the shape {opened.shape}, and not {expected}"
        )
    indices = wanted.sharding.addressable_devices_indices_map(wanted.shape)
    keys = list({_key(index, wanted.shape): None for index in indices.values()})
    found = await asyncio.gather(*(_block(opened, key, wanted.dtype) for key in keys))
    blocks = dict(zip(keys, found, strict=True))
    return jax.make_array_from_callback(
        wanted.shape,
        wanted.sharding,
        lambda index: blocks[_key(index, wanted.shape)],
        dtype=wanted.dtype,
    )


def _key(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(part.indices(n) for part, n in zip(index, shape, strict=True))


async def _block(opened: Any, key: tuple[Any, ...], dtype: Any) -> np.ndarray:
    index = (slice(None), *(slice(begin, end) for begin, end, _ in key))
    shape = tuple(end - begin for begin, end, _ in key)
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return join(await opened[index].read(), dtype)
