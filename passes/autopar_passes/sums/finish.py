"""Sums of partial results, stated collective by collective.

XLA finds the collectives of a stated layout itself, and does not always find the ones
that a plan counts on. Take a sum over two mesh axes, which split two dimensions. XLA's
CPU program sums over each axis by itself, also where the result is split over one of
them. Where the result is split over both, in two dimensions or one after the other,
XLA's GPU program sums the whole array over all devices: a reduce-scatter has to stand
right behind the sum there (openxla/xla,
``xla/service/gpu/transforms/reduce_scatter_creator.cc``). So such sums are written
down: a reduce-scatter for each axis, and one all-reduce over those that are left.

XLA's CPU program joins all-reduces in one message and no reduce-scatters (jaxlib
0.10.2): 17 gradients of a GPT would be 17 messages. There an all-reduce is written, of
which each device keeps its slice, as XLA does itself where it finds the sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar_passes.layouts import Layout, partition_spec

# Equations of one result that may run shard by shard: their parameters say nothing of
# the operands' sizes, and the partial results of shards add up to the result.
BY_SHARDS = frozenset({"dot_general", "reduce_sum"})


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


def finished(
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
            out = _summed(out, step, mesh)
        return out

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(partition_spec(mesh, layout) for layout in layouts),
        out_specs=partition_spec(mesh, sums[-1].layout),
        check_vma=False,
    )(*operands)


def _summed(shard: Any, step: Sum, mesh: Any) -> Any:
    """One collective, inside of a `jax.shard_map`."""
    names = tuple(mesh.axis_names[a] for a in step.axes)
    if step.dim is None:
        return jax.lax.psum(shard, names)
    scatter = functools.partial(
        jax.lax.psum_scatter, axis_name=names, scatter_dimension=step.dim, tiled=True
    )
    kept = functools.partial(_kept, names=names, dim=step.dim)
    return jax.lax.platform_dependent(shard, cpu=kept, default=scatter)


def _kept(shard: Any, *, names: tuple[str, ...], dim: int) -> Any:
    """The slice that a device keeps of a sum over some mesh axes."""
    size = shard.shape[dim] // jax.lax.axis_size(names)
    start = jax.lax.axis_index(names) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(shard, names), start, size, dim)


def behind(layouts: Sequence[Layout], sums: Sequence[Sum]) -> tuple[Layout, ...]:
    """The layouts to state from the end of a sum on, of those of its whole way.

    None is left where the sum ends in the slices that its readers keep.
    """
    last = sums[-1].layout
    return tuple(layouts[layouts.index(last) :]) if last in layouts else ()
