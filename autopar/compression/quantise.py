"""Blockwise quantisers: int8, int4, sign and fp8.

See `autopar.compression.blocks` for how they sum and scale. For ``D`` elements,
``b`` bits and blocks of ``B`` each of n workers sends
``2 (n - 1) / n * D * (b / 8 + 2 / B)`` bytes, half of it when scattered.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from autopar.compression.blocks import (
    Format,
    Rounding,
    block_chunk,
    check_block,
    check_choice,
    decode_rows,
    encode_rows,
    hadamard,
    largest,
    levels,
    round_up,
    scaled,
    server_state,
    two_shot,
    usable,
)
from autopar.compression.codec import Codec, Context, Rounds, State
from autopar.compression.registry import register_codec

_ROUNDINGS = ("nearest", "stochastic")
_INT8_TOP = 127
_INT4_TOP = 7
_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@register_codec
@dataclasses.dataclass(frozen=True)
class Int8(Codec):
    """Whole numbers of -127..127 times a scale per block.

    Attributes:
      block: elements of a block.
      rounding: nearest, or stochastic, which is unbiased at sqrt(2) of the error.
      server_feedback: whether the error of the second shot is fed back.
    """

    name: ClassVar[str] = "int8"

    block: int = 256
    rounding: Rounding = "nearest"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "rounding", self.rounding, _ROUNDINGS)

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: Context) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        return Format(
            self.block, 8, lambda rest: rest, self._encode_blocks, _decode_int8
        )

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real
        values, scales = levels(blocks, _INT8_TOP, self.rounding, salt)
        return jax.lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8), scales


@register_codec
@dataclasses.dataclass(frozen=True)
class Int4(Codec):
    """Whole numbers of -7..7 times a scale per block, two to a byte.

    Attributes:
      block: elements of a block.
      hadamard: whether each block is rotated by a Walsh-Hadamard transform
        first, which spreads outliers: the error of heavy-tailed gradients
        halves (SDP4Bit, arXiv 2410.15526).
      rounding: nearest or stochastic.
      server_feedback: whether the error of the second shot is fed back.
    """

    name: ClassVar[str] = "int4"
    feedback: ClassVar[bool] = True

    block: int = 256
    hadamard: bool = True
    rounding: Rounding = "nearest"
    server_feedback: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 2)
        check_choice(self.name, "rounding", self.rounding, _ROUNDINGS)
        if self.hadamard and self.block & (self.block - 1):
            raise ValueError(
                f"int4: block must be a power of two, got {self.block}; use "
                f"block={1 << (self.block.bit_length() - 1)} or hadamard=False."
            )

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: Context) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        return Format(
            self.block, 4, self._width, self._encode_blocks, self._decode_blocks
        )

    def _width(self, rest: int) -> int:
        if self.hadamard:
            return max(2, 1 << (rest - 1).bit_length())
        return round_up(rest, 2)

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real
        if self.hadamard:
            blocks = hadamard(blocks * _orthonormal(blocks.shape[-1]))
        values, scales = levels(blocks, _INT4_TOP, self.rounding, salt)
        codes = (values + (_INT4_TOP + 1)).astype(jnp.uint8)
        half = codes.shape[-1] // 2
        return codes[..., :half] | (codes[..., half:] << 4), scales

    def _decode_blocks(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        both = jnp.concatenate((codes & 0xF, codes >> 4), axis=-1)
        values = both.astype(jnp.float32) - (_INT4_TOP + 1)
        if not self.hadamard:
            return values * scales
        # On whole numbers the transform is exact: all workers get the same bits
        # even where their processors sum in different orders.
        return hadamard(values) * (scales * _orthonormal(values.shape[-1]))


@register_codec
@dataclasses.dataclass(frozen=True)
class Sign(Codec):
    """The sign of each element and the mean magnitude of each block.

    Eight elements to a byte. The mean magnitude is the best scale for the signs
    in the squared error (arXiv 1901.09847, section 4).

    Attributes:
      block: elements of a block.
      server_feedback: whether the error of the second shot is fed back.
    """

    name: ClassVar[str] = "sign"
    feedback: ClassVar[bool] = True

    block: int = 256
    server_feedback: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 8)

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: Context) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        return Format(
            self.block, 1, lambda rest: round_up(rest, 8), _encode_signs, _decode_signs
        )


@register_codec
@dataclasses.dataclass(frozen=True)
class Fp8(Codec):
    """Eight-bit floats of blocks scaled to their range.

    Attributes:
      block: elements of a block.
      format: e4m3 (3 bits of mantissa, up to 448) or e5m2 (2 bits, to 57344).
      server_feedback: whether the error of the second shot is fed back.
    """

    name: ClassVar[str] = "fp8"

    block: int = 256
    format: Literal["e4m3", "e5m2"] = "e4m3"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "format", self.format, tuple(_FP8))

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: Context) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        return Format(
            self.block, 8, lambda rest: rest, self._encode_blocks, self._decode_blocks
        )

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real, salt
        top = float(jnp.finfo(_FP8[self.format]).max)
        scales = largest(blocks, top)
        values = jnp.clip(scaled(blocks, scales), -top, top).astype(_FP8[self.format])
        return jax.lax.bitcast_convert_type(values, jnp.uint8), scales

    def _decode_blocks(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        values = jax.lax.bitcast_convert_type(codes, _FP8[self.format])
        return values.astype(jnp.float32) * scales


def without_server_feedback(codec: Codec) -> Codec:
    """The codec for a sum that stays scattered, which has no second shot."""
    if isinstance(codec, Int8 | Int4 | Sign | Fp8):
        return dataclasses.replace(codec, server_feedback=False)
    return codec


def _orthonormal(width: int) -> jax.Array:
    """The factor that makes a Walsh-Hadamard transform orthonormal."""
    return jnp.float32(1.0 / math.sqrt(width))


def _decode_int8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    values = jax.lax.bitcast_convert_type(codes, jnp.int8)
    return values.astype(jnp.float32) * scales


def _encode_signs(
    blocks: jax.Array, real: jax.Array, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Float32 (m, k, w) -> uint8 (m, k, w / 8), one bit plane per eighth."""
    del salt
    share = 1.0 / jnp.maximum(real, 1).astype(jnp.float32)
    mean = jnp.sum(jnp.abs(blocks) * share[..., None], axis=-1)
    scales = usable(mean.astype(jnp.bfloat16).astype(jnp.float32))
    count, number, width = blocks.shape
    bits = (blocks >= 0).astype(jnp.uint8).reshape(count, number, 8, width // 8)
    places = jnp.arange(8, dtype=jnp.uint8)[:, None]
    return jnp.sum(bits << places, axis=2, dtype=jnp.uint8), scales


def _decode_signs(codes: jax.Array, scales: jax.Array) -> jax.Array:
    places = jnp.arange(8, dtype=jnp.uint8)[:, None]
    bits = (codes[:, :, None, :] >> places) & 1
    signs = 2.0 * bits.astype(jnp.float32) - 1.0
    return signs.reshape(*codes.shape[:2], -1) * scales
