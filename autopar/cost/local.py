"""Bytes and lifetime of one array on one device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, shards
from autopar.steps.analysis import Analysis

BUFFER_KINDS: tuple[str, ...] = (
    "activations",  # of the forward pass, for the backward pass
    "gradients",
    "gathered copies",  # arrays resharded for their readers
    "collective buffers",  # send and receive buffers of collectives
    "results",  # results of the step that do not take the place of an input
    "temporaries",
)

# A TPU's vector registers are 8 rows of 128 lanes, and so are the tiles of its arrays
# (https://openxla.org/xla/tiled_layout). A partly filled tile takes as much memory as a
# full tile.
_ROWS, _LANES = 8, 128


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer on one device that is live in ``[start, end]`` (operator times).

    Attributes:
      value: the array.
      nbytes: bytes on one device.
      start: the first time at which the buffer is live.
      end: the last time at which the buffer is live.
      kind: the purpose of the buffer, one of `BUFFER_KINDS`.
    """

    value: int
    nbytes: float
    start: int
    end: int
    kind: str = "temporaries"


def local_bytes(
    assignment: Assignment, value: int, layout: Layout, *, tiled: bool
) -> float:
    """Bytes of an array's shard on one device, in a given layout.

    An array in the memory of the host takes no device memory: the result is 0.

    Args:
      assignment: the program's assignment.
      value: the array.
      layout: the layout of the array.
      tiled: whether memory holds arrays in tiles. Then operands and results of
        hand-written kernels are row-major (the layouts of
        ``jax/_src/tpu_custom_call.py``, jax 0.10.2).
    """
    known, sizes = assignment.graph.values[value], assignment.sizes
    if known.on_host:
        return 0.0
    if not tiled:
        return known.nbytes / shards(layout, sizes)
    item_bytes = known.nbytes / max(1, math.prod(known.shape))
    parts = (math.prod(sizes[a] for a in axes) for axes in layout)
    shape = [-(-n // part) for n, part in zip(known.shape, parts, strict=True)]
    row_major = value in assignment.analysis.in_kernels
    return tiled_bytes(shape, item_bytes, row_major=row_major)


def sent_bytes(analysis: Analysis, value: int, *, rounds: bool) -> float:
    """Bytes of an unsharded array in the dtype in which it is sent to its readers.

    Args:
      analysis: the program's analysis.
      value: the array.
      rounds: whether values that only products read are sent in bfloat16
        (`autopar.cluster.DeviceSpec.rounds_operands`).
    """
    part = analysis.rounded_values.brought_part(value) if rounds else 1.0
    return part * analysis.graph.values[value].nbytes


def tiled_bytes(
    shape: Sequence[int], item_bytes: float, *, row_major: bool = False
) -> float:
    """Bytes of an array that memory holds in tiles.

    The compiler chooses one dimension for the lanes of tiles and one for the rows, so
    that the padding has the fewest bytes. The dimension of the lanes is padded to a
    multiple of 128. The dimension of the rows is padded to a multiple of 8, or to a
    power of two if it is smaller than 8.

    Args:
      shape: shape of the array.
      item_bytes: bytes of one element.
      row_major: whether the last dimension lies along the lanes and the second last
        along the rows, regardless of padding.

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
