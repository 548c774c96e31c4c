"""What blockwise codecs share: the sum in two shots, blocks, scales and noise.

First shot: every worker quantises its chunks and sends chunk i to worker i,
which decodes and sums them in float32. Second shot: each quantises its sum and
sends it to all (Seide et al. 2014; 1-bit Adam, arXiv 2102.02888; CGX, arXiv
2111.08617). All workers decode the same bytes, their own included, so that
their results have the same bits.

Every block has a scale of its own in bfloat16: the range of float32, so that no
gradient over- or underflows, in two bytes. Where the scale comes from the
largest element it is rounded up, so that this element is not clipped; that
coarsens the steps by at most 1/128. One message holds codes and scales.

A block with an infinity or a NaN becomes all NaN, so that the damage is seen
and stays in its block. A block whose scale would be a denormal becomes zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codec import (
    AllGather,
    AllToAll,
    Context,
    Reduced,
    Rounds,
    State,
)

Rounding = Literal["nearest", "stochastic"]

# Chunks of at least so many blocks are padded to whole blocks: at most 3 % more
# bytes, and no second, shorter kind of block to compile.
_WHOLE_BLOCKS = 32
_SCALE_BYTES = 2
_HADAMARD_FACTOR = 256
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class RowCodec(Protocol):
    """Turns rows of numbers into rows of bytes and back."""

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """Float32 (m, c) to uint8 (m, b).

        Args:
          rows: the numbers; zeros behind the first ``lengths`` of each row.
          lengths: int32 (m,), how many elements of each row are real.
          salt: uint32 scalar, for random choices.
        """
        ...

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """Uint8 (m, b) to float32 (m, c), c being ``elements``."""
        ...


def two_shot(
    rows: RowCodec, chunks: jax.Array, state: State, context: Context
) -> Rounds:
    """Sums chunks over the workers with an all-to-all and an all-gather.

    Args:
      rows: how rows are sent.
      chunks: of this worker, float32 (n, c).
      state: `server_state`, where the error of the second shot is fed back to
        the next step's, or ().
      context: the step. Where it says scatter there is no second shot.
    """
    count, elements = chunks.shape
    lengths = row_lengths(context, elements)
    payload = rows.encode(chunks, lengths, salt(context, 0))
    sent = rows.decode(payload, elements)
    received = yield AllToAll(payload)
    total = jnp.sum(rows.decode(received, elements), axis=0)
    if context.scatter:
        return Reduced(total, sent, state)
    # What was decoded in the place of padding need not be zero.
    length = lengths[context.worker]
    real = jnp.arange(elements) < length
    wanted = jnp.where(real, total + state["server"] if state else total, 0.0)
    payload = rows.encode(wanted[None], length[None], salt(context, 1))
    if state:
        error = wanted - rows.decode(payload, elements)[0]
        state = {"server": jnp.where(real, error, 0.0)}
    gathered = yield AllGather(payload[0])
    assert gathered.shape[0] == count
    return Reduced(rows.decode(gathered, elements), sent, state)


def server_state(enabled: bool, size: int, workers: int) -> State:
    """State of `two_shot`: the error of the own chunk, float32 (c,), or none."""
    if not enabled:
        return ()
    return {"server": jnp.zeros((size // workers,), jnp.float32)}


def row_lengths(context: Context, elements: int) -> jax.Array:
    """How many elements of each chunk are not padding, int32 (n,)."""
    if context.scatter:
        return jnp.full((context.workers,), elements, jnp.int32)
    before = np.arange(context.workers) * elements
    return jnp.asarray(np.clip(context.size - before, 0, elements), jnp.int32)


def mix(word: jax.Array) -> jax.Array:
    """A bijective hash of uint32 words: lowbias32 by C. Wellons.

    Source of the constants: nullprogram.com/blog/2018/07/31. About a fortieth of
    the time of threefry on a CPU.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def salt(context: Context, shot: int) -> jax.Array:
    """A uint32 scalar that differs between gradients, workers, steps and shots."""
    seed = jnp.uint32(context.seed & 0xFFFFFFFF)
    word = mix(mix(seed) + context.worker.astype(jnp.uint32))
    return mix(mix(word + context.step.astype(jnp.uint32)) + jnp.uint32(shot))


def uniform(shape: tuple[int, ...], salt_word: jax.Array) -> jax.Array:
    """Float32 in [0, 1), a hash of position and salt; multiples of 2 ** -24."""
    position = jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    # 2 ** 32 / golden ratio spreads neighbouring positions (Knuth, TAOCP 6.4).
    word = mix((position * jnp.uint32(0x9E3779B9)) ^ salt_word)
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def hadamard(blocks: jax.Array) -> jax.Array:
    """Walsh-Hadamard transform of the last dim, not normalised: a sum of +-1 times.

    Of width ``w``, a power of two; twice the transform is ``w`` times the blocks.
    It is a product with the Sylvester matrix, or with one per factor of at most
    256: for w = 256 a third of the time of log2(w) stages of additions on a CPU.
    Whole numbers come out exact, in any order of summation.
    """
    *outer, width = blocks.shape
    inner = min(width, _HADAMARD_FACTOR)
    index = jax.lax.iota(jnp.uint32, inner)
    odd = jax.lax.population_count(index[:, None] & index) & 1
    matrix = 1.0 - 2.0 * odd.astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    values = blocks.reshape(*outer, width // inner, inner)
    values = jnp.matmul(values, matrix, precision=highest)
    if width > inner:
        values = jnp.swapaxes(hadamard(jnp.swapaxes(values, -1, -2)), -1, -2)
    return values.reshape(*outer, width)


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Blocks of a row as bytes. Shapes: m rows, k blocks of w elements.

    Attributes:
      block: elements of a block.
      bits: of one element.
      width: the width of a shorter last block of so many elements.
      encode: (m, k, w), real elements of each block (m, k), salt -> codes, uint8
        (m, k, w * bits / 8), and scales, float32 (m, k), exact in bfloat16.
      decode: codes, scales (m, k, 1) -> (m, k, w).
    """

    block: int
    bits: int
    width: Callable[[int], int]
    encode: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    decode: Callable[[jax.Array, jax.Array], jax.Array]

    def parts(self, elements: int) -> list[tuple[int, int, int]]:
        """First element, number of blocks and their width, of each kind."""
        blocks, rest = divmod(elements, self.block)
        parts = [(0, blocks, self.block)] if blocks else []
        if rest:
            parts.append((blocks * self.block, 1, self.width(rest)))
        return parts


def encode_rows(
    form: Format, rows: jax.Array, lengths: jax.Array, salt_word: jax.Array
) -> jax.Array:
    """Float32 (m, c) to uint8 (m, b): for each part, codes and then scales."""
    count, elements = rows.shape
    payload: list[jax.Array] = []
    for index, (start, blocks, width) in enumerate(form.parts(elements)):
        part = rows[:, start : start + blocks * width]
        part = jnp.pad(part, ((0, 0), (0, blocks * width - part.shape[1])))
        before = start + width * jnp.arange(blocks, dtype=jnp.int32)
        real = jnp.clip(lengths[:, None] - before, 0, width)
        codes, scales = form.encode(
            part.reshape(count, blocks, width), real, mix(salt_word + jnp.uint32(index))
        )
        halves = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)
        payload += [codes.reshape(count, -1), halves.reshape(count, -1)]
    return jnp.concatenate(payload, axis=1)


def decode_rows(form: Format, payload: jax.Array, elements: int) -> jax.Array:
    """Uint8 (m, b) to float32 (m, c)."""
    count = payload.shape[0]
    out: list[jax.Array] = []
    at = 0
    for _, blocks, width in form.parts(elements):
        code_bytes = blocks * width * form.bits // 8
        codes = payload[:, at : at + code_bytes].reshape(count, blocks, -1)
        at += code_bytes
        halves = payload[:, at : at + blocks * _SCALE_BYTES]
        at += blocks * _SCALE_BYTES
        scales = jax.lax.bitcast_convert_type(
            halves.reshape(count, blocks, _SCALE_BYTES), jnp.bfloat16
        )
        values = form.decode(codes, scales.astype(jnp.float32)[..., None])
        out.append(values.reshape(count, blocks * width))
    return jnp.concatenate(out, axis=1)[:, :elements]


def usable(scales: jax.Array) -> jax.Array:
    """NaN for scales that are not finite, zero for denormals."""
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    return jnp.where(scales < _SMALLEST_NORMAL, 0.0, scales)


def largest(blocks: jax.Array, top: float) -> jax.Array:
    """Scale at which the largest element is at most ``top``, exact in bfloat16.

    Float32 (m, k, w) -> (m, k).
    """
    scales = jnp.max(jnp.abs(blocks), axis=-1) * jnp.float32(1.0 / top)
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    up = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(up, jnp.float32)
    return usable(jnp.where(jnp.isfinite(scales), rounded, jnp.nan))


def scaled(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks divided by their scales; zero where the scale is zero or NaN."""
    good = scales[..., None] > 0
    inverse = jnp.where(good, 1.0 / jnp.where(good, scales[..., None], 1.0), 0.0)
    return jnp.where(good, blocks, 0.0) * inverse


def levels(
    blocks: jax.Array, top: int, rounding: str, salt_word: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Whole numbers of -top..top, in float32 (m, k, w), and scales (m, k)."""
    scales = largest(blocks, top)
    values = scaled(blocks, scales)
    if rounding == "stochastic":
        values = jnp.floor(values + uniform(values.shape, salt_word))
    else:
        values = jnp.round(values)
    return jnp.clip(values, -top, top), scales


def check_block(codec: str, block: int, multiple: int) -> None:
    """Raises ValueError unless blocks of this size can be packed into bytes."""
    if block < multiple or block % multiple:
        raise ValueError(
            f"{codec}: block must be a positive multiple of {multiple}, got {block}."
        )


def check_choice(codec: str, field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless a field has one of its values."""
    if value not in choices:
        raise ValueError(
            f"{codec}: {field} must be one of {', '.join(choices)}, got {value!r}."
        )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below a value."""
    return -(-value // multiple) * multiple


def block_chunk(elements: int, block: int) -> int:
    """Whole blocks for large chunks; small ones end in a shorter block."""
    return round_up(elements, block) if elements >= _WHOLE_BLOCKS * block else elements
