"""Blockwise quantisers: int8, int4, sign and fp8.

The sum and the scales are those of `autopar.compression.codecs.blocks`. For ``D``
elements, ``b`` bits and blocks of ``B`` elements, each of n workers sends ``2 (n - 1) /
n * D * (b / 8 + 2 / B)`` bytes. If the sum is scattered, each worker sends half of
these bytes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import (
    Format,
    Rounding,
    RowCodec,
    add_barrier,
    add_rows,
    block_chunk,
    check_block,
    check_choice,
    decode_rows,
    decode_sum_rows,
    divide_by_scales,
    encode_rows,
    hadamard,
    joined_bytes,
    largest,
    levels,
    round_up,
    server_state,
    two_shot,
    usable,
)
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    CodecContext,
    Reduced,
    ReduceScatter,
    Rounds,
    State,
)
from autopar.compression.codecs.registry import register_codec
from autopar_errors import InputError

_ROUNDINGS = ("nearest", "stochastic")
_INT8_TOP = 127
_INT4_TOP = 7
_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class Blockwise(Codec):
    """A codec that quantises blocks and sums them in two shots
    (`autopar.compression.codecs.blocks`).

    Attributes:
      block: elements of a block.
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
    """

    sound: ClassVar[bool] = True
    block: int
    server_feedback: bool

    @property
    def unit(self) -> int:
        """See `Codec`."""
        return self.block

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`."""
        return server_state(self.server_feedback, size, workers)

    def for_scattered_sum(self) -> Codec:
        """See `Codec`."""
        return dataclasses.replace(self, server_feedback=False)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return block_chunk(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        second = self.second_shot()
        return (yield from two_shot(self, chunks, state, context, second))

    def second_shot(self) -> RowCodec | None:
        """The codec of the second shot, for the sums; None: the same as for the first
        shot.
        """
        return None

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        return encode_rows(self._format(), rows, lengths, salt)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_rows(self._format(), payload, elements)

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return decode_sum_rows(self._format(), payload, elements)

    @abc.abstractmethod
    def _format(self) -> Format:
        """How blocks are written as bytes."""


# Sizes of blocks in elements, and for each size the relative errors (L2 norm) of int8
# and of int4 without rotation. The errors were measured on 2e6 samples of Student's t.
# Longer blocks have larger errors, because their largest element is larger.
_BLOCKS = 16, 64, 256, 1024, 4096, 65536
_INT8_ERRORS = 0.0060, 0.0092, 0.0134, 0.0194, 0.0283, 0.0616
_INT4_ERRORS = 0.106, 0.160, 0.230, 0.321, 0.437, 0.685
_ROTATED_ERROR = 0.125


def _error_of(block: int, errors: Sequence[float], rounding: Rounding) -> float:
    """The relative error of a block size, interpolated in the measured ``errors``; it
    is sqrt(2) times as large with stochastic rounding.
    """
    found = float(np.interp(math.log2(block), np.log2(_BLOCKS), errors))
    return found if rounding == "nearest" else min(1.0, math.sqrt(2.0) * found)


@register_codec
@dataclasses.dataclass(frozen=True)
class Int8(Blockwise):
    """Sends whole numbers in -127..127, with a scale for each block.

    Attributes:
      block: elements of a block.
      rounding: nearest or stochastic. Stochastic rounding is unbiased, but its error is
        sqrt(2) times the error of rounding to the nearest number.
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
    """

    name: ClassVar[str] = "int8"

    block: int = 256
    rounding: Rounding = "nearest"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "rounding", self.rounding, _ROUNDINGS)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return _error_of(self.block, _INT8_ERRORS, self.rounding)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 7.0

    def _format(self) -> Format:
        return Format(self.block, _same, _same, self._encode_blocks, _decode_int8)

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real
        values, scales = levels(blocks, _INT8_TOP, self.rounding, salt)
        return values.astype(jnp.uint8), scales


@register_codec
@dataclasses.dataclass(frozen=True)
class Int4(Blockwise):
    """Sends whole numbers in -7..7, two in a byte, with a scale for each block.

    Attributes:
      block: elements of a block.
      hadamard: whether each block is first rotated by a Walsh-Hadamard transform. The
        rotation spreads outliers and halves the error of heavy-tailed gradients
        (SDP4Bit, arXiv 2410.15526).
      rounding: nearest or stochastic.
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
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
            raise InputError(
                f"int4: block must be a power of two, got {self.block}; use "
                f"block={1 << (self.block.bit_length() - 1)} or hadamard=False."
            )

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`."""
        return cls(), cls(hadamard=False), cls(block=32, hadamard=False)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        errors = (_ROTATED_ERROR,) * len(_BLOCKS) if self.hadamard else _INT4_ERRORS
        return _error_of(self.block, errors, self.rounding)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`; short blocks cost more, because loops over them are short."""
        return 14.0 if self.hadamard else 7.5 if self.block > 64 else 10.5

    def _format(self) -> Format:
        rotation = _rotate if self.hadamard else None
        return Format(
            self.block,
            lambda width: width // 2,
            self._width,
            self._encode_blocks,
            _decode_int4,
            rotation,
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
            blocks = add_barrier(_rotate(blocks))
        values, scales = levels(blocks, _INT4_TOP, self.rounding, salt)
        half = values.shape[-1] // 2
        low, high = values[..., :half], values[..., half:]
        codes = low + (high << 4) + (_INT4_TOP + 1) * 17
        return codes.astype(jnp.uint8), scales


@register_codec
@dataclasses.dataclass(frozen=True)
class Sign(Blockwise):
    """Sends the sign of each element and the mean magnitude of each block.

    Eight elements are packed in a byte. As the scale of the signs, the mean magnitude
    has the least squared error (arXiv 1901.09847, section 4).

    In the first shot the errors of different workers partly cancel in the sum. In the
    second shot nothing cancels the error of sending the sum as signs. With
    ``second=int4`` the second shot sends the sum by `Int4`. An element then takes 2.5
    bits, on average over the two shots, instead of 1.

    Attributes:
      block: elements of a block.
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
      second: codec of the second shot, for the sums: sign or int4.
    """

    name: ClassVar[str] = "sign"
    feedback: ClassVar[bool] = True

    block: int = 256
    server_feedback: bool = True
    second: Literal["sign", "int4"] = "sign"

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 8)
        check_choice(self.name, "second", self.second, ("sign", "int4"))

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 0.705

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 7.5

    def second_shot(self) -> RowCodec | None:
        """See `Blockwise`; uses a Hadamard rotation if the block size allows it."""
        if self.second == "sign":
            return None
        return Int4(block=self.block, hadamard=not self.block & (self.block - 1))

    def _format(self) -> Format:
        return Format(
            self.block,
            lambda width: width // 8,
            lambda rest: round_up(rest, 8),
            _encode_signs,
            _decode_signs,
        )


@register_codec
@dataclasses.dataclass(frozen=True)
class Fp8(Blockwise):
    """Sends eight-bit floats, with a scale for each block that fits it to their range.

    Attributes:
      block: elements of a block.
      format: e4m3 (3 bits of mantissa, values up to 448) or e5m2 (2 bits of mantissa,
        values up to 57344).
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
    """

    name: ClassVar[str] = "fp8"

    block: int = 256
    format: Literal["e4m3", "e5m2"] = "e4m3"
    server_feedback: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 1)
        check_choice(self.name, "format", self.format, tuple(_FP8))

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`; with one bit of mantissa less, the error is twice as large."""
        return 0.025 if self.format == "e4m3" else 0.05

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 15.0

    def _format(self) -> Format:
        return Format(
            self.block, _same, _same, self._encode_blocks, self._decode_blocks
        )

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real, salt
        top = float(jnp.finfo(_FP8[self.format]).max)
        scales = largest(blocks, top)
        values = jnp.clip(divide_by_scales(blocks, scales), -top, top).astype(
            _FP8[self.format]
        )
        return jax.lax.bitcast_convert_type(values, jnp.uint8), scales

    def _decode_blocks(self, codes: jax.Array) -> jax.Array:
        values = jax.lax.bitcast_convert_type(codes, _FP8[self.format])
        return values.astype(jnp.float32)


def _same(width: int) -> int:
    return width


def _rotate(blocks: jax.Array) -> jax.Array:
    """The orthonormal Walsh-Hadamard transform of the last dim, which is its own
    inverse.
    """
    return hadamard(blocks) * jnp.float32(1.0 / math.sqrt(blocks.shape[-1]))


def _decode_int8(codes: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)


def _decode_int4(codes: jax.Array) -> jax.Array:
    """Decodes uint8 (m, k, w / 2) to (m, k, w): first the low halves of all bytes, then
    the high halves.
    """
    offset = _INT4_TOP + 1
    low, high = (codes & 0xF).astype(jnp.float32), (codes >> 4).astype(jnp.float32)
    both = jnp.stack((low - offset, high - offset), axis=2)
    return both.reshape(*codes.shape[:2], -1)


def _encode_signs(
    blocks: jax.Array, real: jax.Array, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Encodes float32 (m, k, w) as uint8 (m, k, w / 8). Bit i of the bytes holds the
    signs of the i-th eighth of a block.
    """
    del salt
    width = blocks.shape[-1]
    share = width / jnp.maximum(real, 1).astype(jnp.float32)
    # The magnitudes are divided before they are summed, because a sum of very large
    # floats overflows.
    mean = jnp.sum(jnp.abs(blocks) * jnp.float32(1.0 / width), axis=-1) * share
    scales = usable(mean.astype(jnp.bfloat16).astype(jnp.float32))
    planes = jnp.split(blocks >= 0, 8, axis=-1)
    zero = jnp.uint8(0)
    bits = [jnp.where(plane, jnp.uint8(1 << k), zero) for k, plane in enumerate(planes)]
    return functools.reduce(jnp.bitwise_or, bits), add_barrier(scales)


def _decode_signs(codes: jax.Array) -> jax.Array:
    # On a CPU, two long loops over half a block take a third of the time of eight short
    # loops. The halves are joined last, as in `_decode_int4`; the reason is in
    # `Format.interleaves_scales`.
    copies = add_barrier(jnp.concatenate([codes] * 4, axis=-1))
    places = np.repeat(1 << np.arange(4), codes.shape[-1]).astype(np.uint8)
    low, high = (copies & places) != 0, (copies & (places << 4)) != 0
    one = jnp.float32(1.0)
    both = jnp.stack((jnp.where(low, one, -one), jnp.where(high, one, -one)), axis=2)
    return both.reshape(*codes.shape[:2], -1)


# Codecs that send every element, in float32 or in bfloat16.


@register_codec
@dataclasses.dataclass(frozen=True)
class Dense(Codec):
    """Sends float32 by the backend's own all-reduce, without any error."""

    name: ClassVar[str] = "dense"
    sound: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`. The result is empty, because gradients without another codec are
        sent by this codec anyway.
        """
        return ()

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 0.0

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 1.7

    @property
    def unit(self) -> int:
        """See `Codec`.

        Gradients that are encoded together are summed in blocks of at least one unit
        (`autopar.compression.encoding`). With small blocks these sums would be slow.
        """
        return 32

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        if context.scatter:
            total = yield ReduceScatter(chunks)
        else:
            total = (yield AllReduce(chunks.reshape(-1))).reshape(chunks.shape)
        return Reduced(total, chunks, state)


@register_codec
@dataclasses.dataclass(frozen=True)
class Bf16(Codec):
    """Sends bfloat16 in two shots and sums in float32.

    The values are sent as bytes, so that no backend converts them to a wider dtype. The
    sum over n workers is rounded to bfloat16 only once. In a ring all-reduce of
    bfloat16 it would be rounded n times.
    """

    name: ClassVar[str] = "bf16"
    sound: ClassVar[bool] = True

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 0.0017

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 7.0

    @property
    def unit(self) -> int:
        """See `Codec`.

        Gradients that are encoded together are summed in blocks of at least one unit
        (`autopar.compression.encoding`). With small blocks these sums would be slow.
        """
        return 32

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        del lengths, salt
        words = jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
        words = add_barrier(words)
        low, high = words.astype(jnp.uint8), (words >> 8).astype(jnp.uint8)
        # All low bytes of a row come first, then all high bytes. XLA does not vectorise
        # code that interleaves them.
        return jnp.concatenate((low, high), axis=1)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return joined_bytes(payload[:, :elements], payload[:, elements:])

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return add_rows(self.decode(payload, elements))
