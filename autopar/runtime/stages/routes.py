"""Reshards an array between devices of several processes.

A *block* is the part of the array on one device. A *piece* is the overlap of a block of
the target with a block of the source (`autopar.layouts.pieces`). Each process receives
the pieces of its target blocks and assembles the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.layouts.pieces import Block, Blocks, Landing, Piece, landings
from autopar_passes import jax_compat


@dataclasses.dataclass(frozen=True)
class Route:
    """The transfers that reshard one array.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
      source: the sharding before.
      target: the sharding after.
      landings: the blocks of the target, in the same order on all processes.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: Any
    target: NamedSharding
    landings: tuple[Landing, ...]

    @functools.cached_property
    def bits(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of the array that is sent.

        Arrays of random keys are sent as their uint32 data, other arrays unchanged.
        """
        return jax_compat.bits_struct(self.shape, self.dtype)

    def pieces_between(
        self, origin: int, process: int
    ) -> Iterator[tuple[Landing, Piece]]:
        """Yields the pieces that one process sends to another process, or keeps."""
        for landing in self.landings:
            if landing.process == process:
                for piece in landing.pieces:
                    if piece.process == origin:
                        yield landing, piece

    @functools.cached_property
    def origins(self) -> frozenset[int]:
        """The processes that send or keep pieces."""
        return frozenset(p.process for x in self.landings for p in x.pieces)

    @functools.cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have blocks of the target."""
        return frozenset(x.process for x in self.landings)

    def pieces_sent(self, origin: int, process: int, array: Any) -> list[Any]:
        """The pieces that process ``origin`` sends to ``process``.

        The pieces are on devices of ``origin``.
        """
        pieces = [piece for _, piece in self.pieces_between(origin, process)]
        held = _own_blocks(array) if pieces else {}
        return [_cut(held[p.device], p, _wide(self.bits[1])) for p in pieces]

    def structs(self, origin: int, process: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and devices of the pieces of `pieces_sent` on arrival."""
        dtype = _wide(self.bits[1])
        return [
            jax.ShapeDtypeStruct(
                piece.shape, dtype, sharding=SingleDeviceSharding(landing.devices[0])
            )
            for landing, piece in self.pieces_between(origin, process)
        ]

    def blocks_landed(
        self, process: int, arrived: dict[int, Iterator[Any]], array: Any
    ) -> dict[Any, Any]:
        """Device -> its block of the target, for the devices of a process.

        Args:
          process: number of the process.
          arrived: other process -> its pieces, as in `structs`.
          array: the array in its source sharding; only pieces that stay in the process
            are read from it.
        """
        shape, dtype = self.bits
        block, out = self.target.shard_shape(shape), dict[Any, Any]()
        held = _own_blocks(array) if process in self.origins else {}
        for landing in self.landings:
            if landing.process != process:
                continue
            lead, parts = landing.devices[0], list[Any]()
            for piece in landing.pieces:
                if piece.process == process:
                    part = _cut(held[piece.device], piece, dtype)
                    parts.append(jax.device_put(part, lead))
                else:
                    parts.append(next(arrived[piece.process]).astype(dtype))
            places = tuple(piece.place for piece in landing.pieces)
            made = _together(block, dtype, places, parts, lead)
            out.update((d, jax.device_put(made, d)) for d in landing.devices)
        return out

    def array(self, blocks: Mapping[Any, Any]) -> Any:
        """Makes the array of the blocks on devices of this process."""
        shape, dtype = self.bits
        devices = [d for d in self.target.mesh.devices.flat if d in blocks]  # type: ignore[union-attr]
        made = jax.make_array_from_single_device_arrays(
            shape, self.target, [blocks[d] for d in devices], dtype=dtype
        )
        return jax_compat.with_dtype(made, self.dtype)


def route(
    shape: Sequence[int],
    dtype: Any,
    source: Any,
    target: NamedSharding,
    process_of: Callable[[Any], int] = lambda device: device.process_index,
) -> Route:
    """The route of an array between two shardings.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      source: the sharding before.
      target: the sharding after.
      process_of: function that returns the number of a device's process.
    """
    sent, _ = jax_compat.bits_struct(tuple(shape), dtype)
    found = landings(_blocks(source, sent), _blocks(target, sent), process_of)
    return Route(tuple(shape), dtype, source, target, found)


def _blocks(sharding: Any, shape: tuple[int, ...]) -> Blocks:
    """Block of an array -> the devices that hold it."""
    out: dict[Block, tuple[Any, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        block = tuple((begin, end) for begin, end in bounds)
        out[block] = (*out.get(block, ()), device)
    return dict(sorted(out.items()))


def on_device(device: Any) -> NamedSharding:
    """The sharding of an array that is whole on one device."""
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


def _wide(dtype: Any) -> Any:
    """The dtype in which an array is sent; integers below 8 bits are sent as int8."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return jnp.dtype(jnp.int8) if narrow else dtype


def _own_blocks(array: Any) -> dict[Any, Any]:
    """Device of this process -> its block of an array."""
    bits = jax_compat.key_bits(array)
    return {shard.device: shard.data for shard in bits.addressable_shards}


def _cut(block: Any, piece: Piece, dtype: Any) -> Any:
    """Cuts a piece out of the block on its device, and converts its dtype."""
    if tuple(block.shape) != piece.shape:
        ends = [a + n for a, n in zip(piece.begin, piece.shape, strict=True)]
        block = jax.lax.slice(block, piece.begin, ends)
    return block if block.dtype == dtype else block.astype(dtype)


def _together(
    shape: tuple[int, ...],
    dtype: Any,
    places: tuple[tuple[int, ...], ...],
    parts: Sequence[Any],
    device: Any,
) -> Any:
    """Assembles a block from its pieces, on the device of the pieces."""
    if not parts:
        return jnp.zeros(shape, dtype, device=device)
    if len(parts) == 1:
        return parts[0]
    return _joining(shape, places)(*parts)


@functools.lru_cache(maxsize=256)
def _joining(shape: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> Any:
    """A jitted function that assembles a block from pieces."""

    def join_pieces(*parts: Any) -> Any:
        block = jnp.zeros(shape, parts[0].dtype)
        for place, part in zip(places, parts, strict=True):
            block = jax.lax.dynamic_update_slice(block, part, place)
        return block

    return jax.jit(join_pieces)
