"""EDEN: blocks are rotated at random, and quantised as normally distributed numbers.

As in EDEN (Vargaftik et al. 2022, arXiv 2108.08842), each block of w elements is
multiplied by random signs and rotated by a Walsh-Hadamard transform. Its elements are
then about normally distributed, with the root mean square of the block, r, as standard
deviation. The quantiser is uniform, with the step for a number of levels that has the
least squared error of normally distributed numbers (Max 1960, table II):

    code = clip(floor(element / (step r)) + levels / 2, 0, levels - 1)

The decoder multiplies by ``1 / (1 - distortion)``, so that the expected value of a
decoded element is the element. Codecs that divide by the largest element of a block
have larger errors with few levels, because most elements are small.

The signs are a hash of r, as it is sent, and of the position in the block. So the
decoder knows them, and they depend neither on other blocks nor on the device. Blocks of
similar elements, whose r differ by more than the rounding to bfloat16, have different
signs. So their errors are independent, and do not add up in sums over many blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import (
    Format,
    add_barrier,
    add_rows,
    bfloat16_above,
    check_block,
    divide_by_scales,
    hadamard,
    join_parts,
    mix,
    parts_of,
)
from autopar.compression.codecs.quantise import Blockwise
from autopar.compression.codecs.registry import register_codec
from autopar_errors import InputError

# Levels -> the step with the least error for normally distributed numbers of variance
# 1, and the square of this error (Max 1960, table II; for 6 levels by integration).
_STEPS = {
    4: (0.9957, 0.11885),
    6: (0.7330, 0.06088),
    8: (0.5860, 0.03744),
    16: (0.3352, 0.01154),
    32: (0.1881, 0.00350),
}
# Levels -> the digits of a code. Digits of one kind are packed in bytes of their own:
# 2, 4, 16 and 6 values take 8, 4, 2 and 3 digits of a byte.
_DIGITS = {4: (4,), 6: (6,), 8: (4, 2), 16: (16,), 32: (16, 2)}
# Words of the hash hold this many signs.
_WORD = 32


@register_codec
@dataclasses.dataclass(frozen=True)
class Eden(Blockwise):
    """Sends randomly rotated blocks by few levels, with a scale for each block.

    Attributes:
      levels: the number of values of a code: 4, 6, 8, 16 or 32, which take 2, 2.67, 3,
        4 and 5 bits.
      block: elements of a block.
      server_feedback: whether the error of the second shot is added to the next step's
        second shot.
    """

    name: ClassVar[str] = "eden"
    feedback: ClassVar[bool] = True

    levels: int = 8
    block: int = 128
    server_feedback: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_block(self.name, self.block, 8)
        if self.levels not in _STEPS:
            names = ", ".join(map(str, _STEPS))
            raise InputError(f"eden: levels must be one of {names}, got {self.levels}.")
        if self.block & (self.block - 1):
            raise InputError(
                f"eden: block must be a power of two, got {self.block}; use "
                f"block={1 << (self.block.bit_length() - 1)}."
            )

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`. The result is empty: where int4 is too large for gradients, sign
        codes with error feedback are smaller than these codes.
        """
        return ()

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`; the squared error grows by the factor of the decoder."""
        distortion = _STEPS[self.levels][1]
        return math.sqrt(distortion / (1.0 - distortion))

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 18.0

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        step, distortion = _STEPS[self.levels]
        out: list[jax.Array] = []
        for values, scales in parts_of(self._format(), payload, elements):
            # The values are odd whole numbers, twice as large as in units of a step. So
            # the rotation is exact, and all devices get the same bits.
            turned = hadamard(values) * _signs(scales[..., 0], values.shape[-1])
            factor = step / 2.0 / (1.0 - distortion) / math.sqrt(values.shape[-1])
            out.append(
                (turned * (scales * jnp.float32(factor))).reshape(len(values), -1)
            )
        return join_parts(out)[:, :elements]

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return add_rows(self.decode(payload, elements))

    def _format(self) -> Format:
        return Format(
            self.block,
            functools.partial(code_bytes, self.levels),
            lambda rest: max(8, 1 << (rest - 1).bit_length()),
            self._encode_blocks,
            self._decode_blocks,
        )

    def _encode_blocks(
        self, blocks: jax.Array, real: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del real, salt
        width, step = blocks.shape[-1], _STEPS[self.levels][0]
        largest = jnp.max(jnp.abs(blocks), axis=-1)
        # Elements are divided before they are squared, because squares of very large
        # floats overflow.
        parts = blocks / jnp.where(largest > 0, largest, 1.0)[..., None]
        mean = jnp.mean(parts * parts, axis=-1)
        scales = bfloat16_above(largest * jnp.sqrt(mean))
        turned = add_barrier(hadamard(blocks * _signs(scales, width)))
        values = divide_by_scales(turned, scales) * jnp.float32(
            1.0 / (step * math.sqrt(width))
        )
        half = self.levels // 2
        values = jnp.clip(jnp.floor(values), -half, half - 1) + half
        return _pack(values.astype(jnp.uint8), self.levels), scales

    def _decode_blocks(self, codes: jax.Array) -> jax.Array:
        """Decodes uint8 (m, k, _) to odd whole numbers, float32 (m, k, w)."""
        values = _unpack(codes, self.levels)
        return 2.0 * values.astype(jnp.float32) - (self.levels - 1)


def code_bytes(levels: int, width: int) -> int:
    """The number of bytes of ``width`` codes.

    >>> [code_bytes(levels, 128) for levels in (4, 6, 8, 16, 32)]
    [32, 43, 48, 64, 80]
    """
    return sum(-(-width // _per_byte(radix)) for radix in _DIGITS[levels])


def _per_byte(radix: int) -> int:
    """The number of digits that fit in a byte."""
    return int(math.log(256, radix) + 1e-9)


def _signs(scales: jax.Array, width: int) -> jax.Array:
    """Random signs, float32 (m, k, w), for blocks with scales (m, k)."""
    words = -(-width // _WORD)
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    salts = jnp.asarray(np.arange(1, words + 1) * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    hashed = mix(mix(bits)[..., None] ^ salts)
    found = (hashed[..., None] >> jax.lax.iota(jnp.uint32, _WORD)) & 1
    found = found.reshape(*scales.shape, -1)[..., :width]
    return 1.0 - 2.0 * found.astype(jnp.float32)


def _pack(values: jax.Array, levels: int) -> jax.Array:
    """Packs uint8 (m, k, w) below ``levels`` as bytes, digits of one kind after the
    other. The first digit of all bytes is the first part of a block, and so on.
    """
    out: list[jax.Array] = []
    for radix in _DIGITS[levels]:
        digits, values, count = values % radix, values // radix, _per_byte(radix)
        padding = -digits.shape[-1] % count
        digits = jnp.pad(digits, ((0, 0), (0, 0), (0, padding)))
        parts = jnp.split(digits, count, axis=-1)
        out.append(sum((p * radix**i for i, p in enumerate(parts[1:], 1)), parts[0]))
    return jnp.concatenate(out, axis=-1)


def _unpack(codes: jax.Array, levels: int) -> jax.Array:
    """The inverse of `_pack`: uint8 (m, k, _) to (m, k, w)."""
    total = codes.shape[-1]
    width = next(w for k in range(32) if code_bytes(levels, w := 1 << k) == total)
    values, begin, factor = jnp.zeros((), jnp.uint8), 0, 1
    for radix in _DIGITS[levels]:
        count = _per_byte(radix)
        end = begin + -(-width // count)
        packed = codes[..., begin:end]
        parts = [packed // radix**i % radix for i in range(count)]
        digits = jnp.stack(parts, axis=2).reshape(*codes.shape[:2], -1)[..., :width]
        values, begin, factor = values + factor * digits, end, factor * radix
    return values
