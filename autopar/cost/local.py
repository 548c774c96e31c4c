"""Bytes of one array on one device, and for how long they are there."""

from __future__ import annotations

import dataclasses
import math

from autopar.cost.tiles import tiled_bytes
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout, shards
from autopar.steps.analysis import Analysis

BUFFER_KINDS: tuple[str, ...] = (
    "activations",  # of the forward pass, for the backward pass
    "gradients",
    "gathered copies",  # arrays in another layout than their own
    "collective buffers",  # what a collective sends or receives
    "results",  # that take no input's place
    "temporaries",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of one device that are live in ``[start, end]`` (operator times).

    Attributes:
      value: the array.
      nbytes: bytes on one device.
      start: the first time at which it is live.
      end: the last.
      kind: what it is for, one of `BUFFER_KINDS`.
    """

    value: int
    nbytes: float
    start: int
    end: int
    kind: str = "temporaries"


def local_bytes(
    assignment: Assignment, value: int, layout: Layout, *, tiled: bool
) -> float:
    """Bytes of an array's part on one device, in the layout given.

    Args:
      assignment: of the program.
      value: the array.
      layout: of it.
      tiled: whether arrays lie in tiles. What hand-written kernels read and write is
        row-major then (the layouts of ``jax/_src/tpu_custom_call.py``, jax 0.10.2).
    """
    known, sizes = assignment.graph.values[value], assignment.sizes
    if not tiled:
        return known.nbytes / shards(layout, sizes)
    item_bytes = known.nbytes / max(1, math.prod(known.shape))
    parts = (math.prod(sizes[a] for a in axes) for axes in layout)
    shape = [-(-n // part) for n, part in zip(known.shape, parts, strict=True)]
    row_major = value in assignment.analysis.in_kernels
    return tiled_bytes(shape, item_bytes, row_major=row_major)


def sent_bytes(analysis: Analysis, value: int, *, rounds: bool) -> float:
    """Bytes of a whole array on its way to its readers.

    Args:
      analysis: of the program.
      value: the array.
      rounds: whether what products alone read is sent in bfloat16
        (`autopar.cluster.DeviceSpec.rounds_operands`).
    """
    part = analysis.rounded_values.brought_part(value) if rounds else 1.0
    return part * analysis.graph.values[value].nbytes
