"""Writes the sum of partial results as explicit collectives.

XLA chooses the collectives for a given layout itself, and its choice may differ from
the collectives of a plan. An example is a sum over two mesh axes that shard two
dimensions. XLA's CPU program sums over each axis separately, even if the result is
sharded over one of the axes. If the result is sharded over both axes, in two dimensions
or in one dimension, XLA's GPU program sums the whole array over all devices. To avoid
this, a reduce-scatter must directly follow the sum in the GPU program (openxla/xla,
``xla/service/gpu/transforms/reduce_scatter_creator.cc``). This module therefore writes
such sums explicitly: one reduce-scatter for each axis that shards the result, and one
all-reduce over the remaining axes.

Each platform has its own form of a reduce-scatter (`scatter_sum`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.layouts import Layout, on_shards, partition_spec

# Reduce-scatters, in the form that the compiler of each platform keeps.
#
# XLA's CPU compiler combines several all-reduces into one message, but does not combine
# reduce-scatters (jaxlib 0.10.2). The 17 gradients of a GPT would need 17 messages. On
# the CPU, this module therefore writes an all-reduce, and each device keeps its slice
# of the result. XLA itself writes the same if it chooses the collective.
#
# XLA's TPU compiler turns a reduce-scatter into an all-reduce if the part of a device
# begins inside a tile, or if the part's size is an odd number of half tiles (libtpu
# 0.0.42). This was found by compiling programs with one product of two or three
# dimensions and one sum of the product. For example, a bfloat16 gradient of 1024 x 1024
# that is split into 8 parts of 128 columns is sent twice. For such arrays, this module
# makes the parts a new first dimension, which no tile cuts.

# The size of a TPU's tile of 32-bit numbers (https://openxla.org/xla/tiled_layout).
# Narrower numbers are packed: a tile of 16-bit numbers has twice as many rows.
_ROWS, _LANES, _FULL_BYTES = 8, 128, 4


def scatter_sum(shard: Any, names: tuple[str, ...], dim: int) -> Any:
    """Sums the shards of devices; each device keeps a part. Use inside `jax.shard_map`.

    Args:
      shard: the shard of one device.
      names: the mesh axes that the sum goes over.
      dim: the dimension of the shard that is split into parts.
    """
    parts = jax.lax.axis_size(names)
    plain = functools.partial(
        jax.lax.psum_scatter, axis_name=names, scatter_dimension=dim, tiled=True
    )
    kept = functools.partial(_kept_slice, names=names, dim=dim)
    shape = (*shard.shape[:dim], shard.shape[dim] // parts, *shard.shape[dim + 1 :])
    on_tpu = plain
    if cuts_tiles(shape, dim, shard.dtype.itemsize):
        on_tpu = functools.partial(in_front, names=names, dim=dim)
    return jax.lax.platform_dependent(shard, cpu=kept, tpu=on_tpu, default=plain)


def _kept_slice(shard: Any, *, names: tuple[str, ...], dim: int) -> Any:
    """Returns the slice of a sum over mesh axes that a device keeps."""
    size = shard.shape[dim] // jax.lax.axis_size(names)
    start = jax.lax.axis_index(names) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(shard, names), start, size, dim)


def in_front(shard: Any, *, names: tuple[str, ...], dim: int) -> Any:
    """Reduce-scatters an array, after making its parts a new first dimension."""
    parts = jax.lax.axis_size(names)
    before, behind = shard.shape[:dim], shard.shape[dim + 1 :]
    cut = shard.reshape(*before, parts, shard.shape[dim] // parts, *behind)
    return jax.lax.psum_scatter(jnp.moveaxis(cut, dim, 0), names, scatter_dimension=0)


def cuts_tiles(part: Sequence[int], dim: int, item_bytes: int) -> bool:
    """Whether a TPU's tile would hold elements of two devices' parts of this shape.

    The compiler orders the dimensions of a part so that tiles have the least unused
    space. If several orders are equally good, the last dimension lies along the lanes.
    If the sum splits the dimension along the lanes, each part must be a whole number of
    tiles. The same holds for the dimension along the rows of tiles if the array has
    further dimensions before it. A matrix that is split along its last dimension is
    assumed to have this dimension along the lanes, because the operator before the sum
    may have chosen that order. The program around the sum may prefer another order of
    dimensions. Then either this module makes an unnecessary copy, or the compiler sums
    the whole array.

    Args:
      part: the shape of the part that one device keeps.
      dim: the dimension that is split.
      item_bytes: bytes of one element.

    >>> cuts_tiles((1024, 128), 1, 2), cuts_tiles((1024, 256), 1, 2)
    (True, False)
    >>> cuts_tiles((1024, 128), 1, 4), cuts_tiles((128, 1024), 0, 2)
    (False, False)
    """
    if len(part) < 2:
        return False
    packed = max(_FULL_BYTES // item_bytes, 1)
    lanes, rows = _order(part)
    if dim == lanes or (len(part) == 2 and dim == 1):
        return part[dim] % (_LANES * packed) > 0
    if dim == rows:
        return part[dim] % (_ROWS * (packed if len(part) > 2 else 1)) > 0
    return False


def _order(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the dimensions that lie along the lanes and along the rows of tiles."""
    backwards = range(len(shape) - 1, -1, -1)
    return min(itertools.permutations(backwards, 2), key=lambda o: _room(shape, *o))


def _room(shape: Sequence[int], lanes: int, rows: int) -> float:
    """Returns the ratio of the elements that tiles can hold to those they hold."""
    units = ((shape[lanes], _LANES), (shape[rows], _ROWS))
    return math.prod(-(-size // unit) * unit / max(size, 1) for size, unit in units)


# Equations with one result that may run shard by shard. Their parameters do not depend
# on the operands' sizes, and the partial results of the shards add up to the result.
# The partial results of a scatter add up if the scatter adds to zeros and each device
# has all rows of the zeros.
BY_SHARDS = frozenset(
    {"dot_general", "reduce_sum", "scatter-add", "ragged_dot_in_blocks"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """One collective that computes a sum, or a part of a sum.

    Attributes:
      axes: the mesh axes that the collective sums over.
      dim: the dimension that the collective shards over ``axes``, in addition to the
        axes that shard it already. None if every device gets the sum of its whole
        shard.
      layout: the layout of the array after the collective.
    """

    axes: tuple[int, ...]
    dim: int | None
    layout: Layout


def run_and_sum(
    function: Callable[..., Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    sums: Sequence[Sum],
    mesh: Any,
) -> Any:
    """Runs a function on the shards of each device, and sums the devices' results.

    Args:
      function: takes the shards of the operands and returns one array, a partial
        result.
      operands: the whole operands.
      layouts: the layouts of the operands.
      sums: the collectives in order, at least one.
      mesh: the mesh of the layouts.

    Returns:
      The whole result, in the layout of the last collective.
    """

    def run(*shards: Any) -> Any:
        out = function(*shards)
        for step in sums:
            out = _run_collective(out, step, mesh)
        return out

    return on_shards(
        run, operands, layouts, partition_spec(mesh, sums[-1].layout), mesh
    )


def _run_collective(shard: Any, step: Sum, mesh: Any) -> Any:
    """Runs one collective inside a `jax.shard_map`."""
    names = tuple(mesh.axis_names[a] for a in step.axes)
    if step.dim is None:
        return jax.lax.psum(shard, names)
    return scatter_sum(shard, names, step.dim)


def behind(layouts: Sequence[Layout], sums: Sequence[Sum]) -> tuple[Layout, ...]:
    """Returns the layouts that the program must state for a value after its sum.

    The result is empty if the last collective already gives the layout that readers
    use.
    """
    last = sums[-1].layout
    return tuple(layouts[layouts.index(last) :]) if last in layouts else ()
