"""Sums of partial results, stated collective by collective.

XLA finds the collectives of a stated layout itself, and does not always find the ones
that a plan counts on. Take a sum over two mesh axes, which split two dimensions. XLA's
CPU program sums over each axis by itself, also where the result is split over one of
them. Where the result is split over both, in two dimensions or one after the other,
XLA's GPU program sums the whole array over all devices: a reduce-scatter has to stand
right behind the sum there (openxla/xla,
``xla/service/gpu/transforms/reduce_scatter_creator.cc``). So such sums are written
down: a reduce-scatter for each axis, and one all-reduce over those that are left.

Each platform has a form of its own (`autopar_passes.sums.scatters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar_passes.layouts import Layout, partition_spec
from autopar_passes.sums.scatters import scattered

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
    return scattered(shard, names, step.dim)


def behind(layouts: Sequence[Layout], sums: Sequence[Sum]) -> tuple[Layout, ...]:
    """The layouts to state from the end of a sum on, of those of its whole way.

    None is left where the sum ends in the slices that its readers keep.
    """
    last = sums[-1].layout
    return tuple(layouts[layouts.index(last) :]) if last in layouts else ()
