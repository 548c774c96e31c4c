"""Puts arguments and state on stages that run in several processes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.runtime import agreement, placement
from autopar.runtime.exchange import by_process, exchanged
from autopar.runtime.stages.transport import Links, on_device
from autopar.runtime.world import whole_array
from autopar_passes import jax_compat
from autopar_passes.graph.roles import InputRole


class _Lies(enum.StrEnum):
    """Where an array lies, as one process sees it."""

    PLACED = "placed"  # where the plan wants it
    OWN = "own"  # this process has all of it
    OTHER = "other"  # this process has nothing of it
    SPREAD = "spread"  # several processes have parts


class Step(Protocol):
    """A planned step, as far as its arguments go."""

    @property
    def analysis(self) -> Any:
        """The step on the whole batch."""
        ...

    @property
    def in_shardings(self) -> list[NamedSharding]:
        """Where each flat argument lies before a step."""
        ...

    @property
    def links(self) -> Links | None:
        """Links to the other processes."""
        ...


def placed_on_stages(step: Step, leaves: Sequence[Any], *, first: bool) -> list[Any]:
    """The flat arguments of a step on the stages that have them.

    Of each array of the batch, every process passes its rows, as many as any other;
    they are sent to the stage that has it. All else is the same on every process or
    lies somewhere in the world. Of what other processes' stages have, this one gets
    arrays without shards.

    Args:
      step: the step.
      leaves: the arguments of this process.
      first: whether it is the first step that runs by this plan.

    Raises:
      PlanError: arrays that each process holds alone differ, or a process has failed.
      StageError: a process has ended.
    """
    links, graph = step.links, step.analysis.graph
    assert links is not None
    shapes = [graph.values[given.value].shape for given in graph.inputs]
    rows = {
        k
        for k, (x, given) in enumerate(zip(leaves, graph.inputs, strict=True))
        if given.role is InputRole.BATCH and np.shape(x) != tuple(shapes[k])
    }
    whole = {
        given.path: (x, step.in_shardings[k])
        for k, (x, given) in enumerate(zip(leaves, graph.inputs, strict=True))
        if k not in rows
    }
    found = _placed(links, whole, first=first)
    return [
        _rows(links, k, x, shapes[k], step.in_shardings[k])
        if k in rows
        else found[graph.inputs[k].path]
        for k, x in enumerate(leaves)
    ]


def moved_between(links: Links, step: Step, state: Mapping[str, Any]) -> list[Any]:
    """The leaves of a state where a plan wants them; one of two plans has stages.

    Args:
      links: to the other processes.
      step: the step under the new plan.
      state: path -> array.

    Raises:
      PlanError: arrays that each process holds alone differ, or a process has failed.
      StageError: a process has ended.
    """
    wanted = {
        path: (x, sharding)
        for (path, x), sharding in zip(state.items(), step.in_shardings, strict=False)
    }
    return list(_placed(links, wanted, first=True).values())


def _placed(
    links: Links, wanted: Mapping[str, tuple[Any, NamedSharding]], *, first: bool
) -> dict[str, Any]:
    """Arrays where they are wanted, by path; begins a step."""
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
    """Path -> where an array lies, as each process sees it."""
    what = "comparing where the arguments lie"
    data = msgspec.msgpack.encode({path: str(how) for path, how in lies.items()})
    told = [msgspec.msgpack.decode(x) for x in exchanged(links.world, what, data)]
    every = {path: [_Lies(had[path]) for had in told] for path in lies}
    for path, had in every.items():
        holders = had.count(_Lies.OWN)
        moved = holders == 1 and had.count(_Lies.OTHER) == len(had) - 1
        if len(set(had)) > 1 and not moved:
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
    """An array where it is wanted.

    Args:
      links: to the other processes.
      path: of the array.
      leaf: the array.
      sharding: where it is wanted.
      lies: where it lies, as each process sees it.
    """
    how = set(lies)
    if how == {_Lies.PLACED}:
        # Of weak type at most on the process that has it, which makes it strong.
        return (
            leaf if not leaf.is_fully_addressable else placement.place(leaf, sharding)
        )
    if how == {_Lies.SPREAD}:
        return _here(_gathered(leaf), sharding)
    if how == {_Lies.OTHER}:
        raise PlanError(f"'{path}' lies on devices of none of the processes.")
    if how == {_Lies.OWN}:
        return _here(leaf, sharding)
    return _here(links.spread(("moved", path), lies.index(_Lies.OWN), leaf), sharding)


def _gathered(leaf: Any) -> Any:
    """All of an array of which each process has a part, on every process."""
    bits = jax_compat.key_bits(leaf)
    if bits.is_fully_replicated:
        found = np.asarray(bits.addressable_shards[0].data)
    else:
        found = whole_array(bits)
    return jax_compat.with_dtype(jnp.asarray(found), leaf.dtype)


def _here(leaf: Any, sharding: NamedSharding) -> Any:
    """An array that this process has all of, or its absence from this process."""
    if sharding.addressable_devices:
        return placement.place(leaf, sharding)
    return placement.absent(jax.typeof(leaf), sharding)


def _rows(
    links: Links,
    number: int,
    leaf: Any,
    shape: Sequence[int],
    sharding: NamedSharding,
) -> Any:
    """An array of the batch on its stage, put together of the rows of all processes.

    Args:
      links: to the other processes.
      number: of the flat argument.
      leaf: the rows of this process.
      shape: of the whole array.
      sharding: where it must lie.
    """
    local = jax.typeof(leaf)
    struct = jax.ShapeDtypeStruct(tuple(shape), local.dtype)
    owner = next(iter(sharding.device_set)).process_index
    lands = on_device(links.devices[owner])
    own = on_device(links.devices[links.index])
    tag = ("rows", number)
    if owner != links.index:
        way = links.route(local.shape, local.dtype, own, lands)
        rows = jax.device_put(np.asarray(leaf, local.dtype), own)
        links.offer((*tag, links.index), [rows], [way])
        return placement.absent(struct, sharding)
    parts: list[Any] = []
    for process, device in enumerate(links.devices):
        if process == owner:
            parts.append(jax.device_put(np.asarray(leaf, local.dtype), lands))
            continue
        way = links.route(local.shape, local.dtype, on_device(device), lands)
        parts.extend(links.fetch(process, (*tag, process), [way]))
    every = NamedSharding(sharding.mesh, PartitionSpec())
    together = links.joined(sharding)
    return together(*(jax.device_put(part, every) for part in parts))
