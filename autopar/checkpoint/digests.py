"""Checksums of arrays that do not depend on how an array is split.

A checksum has two sums over the words of an array, of one word for each element::

    total    = sum_i w_i        mod 2^64
    weighted = sum_i i * w_i    mod 2^64

with ``i`` the place of the element in the whole array, in row-major order. They are
Fletcher's two sums [1], on words of 8 to 64 bits. Both add up over the blocks of an
array, so each device's block is summed where it lies, and no array is gathered. One
changed word changes the first sum; two that swapped places change the second.

[1] J. Fletcher, "An arithmetic checksum for serial transmissions", IEEE Transactions on
Communications 30 (1982).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar_errors import InputError

_MASK = (1 << 64) - 1
# Elements that are summed at a time: the block that is read twice stays in the cache.
_CHUNK = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """The checksum of an array, or of a part of it.

    >>> Digest(3, 5) + Digest(1, 1)
    Digest(total=4, weighted=6)
    >>> str(Digest(4, 6))
    '00000000000000040000000000000006'
    """

    total: int = 0
    weighted: int = 0

    def __add__(self, other: Digest) -> Digest:
        """The checksum of two parts together."""
        return Digest(
            (self.total + other.total) & _MASK,
            (self.weighted + other.weighted) & _MASK,
        )

    def __str__(self) -> str:
        """Returns 32 hex digits."""
        return f"{self.total:016x}{self.weighted:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Reads what ``str`` wrote.

        Raises:
          InputError: the text is no checksum.
        """
        if len(text) != 32:
            raise InputError(f"Digest: expected 32 hex digits, got '{text}'.")
        return cls(int(text[:16], 16), int(text[16:], 16))


def digest_of(array: Any) -> Digest:
    """The checksum of what this process holds of an array; a replica counts once.

    Args:
      array: a ``jax.Array`` without extended dtype. Over all processes the parts add
        up to the checksum of the whole array.
    """
    found = Digest()
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begin = [s.start or 0 for s in shard.index]
            found += block_digest(np.asarray(shard.data), begin, array.shape)
    return found


def block_digest(
    block: np.ndarray, begin: Sequence[int], shape: Sequence[int]
) -> Digest:
    """The checksum of a block of an array.

    Args:
      block: the elements.
      begin: of each dim, the first index of the block.
      shape: of the whole array.
    """
    if not block.size:
        return Digest()
    words, wide = _words(block)
    columns = words.shape[-1] if words.ndim else 1
    flat = words.reshape(-1, columns)
    rows = _row_places(block.shape, begin, shape, wide)
    first = (begin[-1] if len(begin) else 0) * wide
    places = np.arange(first, first + columns, dtype=np.uint64)
    found = Digest()
    step = max(1, _CHUNK // columns)
    for k in range(0, len(flat), step):
        found += _sum_rows(flat[k : k + step], rows[k : k + step], places)
    return found


def _sum_rows(words: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Digest:
    """The checksum of some rows; a word's place is that of its row and its column."""
    by_row = words.sum(axis=1, dtype=np.uint64)
    by_column = words.sum(axis=0, dtype=np.uint64)
    weighted = int(np.dot(by_row, rows)) + int(np.dot(by_column, columns))
    return Digest(int(by_row.sum(dtype=np.uint64)), weighted & _MASK)


def _row_places(
    block: Sequence[int], begin: Sequence[int], shape: Sequence[int], wide: int
) -> np.ndarray:
    """The place in the whole array at which the row of each row of a block begins."""
    places = np.zeros((), np.uint64)
    for k in range(len(block) - 1):
        stride = math.prod(shape[k + 1 :]) * wide
        along = np.arange(begin[k], begin[k] + block[k], dtype=np.uint64)
        places = places[..., None] + along * np.uint64(stride)
    return places.reshape(-1)


def _words(block: np.ndarray) -> tuple[np.ndarray, int]:
    """The elements as whole numbers, and how many of them an element is."""
    block = np.ascontiguousarray(block)
    size = block.dtype.itemsize
    if size <= 8:
        words = block.view(f"u{size}")
        bits = _bits(block.dtype)
        return (words & np.uint8((1 << bits) - 1) if bits < 8 else words), 1
    wide = size // 8
    pairs = block.reshape(-1).view("u8")
    return pairs.reshape(*block.shape[:-1], -1), wide


def _bits(dtype: np.dtype) -> int:
    """Bits of an element; of one smaller than a byte, the rest is not defined."""
    if dtype == np.bool_ or dtype.itemsize > 1:
        return 8 * dtype.itemsize
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(kind(dtype).bits)
