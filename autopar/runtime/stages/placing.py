"""Moves the arguments of a step to their shardings, on devices of several processes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.runtime import agreement, placement
from autopar.runtime.agreement import by_process, exchange_data
from autopar.runtime.stages.transport import Links


class _Lies(enum.StrEnum):
    """Where an array is, from the view of one process."""

    PLACED = "placed"  # the array already has the sharding of the plan
    OWN = "own"  # this process has the whole array
    OTHER = "other"  # this process has no shard of the array
    SPREAD = "spread"  # this process and others have shards of the array


def place_arrays(
    links: Links,
    leaves: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    shardings: Sequence[NamedSharding],
    *,
    first: bool,
) -> list[Any]:
    """Moves arguments to their shardings, on devices of any processes.

    For an array of the batch, each process passes its own rows; all pass the same
    number of rows. Every other argument is either equal on all processes, or one array
    with shards on devices of any processes. If all shards of a result are on other
    processes, this process gets an array without shards.

    Args:
      links: the connections to other processes.
      leaves: path -> array of this process.
      shapes: the whole shape of each array; an array of another shape holds the rows of
        this process.
      shardings: the target sharding of each array.
      first: whether this is the first step that runs with a plan.

    Raises:
      PlanError: an array that should be equal on all processes differs, or a process
        has failed.
      StageError: a process has ended.
    """
    wanted = list(zip(leaves.items(), shapes, shardings, strict=True))
    whole = {
        path: (x, sharding)
        for (path, x), shape, sharding in wanted
        if np.shape(x) == tuple(shape)
    }
    found = _place_by_path(links, whole, first=first)
    return [
        found[path] if path in found else _rows(links, k, x, shape, sharding)
        for k, ((path, x), shape, sharding) in enumerate(wanted)
    ]


def moved_between(
    links: Links, state: Mapping[str, Any], shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Moves the arrays of a state to other shardings, on devices of any processes.

    Args:
      links: the connections to other processes.
      state: path -> array.
      shardings: the target sharding of each array.

    Raises:
      PlanError: an array that should be equal on all processes differs, or a process
        has failed.
      StageError: a process has ended.
    """
    wanted = {
        path: (x, sharding)
        for (path, x), sharding in zip(state.items(), shardings, strict=False)
    }
    return list(_place_by_path(links, wanted, first=True).values())


def _place_by_path(
    links: Links, wanted: Mapping[str, tuple[Any, NamedSharding]], *, first: bool
) -> dict[str, Any]:
    """Path -> the array in its target sharding.

    The exchange between processes also begins a step on all of them.
    """
    lies = {path: _lies(x, sharding) for path, (x, sharding) in wanted.items()}
    digests = agreement.digests_of(
        {path: wanted[path][0] for path, how in lies.items() if how is _Lies.OWN}
    )
    key = hashlib.sha256(repr((list(lies.values()), digests)).encode()).digest()
    same = links.begin(key, first=first)
    every = {path: [how] * links.world.process_count for path, how in lies.items()}
    if not same:
        every = _by_process(links, lies)
        shared = {p: d for p, d in digests.items() if set(every[p]) == {_Lies.OWN}}
        agreement.refuse_different(links.world, shared)
    return {
        path: _put(links, path, x, sharding, every[path])
        for path, (x, sharding) in wanted.items()
    }


def _by_process(links: Links, lies: Mapping[str, _Lies]) -> dict[str, list[_Lies]]:
    """Returns, for each array's path, where each process has the array (`_Lies`)."""
    what = "comparing where the arguments lie"
    data = msgspec.msgpack.encode({path: str(how) for path, how in lies.items()})
    told = [msgspec.msgpack.decode(x) for x in exchange_data(links.world, what, data)]
    every = {path: [_Lies(had[path]) for had in told] for path in lies}
    for path, had in every.items():
        kinds, holders = set(had), had.count(_Lies.OWN)
        spread = kinds <= {_Lies.SPREAD, _Lies.OTHER}
        moved = holders == 1 and kinds == {_Lies.OWN, _Lies.OTHER}
        if len(kinds) > 1 and not moved and not spread:
            raise PlanError(
                f"'{path}' is not the same kind of array on all processes: "
                f"{by_process([str(x) for x in had])}. Pass what the last call "
                "returned on every process, or the same values on each."
            )
    return every


def _lies(leaf: Any, sharding: NamedSharding) -> _Lies:
    if not isinstance(leaf, jax.Array):
        return _Lies.OWN
    if leaf.committed and leaf.sharding == sharding:
        return _Lies.PLACED
    if leaf.is_fully_addressable:
        return _Lies.OWN
    return _Lies.SPREAD if leaf.sharding.addressable_devices else _Lies.OTHER


def _put(
    links: Links, path: str, leaf: Any, sharding: NamedSharding, lies: Sequence[_Lies]
) -> Any:
    """Moves an array to its target sharding.

    Args:
      links: the connections to other processes.
      path: path of the array.
      leaf: the array.
      sharding: the target sharding.
      lies: where each process has the array.
    """
    how = set(lies)
    if how == {_Lies.PLACED}:
        # Only an array that one process holds alone can have a weak type; `place`
        # removes the weak type.
        return (
            leaf if not leaf.is_fully_addressable else placement.place(leaf, sharding)
        )
    if how == {_Lies.OTHER}:
        raise PlanError(f"'{path}' lies on devices of none of the processes.")
    if how == {_Lies.OWN}:
        return placement.place(leaf, sharding)
    way = links.route(leaf.shape, leaf.dtype, leaf.sharding, sharding)
    arrays = [leaf] if links.index in way.origins else None
    return links.move_arrays(("moved", path), arrays, [way])[0]


def _rows(
    links: Links,
    number: int,
    leaf: Any,
    shape: Sequence[int],
    sharding: NamedSharding,
) -> Any:
    """Joins the rows of all processes to an array of the batch on its stage.

    Args:
      links: the connections to other processes.
      number: position of the flat argument.
      leaf: the rows of this process.
      shape: shape of the whole array.
      sharding: the target sharding.
    """
    own = links.devices[links.index]
    local = np.asarray(leaf, jax.typeof(leaf).dtype)
    dim = placement.rows_dim(local.shape, shape)
    every = Mesh(np.array(links.devices, dtype=object), ("process",))
    lies = NamedSharding(every, PartitionSpec(*[None] * dim, "process"))
    rows = jax.make_array_from_single_device_arrays(
        tuple(shape), lies, [jax.device_put(local, own)]
    )
    way = links.route(rows.shape, rows.dtype, lies, sharding)
    return links.move_arrays(("rows", number), [rows], [way])[0]
