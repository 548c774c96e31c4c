"""Gathers over all devices of a TPU slice, stated so that the compiler keeps them.

XLA's TPU compiler runs a gather among all devices of a slice of 64 chips or more as an
all-reduce: each device puts its part into zeros, and twice the bytes are sent. On v5e
it does so up to 16 MiB of result, on v5p at any size (libtpu 0.0.42; slices of 8 to
256 chips, float32 and bfloat16, either dimension, arrays of .25 MiB to 1 GiB). A gather
along one dimension of the torus stays one, so a program states one axis at a time.
That sends as much, and the cost model prices it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.cluster.specs import DeviceSpec
from autopar.layouts.layout import Layout, ReshardStep

_DEVICES = 64
_ONE_CORE_BYTES = 16 * 2**20


def apart_bytes(device: DeviceSpec, devices: int) -> float:
    """Most bytes of an array that must not be gathered over all devices at once."""
    if device.kind != "tpu" or devices < _DEVICES:
        return 0.0
    # Chips of one core are those with `on_chip_bytes` (v5e).
    return _ONE_CORE_BYTES if device.on_chip_bytes else math.inf


def stated_layouts(
    start: Layout,
    steps: Sequence[ReshardStep],
    sizes: Sequence[int],
    nbytes: float,
    most_bytes: float,
) -> tuple[Layout, ...]:
    """The layouts that a program states on a way.

    Args:
      start: the layout before the steps.
      steps: from `reshard_steps`.
      sizes: size of each mesh axis.
      nbytes: of the whole array.
      most_bytes: from `apart_bytes`.
    """
    out: list[Layout] = []
    layout = start
    for step in steps:
        whole = math.prod(sizes[a] for a in step.axes) == math.prod(sizes)
        small = nbytes * step.fraction <= most_bytes
        if step.kind == "all_gather" and whole and small:
            out += _by_axis(layout, step.layout)
        else:
            out.append(step.layout)
        layout = step.layout
    return tuple(out)


def _by_axis(before: Layout, after: Layout) -> Iterator[Layout]:
    """Takes the axes off the dimension that is gathered, the last one first."""
    (dim,) = (d for d, axes in enumerate(before) if axes != after[d])
    for end in range(len(before[dim]) - 1, len(after[dim]) - 1, -1):
        yield (*before[:dim], before[dim][:end], *before[dim + 1 :])
