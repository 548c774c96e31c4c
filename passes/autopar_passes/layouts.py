"""Layouts in JAX's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar_passes import jax_compat

# JAX's name of the memory of a host that devices can read and write.
HOST_MEMORY = "pinned_host"

# By dimension, the mesh axes that shard it, major to minor, as positions in the mesh.
Layout = tuple[tuple[int, ...], ...]


def partition_spec(mesh: Any, layout: Layout) -> PartitionSpec:
    """Returns a layout as a `PartitionSpec`."""
    names = mesh.axis_names
    entries = [
        None
        if not axes
        else names[axes[0]]
        if len(axes) == 1
        else tuple(names[a] for a in axes)
        for axes in layout
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def mesh_sharding(
    mesh: Any, layout: Layout, memory_kind: str | None = None
) -> NamedSharding:
    """Returns a layout on a mesh as a `NamedSharding`."""
    spec = partition_spec(mesh, layout)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def automatic_axes(mesh: Any) -> frozenset[str]:
    """Returns the axes of a mesh that no surrounding ``shard_map`` has made manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind is not AxisType.Manual)


def constrain(array: Any, mesh: Any, layout: Layout) -> Any:
    """States the layout of an array in the program being traced."""
    if not layout or jax_compat.is_extended(array.dtype):
        return array
    kind = HOST_MEMORY if jax_compat.is_on_host(jax.typeof(array)) else None
    return jax.lax.with_sharding_constraint(array, mesh_sharding(mesh, layout, kind))


def on_shards(
    function: Callable[..., Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    results: Any,
    mesh: Any,
) -> Any:
    """Runs a function on each device's shards.

    Args:
      function: takes the shards of the operands.
      operands: the whole operands.
      layouts: the layouts of the operands.
      results: the specs of what the function returns.
      mesh: the mesh of the layouts.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(partition_spec(mesh, layout) for layout in layouts),
        out_specs=results,
        axis_names=automatic_axes(mesh),
        check_vma=False,
    )(*operands)
