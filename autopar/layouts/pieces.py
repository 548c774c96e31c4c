"""Pieces: the parts of an array that devices exchange when the array changes its
layout.

The old and the new layout each cut the array into blocks. A piece is the intersection
of an old block and a new block. Each process that holds a new block receives each piece
of this block once. If a device of the process itself already has the piece, the process
takes the piece from that device. The runtime moves arrays between processes in this way
(`autopar.runtime.stages.transport`), and `autopar.reports.between` predicts the bytes
between processes from the pieces.
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

# The begin and the end of a block in each dimension.
Block = tuple[tuple[int, int], ...]
# Block of an array -> the devices that hold the block; sorted by block.
Blocks = Mapping[Block, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device has and another device needs.

    Attributes:
      device: device that has the piece.
      process: process of that device.
      begin: for each dimension, the index in the device's block at which the piece
        begins.
      shape: shape of the piece.
      place: for each dimension, the index in the new block at which the piece begins.
    """

    device: Any
    process: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """A block of the target layout in one process.

    Attributes:
      process: the process.
      devices: devices of the process that hold the block; the first device assembles
        the block.
      pieces: pieces of the block; empty if the array is empty.
    """

    process: int
    devices: tuple[Any, ...]
    pieces: tuple[Piece, ...]


def blocks_of(
    layout: Layout, shape: Sequence[int], sizes: Sequence[int], devices: Sequence[Any]
) -> Blocks:
    """Returns the blocks of an array on a mesh.

    Args:
      layout: layout of the array.
      shape: shape of the array.
      sizes: size of each mesh axis.
      devices: devices of the mesh, in the order of the mesh.

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
    """Returns the blocks of the target layout by process, each with its pieces.

    Args:
      have: the blocks of the old layout.
      need: the blocks of the target layout.
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
    """Returns the layout in which a pipeline stage sends or receives a value.

    Each dimension is split into as many parts as the leading mesh axes of both stages
    allow. The devices of both stages then hold the same parts, and copy them without
    the host. Each stage reshards the value on its own devices.

    Args:
      mine: the layout of the value on the stage.
      sizes: size of each axis of the stage's mesh.
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
    """The numbers of parts into which the leading axes of a dimension can split it."""
    found = itertools.accumulate((sizes[a] for a in axes), operator.mul, initial=1)
    return frozenset(found)


def _leading(
    axes: tuple[int, ...], sizes: Sequence[int], parts: frozenset[int]
) -> tuple[int, ...]:
    """The longest list of leading axes whose number of parts is in ``parts``."""
    for count in range(len(axes), 0, -1):
        if math.prod(sizes[a] for a in axes[:count]) in parts:
            return axes[:count]
    return ()
