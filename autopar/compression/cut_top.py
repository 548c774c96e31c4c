"""The largest elements of rows, for values that cross stage cuts.

Of each block of at most `BLOCK` elements, the ``round(ratio w)`` largest of its w
elements by magnitude are kept; equal elements in the order of their positions. All
others are decoded to zero. A block's code is:

    positions of the kept elements | their values, int8 | the scale, 2 bytes

The positions are one byte for each kept element, or one bit for each element. This is
whichever has fewer bytes. If another code of the same shape is the *mask*, the kept
elements are those of this code, and no positions are sent. So a cotangent is sent at
the positions of its activation (DCT-MP, arXiv 2010.08899).

DCT-MP keeps a threshold for many steps, so that a program need not sort. Here the
number of kept elements is fixed, because the shapes of compiled programs are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from autopar.compression.codecs.blocks import (
    join_parts,
    joined_bytes,
    levels,
    scale_bytes,
)
from autopar.compression.codecs.sparse import elements_in_share

BLOCK = 256
_TOP = 127
_SCALE_BYTES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TopRows:
    """Encodes the largest elements of each block of rows.

    Attributes:
      ratio: fraction of the elements that are kept.
    """

    ratio: float

    def row_bytes(self, elements: int, *, masked: bool) -> int:
        """The number of bytes of a row.

        >>> TopRows(1 / 16).row_bytes(256, masked=False)
        34
        >>> TopRows(1 / 16).row_bytes(256, masked=True)
        18
        >>> TopRows(1 / 4).row_bytes(256, masked=False)
        98
        """
        return sum(
            blocks * self._block_bytes(width, masked=masked)
            for blocks, width in _parts(elements)
        )

    def encode(self, rows: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Encodes float32 (m, c) as uint8 (m, b).

        Args:
          rows: the numbers.
          mask: the unmasked code of other rows whose positions are kept; None: the
            largest elements are kept.
        """
        out: list[jax.Array] = []
        begin = 0
        masks = self._blocks_of_code(mask, rows.shape[1], masked=False)
        for (blocks, width), other in zip(_parts(rows.shape[1]), masks, strict=True):
            part = rows[:, begin : begin + blocks * width]
            part = part.reshape(-1, blocks, width)
            begin += blocks * width
            out.append(self._encode_blocks(part, other).reshape(len(rows), -1))
        return join_parts(out)

    def decode(
        self, code: jax.Array, elements: int, mask: jax.Array | None = None
    ) -> jax.Array:
        """Decodes uint8 (m, b) to float32 (m, c), where c is ``elements``.

        Args:
          code: the code.
          elements: number of elements of a row.
          mask: as for `encode`.
        """
        out: list[jax.Array] = []
        masks = self._blocks_of_code(mask, elements, masked=False)
        codes = self._blocks_of_code(code, elements, masked=mask is not None)
        for (_, width), other, own in zip(_parts(elements), masks, codes, strict=True):
            assert own is not None
            made = self._decode_blocks(own, own if other is None else other, width)
            out.append(made.reshape(len(code), -1))
        return join_parts(out)

    def _kept(self, width: int) -> int:
        return elements_in_share(self.ratio, width)

    def _position_bytes(self, width: int) -> int:
        return min(self._kept(width), -(-width // 8))

    def _block_bytes(self, width: int, *, masked: bool) -> int:
        places = 0 if masked else self._position_bytes(width)
        return places + self._kept(width) + _SCALE_BYTES

    def _blocks_of_code(
        self, code: jax.Array | None, elements: int, *, masked: bool
    ) -> list[jax.Array | None]:
        """For each of `_parts`, the codes of its blocks, uint8 (m, k, _)."""
        out: list[jax.Array | None] = []
        begin = 0
        for blocks, width in _parts(elements):
            nbytes = self._block_bytes(width, masked=masked)
            if code is None:
                out.append(None)
                continue
            part = code[:, begin : begin + blocks * nbytes]
            out.append(part.reshape(-1, blocks, nbytes))
            begin += blocks * nbytes
        return out

    def _encode_blocks(self, blocks: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Encodes float32 (m, k, w) as uint8 (m, k, _)."""
        kept = self._kept(blocks.shape[-1])
        if mask is None:
            _, places = jax.lax.top_k(jnp.abs(blocks), kept)
            places = jnp.sort(places, axis=-1)
        else:
            places = self._places(mask, blocks.shape[-1])
        found = jnp.take_along_axis(blocks, places, axis=-1)
        numbers, scales = levels(found, _TOP, "nearest", jnp.uint32(0))
        code = [numbers.astype(jnp.uint8), scale_bytes(scales)]
        if mask is None:
            code.insert(0, self._pack_places(places, blocks.shape[-1]))
        return jnp.concatenate(code, axis=-1)

    def _decode_blocks(self, code: jax.Array, mask: jax.Array, width: int) -> jax.Array:
        """Decodes uint8 (m, k, _) to float32 (m, k, w).

        Args:
          code: the codes; what precedes the values is not read.
          mask: codes with the positions.
          width: number of elements of a block.
        """
        low, high = code[..., -2], code[..., -1]
        scales = joined_bytes(low, high)[..., None]
        numbers = code[..., -_SCALE_BYTES - self._kept(width) : -_SCALE_BYTES]
        values = jax.lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.float32)
        present = self._presence(mask, width)
        rank = jnp.cumsum(present, axis=-1, dtype=jnp.int32) - 1
        spread = jnp.take_along_axis(values * scales, jnp.maximum(rank, 0), axis=-1)
        return jnp.where(present, spread, 0.0)

    def _by_index(self, width: int) -> bool:
        """Whether positions are numbers, and not bits."""
        return self._kept(width) <= -(-width // 8)

    def _pack_places(self, places: jax.Array, width: int) -> jax.Array:
        """Positions (m, k, n), ascending, as bytes."""
        if self._by_index(width):
            return places.astype(jnp.uint8)
        present = _present(places, width)
        present = jnp.pad(present, ((0, 0), (0, 0), (0, -width % 8)))
        bits = present.reshape(*present.shape[:2], -1, 8).astype(jnp.uint8)
        weights = jnp.uint8(1) << jnp.arange(8, dtype=jnp.uint8)
        return jnp.sum(bits * weights, axis=-1, dtype=jnp.uint8)

    def _presence(self, code: jax.Array, width: int) -> jax.Array:
        """Whether each element is kept, bool (m, k, w), from unmasked codes."""
        packed = code[..., : self._position_bytes(width)]
        if self._by_index(width):
            return _present(packed.astype(jnp.int32), width)
        bits = (packed[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        return bits.reshape(*packed.shape[:2], -1)[..., :width] != 0

    def _places(self, code: jax.Array, width: int) -> jax.Array:
        """The positions of kept elements, int32 (m, k, n), from unmasked codes."""
        if self._by_index(width):
            return code[..., : self._position_bytes(width)].astype(jnp.int32)
        order = jnp.where(self._presence(code, width), width - jnp.arange(width), 0)
        return width - jax.lax.top_k(order, self._kept(width))[0]


def _parts(elements: int) -> list[tuple[int, int]]:
    """The whole blocks of a row, and its shorter last block: number and width."""
    blocks, rest = divmod(elements, BLOCK)
    return [(n, w) for n, w in ((blocks, BLOCK), (1, rest)) if n and w]


def _present(places: jax.Array, width: int) -> jax.Array:
    """Whether each of ``width`` positions is among ``places``, (m, k, n)."""

    def block(own: jax.Array) -> jax.Array:
        return jnp.zeros(width, bool).at[own].set(True)

    # `vmap` keeps the dims of rows apart, so that they may be split over devices.
    return jax.vmap(jax.vmap(block))(places)
