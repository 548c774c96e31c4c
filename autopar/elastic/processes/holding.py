"""Keeps parts of the training state in host memory, and restores arrays from them.

A tile is a rectangular part of an array (`autopar.elastic.processes.tiles`). A
`Holding` is the set of tiles of one step's state that one process keeps. A world is a
set of processes that train together. Two worlds may split the state of the same step
into different tiles, so their tiles must not be mixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.elastic.processes import tiles
from autopar.elastic.processes.tiles import Tile
from autopar.runtime import placement
from autopar_passes import jax_compat

# The paths of arrays that belong to one process alone, such as those of a replica of
# local steps, begin so. No other process gets copies of them.
PRIVATE = "@worker/"


def is_private(path: str) -> bool:
    """Whether an array belongs to one process alone."""
    return path.startswith(PRIVATE)


# Path of an array in the state -> tile of the array -> elements of the tile.
Tiles = dict[str, dict[Tile, np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The tiles that a process keeps of the state after a step.

    Attributes:
      version: name of the state: number of the step, and number of the world.
      step: number of steps done.
      shapes: path -> shape and dtype of each whole array; random keys count as
        integers.
      tiles: path -> tile -> elements of the tile.
      extra: plain data that belongs to the state, such as the position of the next
        sample. The data is the same on all processes.
    """

    version: str
    step: int
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    tiles: Tiles
    extra: Mapping[str, Any]

    def describe(self) -> dict[str, Any]:
        """Lists the tiles for a message, without their elements."""
        return {
            "step": self.step,
            "shapes": {k: [list(s), d] for k, (s, d) in self.shapes.items()},
            "tiles": {
                path: [tiles.to_data(tile) for tile in held]
                for path, held in self.tiles.items()
            },
            "extra": dict(self.extra),
        }


def version(step: int, generation: int) -> str:
    """The name of the state that a world has after a step."""
    return f"{step}.{generation}"


def hold(
    arrays: Mapping[str, Any], *, step: int, generation: int, extra: Mapping[str, Any]
) -> Holding:
    """Keeps this process's shards; on CPUs it shares their memory without a copy.

    Args:
      arrays: path -> global array.
      step: number of steps done.
      generation: number of the world that made the arrays.
      extra: see `Holding`.
    """
    bits = {path: jax_compat.key_bits(x) for path, x in arrays.items()}
    return Holding(
        version=version(step, generation),
        step=step,
        shapes=shapes_of(arrays),
        tiles={path: _shards(x) for path, x in bits.items()},
        extra=extra,
    )


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and dtype of each whole array; random keys count as integers."""
    bits = {path: jax_compat.key_bits(x) for path, x in arrays.items()}
    return {path: (tuple(x.shape), str(x.dtype)) for path, x in bits.items()}


def _shards(array: Any) -> dict[Tile, np.ndarray]:
    """The distinct shards of this process; an array in host memory is one shard."""
    if isinstance(array, np.ndarray):
        return {tiles.whole(array.shape): array}
    found: dict[Tile, np.ndarray] = {}
    for shard in array.addressable_shards:
        tile = tiles.tile_of(shard.index, array.shape)
        if tile not in found:
            found[tile] = np.asarray(shard.data)
    return found


def only_here(arrays: Mapping[str, Any]) -> dict[str, dict[Tile, np.ndarray]]:
    """The shards that no other process has, without arrays of this process alone."""
    found: Tiles = {}
    for path, array in arrays.items():
        if is_private(path):
            continue
        bits = jax_compat.key_bits(array)
        if isinstance(bits, np.ndarray):
            continue  # every process has the array
        owners: dict[Tile, set[int]] = {}
        for device, index in bits.sharding.devices_indices_map(bits.shape).items():
            tile = tiles.tile_of(index, bits.shape)
            owners.setdefault(tile, set()).add(device.process_index)
        own = {t: x for t, x in _shards(bits).items() if len(owners[t]) == 1}
        if own:
            found[path] = own
    return found


Fetch = Callable[[str, Tile], np.ndarray]


def place(
    wanted: Mapping[str, tuple[Any, NamedSharding]], fetch: Fetch
) -> dict[str, Any]:
    """Makes arrays from tiles; fetches only the tiles that this process needs.

    Args:
      wanted: path -> shape and dtype of the whole array, and its sharding.
      fetch: returns the elements of a tile.
    """
    return {path: _place(path, *where, fetch) for path, where in wanted.items()}


def _place(path: str, struct: Any, sharding: NamedSharding, fetch: Fetch) -> Any:
    if not sharding.addressable_devices:
        return placement.absent(struct, sharding)
    shape, dtype = jax_compat.bits_struct(tuple(struct.shape), struct.dtype)
    read: dict[Tile, np.ndarray] = {}

    def at(index: Any) -> np.ndarray:
        tile = tiles.tile_of(index, shape)
        if tile not in read:
            read[tile] = fetch(path, tile)
        return read[tile]

    bits = jax.make_array_from_callback(shape, sharding, at, dtype=dtype)
    return jax_compat.with_dtype(bits, struct.dtype)


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name, also of JAX's names such as ``bfloat16``."""
    return np.dtype(jnp.dtype(name))
