"""Which transpositions XLA's GPU compiler runs in tiles, through shared memory.

The conditions are those of ``GetDescriptionForTiledTransposeEmitter`` and
``GetPackedTransposeTileSizes`` in openxla/xla,
``xla/service/gpu/ir_emission_utils.cc`` (read with jax 0.10.2). Programs of grouped
attention compiled for H100 follow them. A transposition that does not run in tiles is
a plain loop, and plain loops over the same elements become one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Shared memory has so many banks of so many bits; packed tiles fill some of them.
_BANK_BITS, _BANKS, _FILLED_BANKS = 32, 32, 10
# The least size of each of two dimensions that change places, or of large ones.
_LEAST, _LEAST_OF_LARGE, _LARGE = 16, 8, 64 * 128
_MOST_MINOR_BITS = 64


def runs_in_tiles(
    sizes: Sequence[int], source: Sequence[int], target: Sequence[int], bits: int
) -> bool:
    """Whether an array is brought from one order of its dimensions to another in tiles.

    Args:
      sizes: of the dimensions.
      source: the dimensions as they lie, major to minor.
      target: the same dimensions as they are to lie.
      bits: of one element.

    >>> runs_in_tiles((512, 1024), (0, 1), (1, 0), 32)
    True
    >>> runs_in_tiles((512, 2), (0, 1), (1, 0), 32)
    False
    """
    shape, permutation = _normalise(sizes, source, target)
    if len(shape) < 2:
        return False
    if _is_packed(shape, permutation, bits):
        return True
    operand = _operand(shape, permutation)
    minor = shape[-1]
    if permutation[-1] == len(shape) - 1:
        swapped = min(operand[-2], shape[-2])
        narrow = bits * minor <= _MOST_MINOR_BITS
        return narrow and bits * minor * swapped >= 8 * _LEAST
    least = min(operand[-1], minor)
    large = operand[-1] * minor >= _LARGE
    return least >= _LEAST or (least >= _LEAST_OF_LARGE and large)


def _normalise(
    sizes: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The shape of the target, and of which place of the source each dimension is.

    Dimensions that stay together are joined. Place ``i`` of the target is dimension
    ``permutation[i]`` of the source.
    """
    place = {dim: i for i, dim in enumerate(source)}
    runs: list[list[int]] = []
    for dim in target:
        if runs and place[dim] == runs[-1][-1] + 1:
            runs[-1].append(place[dim])
        else:
            runs.append([place[dim]])
    shape = [math.prod(sizes[source[i]] for i in run) for run in runs]
    rank = {first: i for i, first in enumerate(sorted(run[0] for run in runs))}
    return shape, [rank[run[0]] for run in runs]


def _operand(shape: Sequence[int], permutation: Sequence[int]) -> list[int]:
    """The shape of the source."""
    out = [0] * len(shape)
    for place, dim in enumerate(permutation):
        out[dim] = shape[place]
    return out


def _is_packed(shape: Sequence[int], permutation: Sequence[int], bits: int) -> bool:
    """Whether elements narrower than a bank are packed into tiles.

    The dimensions are [.., T2, A, T1, B] in the source and [.., T1, A, T2, B] in the
    target; A and B may be missing.
    """
    if bits >= _BANK_BITS or permutation[-1] == len(shape) - 1:
        return False  # B is not one element
    packed = _BANK_BITS // bits
    across = _BANKS * packed
    t1, t2 = _operand(shape, permutation)[-1], shape[-1]
    middle = len(shape) - 2
    a = shape[middle] if permutation[middle] == middle else 1
    rows, t1_tile = min(t2, across), min(t1, across)
    columns = t1_tile * min(a, across // t1_tile)
    full = min(rows, columns) >= _FILLED_BANKS * packed
    return full and not any(n % packed for n in (rows, columns, t2 % rows))
