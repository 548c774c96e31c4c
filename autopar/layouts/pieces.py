"""Pieces: how an array is cut where it goes from one layout to another.

Both layouts cut the array into blocks. A piece is what a block of one shares with a
block of the other. Each process that holds a block of the target gets each piece of it
once, from a device of its own where one has it. So the runtime moves arrays between
processes (`autopar.runtime.stages.routes`), and so the bytes between processes are
predicted (`autopar.reports.between`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.layouts.layout import Layout

# Of each dimension, where a block begins and ends.
Block = tuple[tuple[int, int], ...]
# Block of an array -> the devices that hold it; in order of blocks.
Blocks = Mapping[Block, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device has, and another needs.

    Attributes:
      device: that has it.
      process: of that device.
      begin: where it begins in the block that the device holds.
      shape: of the piece.
      place: where it begins in the block that is put together.
    """

    device: Any
    process: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """A block of the target in one process.

    Attributes:
      process: the process.
      devices: those of the process that hold the block; the first puts it together.
      pieces: of which it is made; none: the array is empty.
    """

    process: int
    devices: tuple[Any, ...]
    pieces: tuple[Piece, ...]


def blocks_of(
    layout: Layout, shape: Sequence[int], sizes: Sequence[int], devices: Sequence[Any]
) -> Blocks:
    """The blocks of an array on a mesh.

    Args:
      layout: of the array.
      shape: of the array.
      sizes: size of each mesh axis.
      devices: of the mesh, in its order.

    >>> blocks_of(((0,), ()), (4, 2), (2,), "ab")
    {((0, 2), (0, 2)): ('a',), ((2, 4), (0, 2)): ('b',)}
    """
    out: dict[Block, tuple[Any, ...]] = {}
    whole = (*layout, *[()] * (len(shape) - len(layout)))
    for device, place in zip(devices, np.ndindex(*sizes), strict=True):
        block: list[tuple[int, int]] = []
        for axes, size in zip(whole, shape, strict=True):
            number, parts = 0, math.prod(sizes[a] for a in axes)
            for axis in axes:
                number = number * sizes[axis] + place[axis]
            block.append((number * size // parts, (number + 1) * size // parts))
        out[tuple(block)] = (*out.get(tuple(block), ()), device)
    return dict(sorted(out.items()))


def landings(
    have: Blocks, need: Blocks, process_of: Callable[[Any], int]
) -> tuple[Landing, ...]:
    """The blocks of the target by process, each with its pieces.

    Args:
      have: the blocks before.
      need: those of the target.
      process_of: the process of a device.
    """
    out: list[Landing] = []
    for block, holders in need.items():
        processes: dict[int, list[Any]] = {}
        for device in holders:
            processes.setdefault(process_of(device), []).append(device)
        for process, devices in processes.items():
            found: list[Piece] = []
            for other, having in have.items():
                shared = tuple(
                    (max(a, c), min(b, d))
                    for (a, b), (c, d) in zip(block, other, strict=True)
                )
                if any(a >= b for a, b in shared):
                    continue
                near = [d for d in having if process_of(d) == process]
                device = near[0] if near else having[len(out) % len(having)]
                found.append(_piece(device, process_of(device), shared, block, other))
            out.append(Landing(process, tuple(devices), tuple(found)))
    return tuple(out)


def _piece(
    device: Any, process: int, shared: Block, block: Block, other: Block
) -> Piece:
    return Piece(
        device,
        process,
        tuple(a - c for (a, _), (c, _) in zip(shared, other, strict=True)),
        tuple(b - a for a, b in shared),
        tuple(a - c for (a, _), (c, _) in zip(shared, block, strict=True)),
    )


def wire_layout(
    mine: Layout, sizes: Sequence[int], theirs: Layout, other_sizes: Sequence[int]
) -> Layout:
    """The layout in which a value leaves a stage for another, or arrives from it.

    Each dimension is split into as many parts as both stages can name by their
    leading axes. Devices then hold the same parts on both sides, and copy them
    without the host; each stage reshards on its own devices.

    Args:
      mine: the layout of the value on the stage.
      sizes: size of each axis of its mesh.
      theirs: the layout on the other stage.
      other_sizes: size of each axis of the other mesh.

    >>> wire_layout(((0, 1),), (2, 2), ((0,),), (2,))
    ((0,),)
    """
    return tuple(
        _leading(own, sizes, _parts(another, other_sizes))
        for own, another in zip(mine, theirs, strict=True)
    )


def _parts(axes: tuple[int, ...], sizes: Sequence[int]) -> frozenset[int]:
    """The numbers of parts into which leading axes can split a dimension."""
    found = itertools.accumulate((sizes[a] for a in axes), operator.mul, initial=1)
    return frozenset(found)


def _leading(
    axes: tuple[int, ...], sizes: Sequence[int], parts: frozenset[int]
) -> tuple[int, ...]:
    """The most leading axes that give one of some numbers of parts."""
    for count in range(len(axes), 0, -1):
        if math.prod(sizes[a] for a in axes[:count]) in parts:
            return axes[:count]
    return ()
