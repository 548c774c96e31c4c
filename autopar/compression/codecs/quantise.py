"""Blockwise quantisers: int8, int4, sign and fp8.

See `autopar.compression.codecs.blocks` for how they sum and scale. For ``D`` elements,
``b`` bits and blocks of ``B`` each of n workers sends
``2 (n - 1) / n * D * (b / 8 + 2 / B)`` bytes, half of it when scattered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import (
    Format,
    Rounding,
    block_chunk,
    check_block,
    check_choice,
    decode_rows,
    decode_sum_rows,
    encode_rows,
    hadamard,
    largest,
    levels,
    materialised,
    round_up,
    scaled,
    server_state,
    two_shot,
    usable,
)
from autopar.compression.codecs.codec import Codec, CodecContext, Rounds, State
from autopar.compression.codecs.registry import register_codec
from autopar_errors import InputError

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
    sound: ClassVar[bool] = True

    block: int = 256
    rounding: Rounding = "nearest"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "rounding", self.rounding, _ROUNDINGS)

    @property
    def unit(self) -> int:
        """See `Codec`."""
        return self.block

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_sum_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        return Format(
            self.block, 8, lambda rest: rest, self._encode_blocks, _decode_int8
        )

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real
        values, scales = levels(blocks, _INT8_TOP, self.rounding, salt)
        return values.astype(jnp.uint8), scales


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
    sound: ClassVar[bool] = True
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
            raise InputError(
                f"int4: block must be a power of two, got {self.block}; use "
                f"block={1 << (self.block.bit_length() - 1)} or hadamard=False."
            )

    @property
    def unit(self) -> int:
        """See `Codec`."""
        return self.block

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_sum_rows(self._format(), payload, elements)

    def _format(self) -> Format:
        rotation = _rotate if self.hadamard else None
        return Format(
            self.block, 4, self._width, self._encode_blocks, _decode_int4, rotation
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
            blocks = materialised(_rotate(blocks))
        values, scales = levels(blocks, _INT4_TOP, self.rounding, salt)
        half = values.shape[-1] // 2
        low, high = values[..., :half], values[..., half:]
        codes = low + (high << 4) + (_INT4_TOP + 1) * 17
        return codes.astype(jnp.uint8), scales


@register_codec
@dataclasses.dataclass(frozen=True)
class Sign(Codec):
    """The sign of each element and the mean magnitude of each block.

    Eight elements to a byte. The mean magnitude is the best scale for the signs
    in the squared error (arXiv 1901.09847, section 4).

    The errors of the workers' signs partly cancel in the sum, that of the sum's own
    signs does not. With ``second=int4`` the sum is sent by `Int4`, at 2.5 bits an
    element on average instead of 1.

    Attributes:
      block: elements of a block.
      server_feedback: whether the error of the second shot is fed back.
      second: how the sum is sent: sign or int4.
    """

    name: ClassVar[str] = "sign"
    sound: ClassVar[bool] = True
    feedback: ClassVar[bool] = True

    block: int = 256
    server_feedback: bool = True
    second: Literal["sign", "int4"] = "sign"

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 8)
        check_choice(self.name, "second", self.second, ("sign", "int4"))

    @property
    def unit(self) -> int:
        """See `Codec`."""
        return self.block

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        second = None if self.second == "sign" else _second_int4(self.block)
        return (yield from two_shot(self, chunks, state, context, second))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_sum_rows(self._format(), payload, elements)

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
    sound: ClassVar[bool] = True

    block: int = 256
    format: Literal["e4m3", "e5m2"] = "e4m3"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "format", self.format, tuple(_FP8))

    @property
    def unit(self) -> int:
        """See `Codec`."""
        return self.block

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_sum_rows(self._format(), payload, elements)

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

    def _decode_blocks(self, codes: jax.Array) -> jax.Array:
        values = jax.lax.bitcast_convert_type(codes, _FP8[self.format])
        return values.astype(jnp.float32)


def without_server_feedback(codec: Codec) -> Codec:
    """The codec for a sum that stays scattered, which has no second shot."""
    if isinstance(codec, Int8 | Int4 | Sign | Fp8):
        return dataclasses.replace(codec, server_feedback=False)
    return codec


def _second_int4(block: int) -> Int4:
    """Rotated where blocks of this size can be."""
    return Int4(block=block, hadamard=not block & (block - 1))


def _rotate(blocks: jax.Array) -> jax.Array:
    """The orthonormal Walsh-Hadamard transform of the last dim, its own inverse."""
    return hadamard(blocks) * jnp.float32(1.0 / math.sqrt(blocks.shape[-1]))


def _decode_int8(codes: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)


def _decode_int4(codes: jax.Array) -> jax.Array:
    """Uint8 (m, k, w / 2) -> (m, k, w), the low halves of the bytes first."""
    offset = _INT4_TOP + 1
    low, high = (codes & 0xF).astype(jnp.float32), (codes >> 4).astype(jnp.float32)
    both = jnp.stack((low - offset, high - offset), axis=2)
    return both.reshape(*codes.shape[:2], -1)


def _encode_signs(
    blocks: jax.Array, real: jax.Array, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Float32 (m, k, w) -> uint8 (m, k, w / 8), one bit plane per eighth."""
    del salt
    width = blocks.shape[-1]
    share = width / jnp.maximum(real, 1).astype(jnp.float32)
    # Divided before it is summed: the sum of the largest floats overflows.
    mean = jnp.sum(jnp.abs(blocks) * jnp.float32(1.0 / width), axis=-1) * share
    scales = usable(mean.astype(jnp.bfloat16).astype(jnp.float32))
    planes = jnp.split(blocks >= 0, 8, axis=-1)
    zero = jnp.uint8(0)
    bits = [jnp.where(plane, jnp.uint8(1 << k), zero) for k, plane in enumerate(planes)]
    return functools.reduce(jnp.bitwise_or, bits), materialised(scales)


def _decode_signs(codes: jax.Array) -> jax.Array:
    # Two long loops over half a block, not eight short ones: a CPU takes a third.
    # The halves are joined last, as in `_decode_int4`; see `blocks` on why.
    copies = materialised(jnp.concatenate([codes] * 4, axis=-1))
    places = np.repeat(1 << np.arange(4), codes.shape[-1]).astype(np.uint8)
    low, high = (copies & places) != 0, (copies & (places << 4)) != 0
    one = jnp.float32(1.0)
    both = jnp.stack((jnp.where(low, one, -one), jnp.where(high, one, -one)), axis=2)
    return both.reshape(*codes.shape[:2], -1)
