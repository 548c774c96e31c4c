"""Tiles: rectangular parts of arrays, such as the shard of a device.

A tile is given by two corners: the index of its first element, and one past its last. A
plan splits an array into a grid of tiles: any two of them are equal or do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# For each dimension, the index of the first element; and for each dimension, one past
# the index of the last element.
Tile = tuple[tuple[int, ...], tuple[int, ...]]


def tile_of(index: Sequence[slice], shape: Sequence[int]) -> Tile:
    """The tile for an index of slices, such as JAX gives for a shard.

    >>> tile_of((slice(2, 4), slice(None)), (8, 3))
    ((2, 0), (4, 3))
    """
    ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)


def whole(shape: Sequence[int]) -> Tile:
    """The tile that covers the whole array."""
    return (0,) * len(shape), tuple(shape)


def extent(tile: Tile) -> tuple[int, ...]:
    """The shape of a tile."""
    return tuple(b - a for a, b in zip(*tile, strict=True))


def size(tile: Tile) -> int:
    """The number of elements of a tile."""
    return math.prod(extent(tile))


def common(first: Tile, second: Tile) -> Tile | None:
    """The overlap of two tiles; None: they do not overlap.

    >>> common(((0,), (4,)), ((2,), (8,)))
    ((2,), (4,))
    """
    start = tuple(map(max, first[0], second[0]))
    stop = tuple(map(min, first[1], second[1]))
    empty = any(a >= b for a, b in zip(start, stop, strict=True))
    return None if empty and size(first) and size(second) else (start, stop)


def within(tile: Tile, outer: Tile) -> tuple[Any, ...]:
    """The index that selects ``tile`` from an array that holds the tile ``outer``.

    The selected array is a view, even if the array has no dimensions.
    """
    ranges = zip(tile[0], tile[1], outer[0], strict=True)
    return (*(slice(a - o, b - o) for a, b, o in ranges), ...)


def covers(shape: Sequence[int], tiles: Iterable[Tile]) -> bool:
    """Whether tiles of one grid cover an array of this shape completely."""
    return sum(size(tile) for tile in set(tiles)) >= math.prod(shape)


def to_data(tile: Tile) -> list[list[int]]:
    """A tile as lists, for a message."""
    return [list(tile[0]), list(tile[1])]


def from_data(data: Any) -> Tile:
    """Reads the result of `to_data`."""
    return tuple(data[0]), tuple(data[1])


def complete(shapes: Mapping[str, Sequence[int]], held: Iterable[Any]) -> bool:
    """Whether several processes together hold every array completely.

    Args:
      shapes: path -> shape of the whole array.
      held: for each process, path -> tiles as data.
    """
    found: dict[str, set[Tile]] = {path: set() for path in shapes}
    for holder in held:
        for path, tiles in holder.items():
            found[path].update(from_data(tile) for tile in tiles)
    return all(covers(shape, found[path]) for path, shape in shapes.items())
