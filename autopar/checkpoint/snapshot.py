"""Copies of a state that a step may consume while they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autopar.errors import CheckpointError
from autopar_passes import jax_compat

# Where accelerators have it, the copy lies in memory of the host.
_HOST_MEMORY = "pinned_host"


def snapshot(arrays: Mapping[str, Any], *, alone: bool = True) -> dict[str, jax.Array]:
    """Copies arrays, each element once, whatever the number of its replicas.

    The copies are issued, and not waited for: what runs later on the same devices,
    such as a step that consumes the arrays, comes after them.

    Args:
      arrays: path -> array. Keys are copied as their numbers.
      alone: whether there is one process.

    Raises:
      CheckpointError: an array was consumed by a step, or a process of several holds
        one on its own.
    """
    return {path: _copy(path, array, alone) for path, array in arrays.items()}


def _copy(path: str, array: Any, alone: bool) -> jax.Array:
    if not isinstance(array, jax.Array):
        return jax.device_put(np.asarray(array, jax.typeof(array).dtype))
    if array.is_deleted():
        raise CheckpointError(
            f"'{path}' was consumed by a step. Save the state that the last step "
            "returned."
        )
    bits = jax_compat.key_bits(array)
    if not isinstance(bits.sharding, NamedSharding):
        if alone:
            return jax.device_put(bits, bits.sharding, may_alias=False)
        raise CheckpointError(
            f"'{path}' lies on one process alone. Save the state that a step or init "
            "returned."
        )
    return _copied_once(bits)


def _copied_once(bits: jax.Array) -> jax.Array:
    """A copy on the first of the devices that hold the same part."""
    target = host_memory(without_replicas(bits.sharding))
    chosen = target.addressable_devices
    parts = [
        jax.device_put(
            shard.data,
            SingleDeviceSharding(shard.device, memory_kind=target.memory_kind),
            may_alias=False,
        )
        for shard in bits.addressable_shards
        if shard.device in chosen
    ]
    return jax.make_array_from_single_device_arrays(
        bits.shape, target, parts, dtype=bits.dtype
    )


def without_replicas(sharding: Any) -> NamedSharding:
    """The sharding on the first devices along the axes that split no dim."""
    mesh, spec = sharding.mesh, sharding.spec
    used = {a for axes in spec if axes is not None for a in _names(axes)}
    keep = [name for name in mesh.axis_names if name in used]
    where = tuple(slice(None) if n in used else 0 for n in mesh.axis_names)
    devices = np.asarray(mesh.devices[where], dtype=object)
    if not keep:
        keep, devices = list(mesh.axis_names[:1]), devices.reshape(1)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    smaller = Mesh(devices, tuple(keep), axis_types=tuple(types[n] for n in keep))
    return NamedSharding(smaller, spec)


def _names(axes: Any) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def host_memory(sharding: NamedSharding) -> NamedSharding:
    """The sharding in memory of the host, where devices have memory of their own."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu":
        return sharding
    kinds = {memory.kind for memory in device.addressable_memories()}
    return (
        sharding.with_memory_kind(_HOST_MEMORY) if _HOST_MEMORY in kinds else sharding
    )


def num_bytes(array: Any) -> int:
    """Bytes of the elements of an array."""
    return math.prod(array.shape) * array.dtype.itemsize
