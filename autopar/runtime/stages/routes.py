"""How an array goes from one layout to another where devices are of several processes.

Each process that holds a block of the target gets its pieces
(`autopar.layouts.pieces`), and puts the block together.
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
    """How one array goes from one layout to another.

    Attributes:
      shape: of the array.
      dtype: of the array.
      source: where it lies before.
      target: where it must lie.
      landings: the blocks of the target, in the same order on all processes.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: Any
    target: NamedSharding
    landings: tuple[Landing, ...]

    @functools.cached_property
    def bits(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of the numbers that are sent."""
        return jax_compat.bits_struct(self.shape, self.dtype)

    def pieces_between(
        self, origin: int, process: int
    ) -> Iterator[tuple[Landing, Piece]]:
        """Yields what one process hands to another, or to itself."""
        for landing in self.landings:
            if landing.process == process:
                for piece in landing.pieces:
                    if piece.process == origin:
                        yield landing, piece

    @functools.cached_property
    def origins(self) -> frozenset[int]:
        """The processes that have pieces."""
        return frozenset(p.process for x in self.landings for p in x.pieces)

    @functools.cached_property
    def processes(self) -> frozenset[int]:
        """The processes of the target."""
        return frozenset(x.process for x in self.landings)

    def pieces_sent(self, origin: int, process: int, array: Any) -> list[Any]:
        """The pieces that one process sends to another, on devices of the first."""
        pieces = [piece for _, piece in self.pieces_between(origin, process)]
        held = _own_blocks(array) if pieces else {}
        return [_cut(held[p.device], p, _wide(self.bits[1])) for p in pieces]

    def structs(self, origin: int, process: int) -> list[jax.ShapeDtypeStruct]:
        """The pieces of `pieces_sent` as they arrive."""
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
        """The blocks of the target that a process has, by device.

        Args:
          process: its number.
          arrived: by process what it has sent, as of `structs`.
          array: the array before; only what stays in the process is looked at.
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
        """The array of the blocks that this process has, by device."""
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
    """The route of an array between two layouts.

    Args:
      shape: of the array.
      dtype: likewise.
      source: where it lies before.
      target: where it must lie.
      process_of: the process of a device.
    """
    sent, _ = jax_compat.bits_struct(tuple(shape), dtype)
    found = landings(_blocks(source, sent), _blocks(target, sent), process_of)
    return Route(tuple(shape), dtype, source, target, found)


def _blocks(sharding: Any, shape: tuple[int, ...]) -> Blocks:
    """The blocks of an array, with the devices that hold them."""
    out: dict[Block, tuple[Any, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        block = tuple((begin, end) for begin, end in bounds)
        out[block] = (*out.get(block, ()), device)
    return dict(sorted(out.items()))


def on_device(device: Any) -> NamedSharding:
    """The layout of an array that lies whole on one device."""
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


def _wide(dtype: Any) -> Any:
    """The dtype in which numbers are sent: whole bytes."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return jnp.dtype(jnp.int8) if narrow else dtype


def _own_blocks(array: Any) -> dict[Any, Any]:
    """The blocks of an array that this process has, by device."""
    bits = jax_compat.key_bits(array)
    return {shard.device: shard.data for shard in bits.addressable_shards}


def _cut(block: Any, piece: Piece, dtype: Any) -> Any:
    """A piece of the block that its device has."""
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
    """A block of its pieces, on the device where these are."""
    if not parts:
        return jnp.zeros(shape, dtype, device=device)
    if len(parts) == 1:
        return parts[0]
    return _joining(shape, places)(*parts)


@functools.lru_cache(maxsize=256)
def _joining(shape: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> Any:
    """A jitted function that puts a block together of pieces."""

    def join_pieces(*parts: Any) -> Any:
        block = jnp.zeros(shape, parts[0].dtype)
        for place, part in zip(places, parts, strict=True):
            block = jax.lax.dynamic_update_slice(block, part, place)
        return block

    return jax.jit(join_pieces)
