"""Gives arrays back on the mesh that the caller has set.

A plan has a mesh of its own. Under ``jax.set_mesh`` JAX takes arrays of that mesh
alone, so results name its axes: the same bytes on the same devices.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar_passes import jax_compat
from autopar_passes.jax_meshes import explicit_sharding, user_mesh


def home_of(arrays: Iterable[Any]) -> Mesh | None:
    """Returns the mesh that results of a call belong to; None: that of the plan.

    It is the one that the caller has set, or else that of the first argument whose type
    names the axes of one.

    Args:
      arrays: the arguments of the call.
    """
    found = user_mesh()
    if found is not None:
        return found.concrete
    typed = next(filter(None, map(explicit_sharding, arrays)), None)
    return typed.mesh if typed and isinstance(typed.mesh, Mesh) else None


def given_back(
    arrays: Sequence[Any], home: Mesh | None, state: Collection[int] | None = None
) -> list[Any]:
    """Returns arrays on a caller's mesh.

    State stays where the plan has it, and on the plan's mesh where the axes of the
    caller's cannot say so. Any other array is then copied to all of its devices.

    Args:
      arrays: on the mesh of a plan.
      home: the caller's mesh; None: the arrays are returned as they are.
      state: positions of the state; None: all of them are.
    """
    if home is None:
        return list(arrays)
    out: list[Any] = []
    for k, x in enumerate(arrays):
        if getattr(x.sharding, "mesh", home) == home:
            out.append(x)
            continue
        sharding = _same_layout(x.sharding, home, tuple(x.shape))
        if sharding is not None:
            out.append(_restate_sharding(x, sharding))
        elif state is None or k in state or not x.is_fully_addressable:
            out.append(x)
        else:
            out.append(jax.device_put(x, NamedSharding(home, PartitionSpec())))
    return out


def _restate_sharding(array: Any, sharding: NamedSharding) -> Any:
    """The same shards, under an equal sharding of another mesh."""
    bits = jax_compat.key_bits(array)
    shards = [shard.data for shard in bits.addressable_shards]
    made = jax.make_array_from_single_device_arrays(
        bits.shape, sharding, shards, dtype=bits.dtype
    )
    return jax_compat.with_dtype(made, array.dtype)


@functools.lru_cache(maxsize=4096)
def _same_layout(
    sharding: Any, mesh: Mesh, shape: tuple[int, ...]
) -> NamedSharding | None:
    """The sharding over a mesh that leaves each part where it is; None: none does."""
    if sharding.device_set != set(mesh.devices.flat):
        return None
    parts = sharding.devices_indices_map(shape)
    starts = np.array(
        [[s.start or 0 for s in parts[d]] for d in mesh.devices.flat], dtype=np.int64
    ).reshape(*mesh.devices.shape, len(shape))
    axes: list[list[tuple[int, str]]] = [[] for _ in shape]
    for position, (name, size) in enumerate(mesh.shape.items()):
        if size == 1:
            continue
        at = [0] * mesh.devices.ndim
        at[position] = 1
        # The elements by which a step along the axis moves a device's part.
        moved = starts[tuple(at)] - starts[(0,) * mesh.devices.ndim]
        for dim in np.flatnonzero(moved):
            axes[dim].append((-int(moved[dim]), name))
    spec = [tuple(name for _, name in sorted(found)) or None for found in axes]
    named = [n for found in spec for n in found or ()]
    if len(named) > len(set(named)):
        return None
    made = NamedSharding(mesh, PartitionSpec(*spec))
    try:
        same = made.devices_indices_map(shape) == parts
    except ValueError:
        return None
    return made if same else None
