"""Gives arrays the shardings of a plan, and returns results on the caller's mesh.

A plan has its own mesh. Under ``jax.set_mesh``, JAX accepts only arrays on the mesh
that is set. `given_back` therefore gives results an equal sharding on that mesh, and
moves no bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime.world import World, grid
from autopar_passes import jax_compat
from autopar_passes.jax_meshes import explicit_sharding, user_mesh


def place(leaf: Any, sharding: NamedSharding) -> Any:
    """Returns an array with the given sharding; no copy if it has that sharding.

    The result has exactly this sharding and no weak type, because JAX looks up compiled
    code by both. An equivalent sharding on another mesh is not enough: functions inside
    the program that JAX compiles separately would reject it.

    If the sharding spans processes, a local array must have the same values on every
    process (`autopar.runtime.agreement.check_equal`). Each process then cuts its shards
    out of its own array, and sends nothing. A process without devices of the sharding
    gets an array without shards.
    """
    if isinstance(leaf, jax.Array) and getattr(leaf, "weak_type", False):  # not of keys
        leaf = _strong(leaf)
    if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding:
        return leaf
    if not sharding.addressable_devices:
        return absent(jax.typeof(leaf), sharding)
    if type(leaf) is np.ndarray and sharding.is_fully_addressable:
        return jax_compat.put(leaf, sharding)
    if not isinstance(leaf, jax.Array) and not _is_extended(leaf):
        leaf = np.asarray(leaf, jax.typeof(leaf).dtype)
    if is_global(leaf) and _is_extended(leaf):
        # JAX cannot move typed random keys between devices of several processes.
        moved = jax.device_put(jax_compat.key_bits(leaf), sharding)
        return jax_compat.with_dtype(moved, leaf.dtype)
    if sharding.is_fully_addressable or is_global(leaf):
        return jax.device_put(leaf, sharding)
    host = leaf if _is_extended(leaf) else np.asarray(leaf)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )


def replicate_array(array: Any, shardings: Sequence[NamedSharding]) -> list[Any]:
    """Returns a local array replicated over the devices of each sharding.

    Args:
      array: an array with the same values on every process of the shardings.
      shardings: fully replicated shardings.
    """
    out: list[Any] = []
    for sharding in shardings:
        if sharding.is_fully_addressable:
            out.append(jax.device_put(array, sharding))
            continue
        parts = [jax.device_put(array, d) for d in sharding.addressable_devices]
        out.append(
            jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
        )
    return out


def _strong(leaf: jax.Array) -> Any:
    """Returns the same values without a weak type.

    Only scalars in the first call of a step have weak types.
    """
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def held_here(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether `place` has to cut shards for several processes from a local array.

    If so, the caller checks that the array is the same on every process.
    """
    return not sharding.is_fully_addressable and not is_global(leaf)


def separate(given: Sequence[Any], placed: list[Any], donated: Iterable[int]) -> None:
    """Copies arrays that occur more than once among the donated arrays.

    Args:
      given: the arrays of the caller; one object may occur at several positions.
      placed: the same arrays with the shardings of the plan; copies are put here.
      donated: positions of the donated arrays.
    """
    seen: set[int] = set()
    for k in sorted(donated):
        if id(given[k]) in seen and placed[k].sharding.addressable_devices:
            placed[k] = jax.numpy.copy(placed[k])
        seen.add(id(given[k]))


def consume(
    given: Sequence[Any],
    placed: Sequence[Any],
    donated: Iterable[int],
    results: Iterable[Any],
) -> None:
    """Deletes the arrays that a call donated, even if their memory was not reused.

    If an argument had to be moved to another sharding before the call, only the moved
    copy is deleted, and the caller keeps the original. An array that is also a result
    is not deleted: a pipeline returns unchanged state as the same array.
    """
    kept = {id(x) for x in results}
    for k in donated:
        if id(placed[k]) in kept:
            continue
        held = [placed[k]]
        if given[k] is not placed[k] and _lies_alike(given[k], placed[k]):
            held.append(given[k])
        for array in held:
            if not array.is_deleted():
                array.delete()


def _lies_alike(given: Any, placed: Any) -> bool:
    """Whether two arrays have equivalent shardings."""
    if not isinstance(given, jax.Array):
        return False
    return given.sharding.is_equivalent_to(placed.sharding, given.ndim)


def rows_dim(part: Sequence[int], whole: Sequence[int]) -> int:
    """Returns the dim in which the shape of a part differs from the whole shape."""
    return next(d for d, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b)


def global_shape(leaf: Any, process_count: int, dim: int = 0) -> tuple[int, ...]:
    """Returns the global shape of a batch array, of which each process holds a part.

    All processes hold the same number of rows.
    """
    shape = tuple(np.shape(leaf))
    if process_count == 1 or is_global(leaf) or not shape or _is_key(leaf):
        return shape
    return (*shape[:dim], shape[dim] * process_count, *shape[dim + 1 :])


def _is_key(leaf: Any) -> bool:
    """Whether an array is a key; a raw key is recognised by its shape and dtype."""
    if _is_extended(leaf):
        return True
    return tuple(np.shape(leaf)) == (2,) and jax.typeof(leaf).dtype == np.uint32


def _is_extended(leaf: Any) -> bool:
    return jax_compat.is_extended(jax.typeof(leaf).dtype)


def is_global(leaf: Any) -> bool:
    """Whether an array lies on devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def local_bytes(array: jax.Array) -> int:
    """Returns the bytes of an array on all devices of this process together.

    Each replica of a replicated array counts.
    """
    bits = jax_compat.key_bits(array)
    return sum(shard.data.nbytes for shard in bits.addressable_shards)


def absent(struct: Any, sharding: NamedSharding) -> Any:
    """Returns an array without shards in this process.

    Args:
      struct: the shape and dtype of the array.
      sharding: a sharding over devices of other processes.
    """
    shape, dtype = jax_compat.bits_struct(tuple(struct.shape), struct.dtype)
    bits = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    return jax_compat.with_dtype(bits, struct.dtype)


def even_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Returns a sharding that splits an array evenly over all devices of a mesh.

    The sharding splits the first dimension that the number of devices divides. If there
    is no such dimension, the array is replicated.

    State that is created before planning gets these shardings, so that no device has to
    hold the whole state.
    """
    total = mesh.size
    for dim, size in enumerate(shape):
        if size and size % total == 0:
            names = tuple(mesh.axis_names)
            return NamedSharding(mesh, PartitionSpec(*([None] * dim), names))
    return NamedSharding(mesh, PartitionSpec())


def create(function: Callable[..., Any], args: Sequence[Any], shardings: Any) -> Any:
    """Runs a function that returns a pytree, and creates each leaf in its shards.

    A program runs on one set of devices. If the leaves lie on several sets, as in a
    pipeline, the function is compiled once for each set, with only the leaves of that
    set as results. Leaves on devices of other processes have no shards here.
    """
    wanted, tree = jax.tree.flatten(shardings)
    places = list(dict.fromkeys(frozenset(s.device_set) for s in wanted))
    if len(places) < 2:
        return jax.jit(function, out_shardings=shardings)(*args)
    structs = jax.tree.leaves(jax.eval_shape(function, *args))
    made: dict[int, Any] = {}
    for place in places:
        own = [k for k, s in enumerate(wanted) if frozenset(s.device_set) == place]

        def some(*given: Any, own: Sequence[int] = own) -> list[Any]:
            leaves = jax.tree.leaves(function(*given))
            return [leaves[k] for k in own]

        if not wanted[own[0]].addressable_devices:
            made.update((k, absent(structs[k], wanted[k])) for k in own)
            continue
        run = jax.jit(some, out_shardings=[wanted[k] for k in own])
        made.update(zip(own, run(*args), strict=True))
    return jax.tree.unflatten(tree, [made[k] for k in range(len(wanted))])


def stage_meshes(plan: Plan, devices: Sequence[Any] | None) -> list[Mesh]:
    """Builds the mesh of each stage from its devices.

    Args:
      plan: the plan.
      devices: the devices of the cluster, by position; None for the devices of
        `World.current`.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    found = list(World.current().devices if devices is None else devices)
    need = 1 + max(d for stage in plan.stages for d in stage.devices)
    if len(found) < need:
        raise PlanError(
            f"the plan is for {need} devices ({_text(plan)}), and to run it there are "
            f"{len(found)}. Plan for autopar.Cluster.local(), or simulate more on CPU: "
            f"jax.config.update('jax_num_cpu_devices', {need}) before JAX starts."
        )
    out: list[Mesh] = []
    for stage in plan.stages:
        laid = grid([found[d] for d in stage.devices], stage.axis_sizes)
        out.append(_mesh(laid, stage.axis_names))
    return out


def device_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of a plan with one stage (`stage_meshes`).

    Raises:
      PlanError: the plan has several stages, or there are too few devices.
    """
    assert plan.stage
    return stage_meshes(plan, devices)[0]


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """Returns the mesh of a plan with one stage, without devices.

    A mesh without devices is enough to lower and audit the program of the plan.
    """
    kinds = (AxisType.Auto,) * len(plan.axis_sizes)
    return AbstractMesh(plan.axis_sizes, plan.axis_names, axis_types=kinds)


def home_meshes(plan: Plan, own: Sequence[Mesh]) -> list[Mesh]:
    """Returns the meshes of the state between steps, in the order of `Plan.home_axes`.

    The result has the meshes of the stages, and the mesh of all stages if the plan has
    one.

    Args:
      plan: the plan.
      own: the meshes of the plan's stages.
    """
    axes = plan.home_axes
    if len(axes) == len(own):
        return list(own)
    laid = np.stack([mesh.devices for mesh in own])
    return [*own, _mesh(laid, tuple(name for name, _ in axes[-1]))]


def _mesh(laid: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(laid, names, axis_types=(AxisType.Auto,) * laid.ndim)


def _text(plan: Plan) -> str:
    if len(plan.stages) > 1:
        return f"{len(plan.stages)} stages"
    return " ".join(f"{k}={v}" for k, v in plan.mesh["axes"].items())


def home_of(arrays: Iterable[Any]) -> Mesh | None:
    """Returns the mesh on which the caller expects the results; None for the plan's.

    The results of a call belong on the mesh that the caller set with ``jax.set_mesh``.
    If none is set, it is the mesh of the first argument whose type has an explicit
    sharding.

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
    """Returns a step's results with shardings on the mesh of its caller.

    An array gets an equal sharding on the caller's mesh, without a move. If the axes of
    that mesh cannot express the sharding, state stays on the plan's mesh, and any other
    array is replicated over the caller's mesh.

    Args:
      arrays: arrays on the mesh of a plan.
      home: the caller's mesh; None to return the arrays unchanged.
      state: positions of the state; None if all arrays are state.
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
    """Returns an array of the same shards with an equal sharding on another mesh."""
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
    """Returns a sharding on another mesh that leaves all shards on their devices.

    None if the axes of that mesh cannot express such a sharding.
    """
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
        # By how many elements the start of a shard moves from one device to the next
        # along a mesh axis.
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
