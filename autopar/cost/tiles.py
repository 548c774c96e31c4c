"""Bytes of arrays that lie in tiles.

A TPU's vector registers are 8 rows of 128 lanes, and so are the tiles of its arrays
(https://openxla.org/xla/tiled_layout). A tile that is not full takes its whole room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_ROWS, _LANES = 8, 128


def tiled_bytes(
    shape: Sequence[int], item_bytes: float, *, row_major: bool = False
) -> float:
    """Bytes of an array in tiles.

    The compiler orders the dimensions so that least is lost: it chooses one for the
    lanes, which is filled up to 128, and one for the rows, which is filled up to 8 or,
    below, to a power of two.

    Args:
      shape: of the array.
      item_bytes: of one element.
      row_major: whether the last dimension lies along the lanes and the one before
        along the rows, whatever is lost.

    >>> tiled_bytes((64, 16, 64), 4.0) / (64 * 16 * 64 * 4)
    2.0
    >>> tiled_bytes((4096, 64), 4.0) / (4096 * 64 * 4)
    1.0
    >>> tiled_bytes((4096, 64), 4.0, row_major=True) / (4096 * 64 * 4)
    2.0
    """
    if row_major and len(shape) > 1:
        rows, lanes = shape[-2:]
        count = math.prod(shape[:-2]) * _rows(rows) * _fill_unit(lanes, _LANES)
        return count * item_bytes
    sizes = [size for size in shape if size != 1]
    count = math.prod(sizes)
    if not sizes or not count:
        return count * item_bytes
    if len(sizes) == 1:
        return _fill_unit(sizes[0], _LANES) * item_bytes
    factors = (
        _fill_unit(lanes, _LANES) / lanes * (_rows(rows) / rows)
        for lanes, rows in itertools.permutations(sizes, 2)
    )
    return count * min(factors) * item_bytes


def _fill_unit(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _rows(size: int) -> int:
    return _fill_unit(size, _ROWS) if size >= _ROWS else 2 ** (size - 1).bit_length()
