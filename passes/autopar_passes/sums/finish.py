"""Sums of partial results, stated collective by collective.

XLA finds the collectives of a stated layout itself, and does not always find the ones
that a plan counts on. Take a sum over two mesh axes, which split two dimensions. XLA's
CPU program sums over each axis by itself, also where the result is split over one of
them. Where the result is split over both, in two dimensions or one after the other,
XLA's GPU program sums the whole array over all devices: a reduce-scatter has to stand
right behind the sum there (openxla/xla,
``xla/service/gpu/transforms/reduce_scatter_creator.cc``). So such sums are written
down: a reduce-scatter for each axis, and one all-reduce over those that are left.

Each platform has a form of its own (`autopar_passes.sums.finish`).
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

from autopar_passes.layouts import Layout, partition_spec

# Reduce-scatters in the form that the compiler of each platform keeps.
#
# XLA's CPU program joins all-reduces in one message and no reduce-scatters (jaxlib
# 0.10.2): 17 gradients of a GPT would be 17 messages. There an all-reduce is written,
# of which each device keeps its slice, as XLA does itself where it finds the sum.
#
# XLA's TPU compiler writes a reduce-scatter as an all-reduce where the part of a device
# begins inside of a tile, or where parts are an odd number of half tiles (libtpu
# 0.0.42; read from programs of one product, of two and three dimensions, and one sum of
# it). So a gradient of 1024 x 1024 in bfloat16 that is split into 8 x 128 columns is
# sent twice. There the parts are made a dimension of their own, the first, which no
# tile cuts.

# Of a TPU's tile of 32-bit numbers (https://openxla.org/xla/tiled_layout). What has
# fewer bits is packed: twice as many rows of 16 bits are one tile.
_ROWS, _LANES, _FULL_BYTES = 8, 128, 4


def scatter_sum(shard: Any, names: tuple[str, ...], dim: int) -> Any:
    """Adds up the shards of devices; each keeps a part. Inside of a `jax.shard_map`.

    Args:
      shard: of one device.
      names: the mesh axes that the sum goes over.
      dim: the dimension of the shard that is cut into parts.
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
    """The slice that a device keeps of a sum over some mesh axes."""
    size = shard.shape[dim] // jax.lax.axis_size(names)
    start = jax.lax.axis_index(names) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(shard, names), start, size, dim)


def in_front(shard: Any, *, names: tuple[str, ...], dim: int) -> Any:
    """A reduce-scatter over a new first dimension, the parts of another."""
    parts = jax.lax.axis_size(names)
    before, behind = shard.shape[:dim], shard.shape[dim + 1 :]
    cut = shard.reshape(*before, parts, shard.shape[dim] // parts, *behind)
    return jax.lax.psum_scatter(jnp.moveaxis(cut, dim, 0), names, scatter_dimension=0)


def cuts_tiles(part: Sequence[int], dim: int, item_bytes: int) -> bool:
    """Whether a TPU's tiles do not hold parts of this shape one by one.

    The compiler lays the dimensions of a part so that the tiles hold the least that is
    not used, and the last dimension along the lanes if that makes no difference. A
    dimension that is cut along the lanes, or along the rows with another one around
    them, has to be whole tiles. Matrices that are cut along the last dimension are
    taken to lie that way: the sum before may have found them so. The program around may
    want another order. Then a copy is made for nothing, or the whole array is summed.

    Args:
      part: the shape of what one device keeps.
      dim: the dimension that is cut.
      item_bytes: of one element.

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
    """The dimensions along the lanes and along the rows of tiles."""
    backwards = range(len(shape) - 1, -1, -1)
    return min(itertools.permutations(backwards, 2), key=lambda o: _room(shape, *o))


def _room(shape: Sequence[int], lanes: int, rows: int) -> float:
    """The room of tiles, of elements that lie in them."""
    units = ((shape[lanes], _LANES), (shape[rows], _ROWS))
    return math.prod(-(-size // unit) * unit / max(size, 1) for size, unit in units)


# Equations of one result that may run shard by shard: their parameters say nothing of
# the operands' sizes, and the partial results of shards add up to the result. Those of
# a scatter do if it adds to zeros, of which each device has all rows.
BY_SHARDS = frozenset({"dot_general", "reduce_sum", "scatter-add"})


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """One collective that takes a sum, or a part of it.

    Attributes:
      axes: the mesh axes that it goes over.
      dim: the dimension that it splits over them, behind the axes that split it
        already; None: every device gets the sum of the whole shard.
      layout: of the array behind it.
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
    """Runs a function on each device's shards and adds up what the devices return.

    Args:
      function: of the shards of the operands; returns one array, a partial result.
      operands: the whole operands.
      layouts: of the operands.
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

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(partition_spec(mesh, layout) for layout in layouts),
        out_specs=partition_spec(mesh, sums[-1].layout),
        check_vma=False,
    )(*operands)


def _run_collective(shard: Any, step: Sum, mesh: Any) -> Any:
    """One collective, inside of a `jax.shard_map`."""
    names = tuple(mesh.axis_names[a] for a in step.axes)
    if step.dim is None:
        return jax.lax.psum(shard, names)
    return scatter_sum(shard, names, step.dim)


def behind(layouts: Sequence[Layout], sums: Sequence[Sum]) -> tuple[Layout, ...]:
    """The layouts to state from the end of a sum on, of those of its whole way.

    None is left where the sum ends in the slices that its readers keep.
    """
    last = sums[-1].layout
    return tuple(layouts[layouts.index(last) :]) if last in layouts else ()
