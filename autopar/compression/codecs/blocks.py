"""Functions that several blockwise codecs use: the sum in two shots, blocks, scales and
random numbers.

In the first shot every worker quantises its partial gradient in chunks, and sends chunk
i to worker i. Worker i decodes the chunks that it receives and sums them in float32. In
the second shot every worker quantises the sum of its chunk and sends it to all workers
(Seide et al. 2014; 1-bit Adam, arXiv 2102.02888; CGX, arXiv 2111.08617). A worker
decodes even its own chunk from these bytes. So all workers decode the same bytes, and
get bit-identical results.

A block is a number of successive elements with a common scale, in bfloat16. bfloat16
has the same exponent range as float32, so no gradient over- or underflows. If the scale
comes from the largest element of the block, it is rounded up, so that this element is
not clipped. This makes the quantisation steps larger by at most 1/128. A message holds
both the quantised elements (codes) and the scales.

If a block has an infinity or a NaN, all its elements are decoded to NaN. So the
infinity or NaN shows in the sum, but does not spread to other blocks. If the scale of a
block would be a denormal, all its elements become zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.codec import (
    AllGather,
    AllToAll,
    CodecContext,
    Reduced,
    Rounds,
    State,
)
from autopar_errors import InputError

Rounding = Literal["nearest", "stochastic"]

# Chunks of at least this many blocks are padded to whole blocks, which adds at most 3 %
# to the bytes. The program then needs no code for a shorter last block.
_WHOLE_BLOCKS = 32
_SCALE_BYTES = 2
# Factors of the Walsh-Hadamard transform. On two CPU cores, the transform with 32 x 8
# took 0.8 times the time of 64 x 4, half the time of 16 x 16, and at most 0.4 times the
# time of a single product of size 256.
_PRODUCT = 32
_BUTTERFLY = 8
# Up to this number of rows, `add_rows` adds the rows one by one, which compiles to a
# single loop. On a CPU this is twelve times as fast as a reduction over the leading
# dim.
_UNROLLED_ROWS = 16
# To find a block's largest element, its halves are compared with each other until this
# width is reached.
_HALVES = 16
# Adding 1.5 * 2 ** 23 to a float32 rounds it to a whole number, which the low bits of
# the sum hold.
_ROUNDER = 12582912.0
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class RowCodec(Protocol):
    """Encodes rows of numbers as rows of bytes, and decodes them."""

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """Encodes float32 (m, c) as uint8 (m, b).

        Args:
          rows: the numbers; each row holds zeros after its first ``lengths`` elements.
          lengths: int32 (m,), how many elements of each row are not padding.
          salt: uint32 scalar that seeds random choices.
        """
        ...

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """Decodes uint8 (m, b) to float32 (m, c), where c is ``elements``."""
        ...

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """Decodes uint8 (m, b) and sums over the m rows: float32 (c,)."""
        ...


def two_shot(
    rows: RowCodec,
    chunks: jax.Array,
    state: State,
    context: CodecContext,
    second: RowCodec | None = None,
) -> Rounds:
    """Sums chunks over the workers with an all-to-all and an all-gather.

    Args:
      rows: encodes the chunks of the first shot.
      chunks: chunks of this worker, float32 (n, c).
      state: if not (), the error of this step's second shot is kept (`server_state`)
        and added in the next step's second shot.
      context: facts of the step. With ``scatter`` there is no second shot.
      second: encodes the sums of the second shot; default: ``rows``.
    """
    back = rows if second is None else second
    count, elements = chunks.shape
    lengths = row_lengths(context, elements)
    payload = add_barrier(rows.encode(chunks, lengths, salt(context, 0)))
    sent = functools.partial(rows.decode, payload, elements)
    received = yield AllToAll(payload)
    total = rows.decode_sum(received, elements)
    if context.scatter:
        return Reduced(total, sent, state)
    # A codec may decode padding to values other than zero. These values are set to zero
    # here.
    length = lengths[context.worker]
    real = jnp.arange(elements) < length
    wanted = jnp.where(real, total + state["server"] if state else total, 0.0)
    wanted = add_barrier(wanted)
    payload = back.encode(wanted[None], length[None], salt(context, 1))
    gathered = yield AllGather(add_barrier(payload)[0])
    assert gathered.shape[0] == count
    again = functools.partial(back.decode, gathered, elements)
    understood = again()
    if state:
        own = jax.lax.dynamic_index_in_dim(understood, context.worker, keepdims=False)
        state = {"server": jnp.where(real, wanted - own, 0.0)}
    return Reduced(understood, sent, state, again)


def server_state(enabled: bool, size: int, workers: int) -> State:
    """The first state of `two_shot`: zeros for the error of the worker's own chunk in
    the second shot, float32 (c,); () if ``enabled`` is false.
    """
    if not enabled:
        return ()
    return {"server": jnp.zeros((size // workers,), jnp.float32)}


def row_lengths(context: CodecContext, elements: int) -> jax.Array:
    """The number of elements of each chunk that are not padding, int32 (n,)."""
    if context.scatter:
        return jnp.full((context.workers,), elements, jnp.int32)
    before = np.arange(context.workers) * elements
    return jnp.asarray(np.clip(context.size - before, 0, elements), jnp.int32)


def mix(word: jax.Array) -> jax.Array:
    """Hashes uint32 words bijectively (lowbias32 by C. Wellons).

    Source of the constants: nullprogram.com/blog/2018/07/31. On a CPU the hash takes
    about a fortieth of the time of threefry.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def salt(context: CodecContext, shot: int) -> jax.Array:
    """A uint32 scalar, different for each gradient, worker, step and shot."""
    seed = jnp.uint32(context.seed & 0xFFFFFFFF)
    word = mix(mix(seed) + context.worker.astype(jnp.uint32))
    return mix(mix(word + context.step.astype(jnp.uint32)) + jnp.uint32(shot))


def uniform(shape: tuple[int, ...], salt_word: jax.Array) -> jax.Array:
    """Pseudorandom float32 in [0, 1), multiples of 2 ** -24. Each is a hash of its
    position in the array and the salt.
    """
    position = jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return uniform_at(position, salt_word)


def uniform_at(position: jax.Array, salt_word: jax.Array) -> jax.Array:
    """Pseudorandom numbers as in `uniform`, for given positions, uint32."""
    # The factor is 2 ** 32 divided by the golden ratio. It spreads neighbouring
    # positions over all words (Knuth, TAOCP 6.4).
    word = mix((position * jnp.uint32(0x9E3779B9)) ^ salt_word)
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


# Compiler options that make XLA for CPUs keep optimization barriers until the end of
# its passes.
WITH_BARRIERS: Final = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def add_barrier(values: jax.Array) -> jax.Array:
    """Returns the values through an XLA optimization barrier.

    The compiler does not simplify computations across the barrier. So the worker
    decodes exactly the values that the sent bytes encode. The barrier does not force
    the values into memory, because XLA for CPUs removes barriers before it fuses loops.
    """
    return jax.lax.optimization_barrier(values)


def hadamard(blocks: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of the last dim, without normalisation.

    The width ``w`` is a power of two. Applying the transform twice multiplies the
    blocks by ``w``. The Sylvester matrix is the Kronecker product of smaller Sylvester
    matrices. So the transform is a matrix product of size at most `_PRODUCT`, followed
    by butterflies of size `_BUTTERFLY`. On a CPU, for w = 256, this takes at most 0.4
    times the time of one product. For whole numbers the result is exact, whatever the
    order of summation.
    """
    *outer, width = blocks.shape
    inner = min(width, _PRODUCT)
    index = jax.lax.iota(jnp.uint32, inner)
    odd = jax.lax.population_count(index[:, None] & index) & 1
    matrix = 1.0 - 2.0 * odd.astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    values = jnp.matmul(blocks.reshape(-1, inner), matrix, precision=highest)
    while inner < width:
        radix = min(_BUTTERFLY, width // inner)
        values = _butterfly(values.reshape(-1, radix, inner))
        inner *= radix
    return values.reshape(*outer, width)


def _butterfly(values: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of the middle dim of (m, r, w), by additions."""
    parts = [values[:, k] for k in range(values.shape[1])]
    step = 1
    while step < len(parts):
        for low in range(len(parts)):
            if not low & step:
                a, b = parts[low], parts[low + step]
                parts[low], parts[low + step] = a + b, a - b
        step *= 2
    return add_barrier(jnp.stack(parts, axis=1))


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """How the blocks of a row are written as bytes.

    The shapes are for m rows of k blocks of w elements.

    Attributes:
      block: elements of a block.
      code_bytes: maps the width of a block to the bytes of its codes.
      width: maps the number of elements in the last block, which may be shorter, to the
        width with which this block is written.
      encode: maps blocks (m, k, w), the number of elements without padding in each
        block (m, k), and a salt to codes, uint8 (m, k, _), and scales,
        float32 (m, k), whose values are exact in bfloat16.
      decode: maps codes to (m, k, w) without multiplying by the scales; exact.
      rotation: a linear map that is applied to the blocks at the end of decoding. The
        map is exact on the results of ``decode``. None: no map.
    """

    block: int
    code_bytes: Callable[[int], int]
    width: Callable[[int], int]
    encode: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    decode: Callable[[jax.Array], jax.Array]
    rotation: Callable[[jax.Array], jax.Array] | None = None

    def parts(self, elements: int) -> list[tuple[int, int, int]]:
        """For whole blocks and for a shorter last block: the first element, number of
        blocks and block width.
        """
        blocks, rest = divmod(elements, self.block)
        parts = [(0, blocks, self.block)] if blocks else []
        if rest:
            parts.append((blocks * self.block, 1, self.width(rest)))
        return parts

    @property
    def interleaves_scales(self) -> bool:
        """Whether each block's scale follows the block's codes; otherwise all scales
        follow all codes.

        Scales are interleaved only with codes of fewer than 8 bits. Such codes must be
        packed into bytes. XLA for CPUs does not vectorise the packing if it fuses it
        with a reshape to rows. If codes and scales are interleaved, a concatenation
        lies between packing and reshape. Codes of 8 bits need no packing. XLA for CPUs
        vectorises copies of them only if there are no scales between codes.
        """
        return self.code_bytes(self.block) < self.block

    def laid_out(self, codes: jax.Array, scales: jax.Array) -> list[jax.Array]:
        """Codes (m, k, _) and scales (m, k) as byte arrays, which a row joins."""
        halves = scale_bytes(scales)
        if not self.interleaves_scales:
            return [_flat(codes), _flat(jnp.swapaxes(halves, 1, 2))]
        return [_flat(jnp.concatenate((codes, halves), axis=2))]

    def taken_apart(
        self, payload: jax.Array, blocks: int
    ) -> tuple[jax.Array, jax.Array]:
        """Splits bytes that `laid_out` made into codes (m, k, _) and scales (m, k)."""
        count = payload.shape[0]
        if self.interleaves_scales:
            both = payload.reshape(count, blocks, -1)
            halves = both[..., -_SCALE_BYTES:]
            return both[..., :-_SCALE_BYTES], joined_bytes(
                halves[..., 0], halves[..., 1]
            )
        code_bytes = payload.shape[1] - blocks * _SCALE_BYTES
        low, high = jnp.split(payload[:, code_bytes:], _SCALE_BYTES, axis=1)
        codes = payload[:, :code_bytes].reshape(count, blocks, -1)
        return codes, joined_bytes(low, high)


def encode_rows(
    form: Format, rows: jax.Array, lengths: jax.Array, salt_word: jax.Array
) -> jax.Array:
    """Encodes float32 (m, c) as uint8 (m, b), part by part (`Format.parts`)."""
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
        payload += form.laid_out(codes, scales)
    return join_parts(payload)


def decode_rows(form: Format, payload: jax.Array, elements: int) -> jax.Array:
    """Decodes uint8 (m, b) to float32 (m, c)."""
    out: list[jax.Array] = []
    for values, scales in parts_of(form, payload, elements):
        # The rotation is exact, because it acts on whole numbers. So all workers get
        # the same bits, even if their processors sum in different orders.
        turned = form.rotation(values) if form.rotation else values
        out.append(_flat(turned * scales))
    return join_parts(out)[:, :elements]


def decode_sum_rows(form: Format, payload: jax.Array, elements: int) -> jax.Array:
    """Decodes uint8 (m, b) and sums over the rows: float32 (c,). The rotation is
    applied only once, to the sum.
    """
    out: list[jax.Array] = []
    for values, scales in parts_of(form, payload, elements):
        total = add_rows(values * scales)[None]
        out.append((form.rotation(total) if form.rotation else total).reshape(1, -1))
    return join_parts(out)[0, :elements]


def add_rows(rows: jax.Array) -> jax.Array:
    """Sums over the leading dim."""
    if rows.shape[0] > _UNROLLED_ROWS:
        return jnp.sum(rows, axis=0)
    total = rows[0]
    for k in range(1, rows.shape[0]):
        total = total + rows[k]
    return total


def joined_bytes(low: jax.Array, high: jax.Array) -> jax.Array:
    """Makes float32 from the low and the high bytes of bfloat16 numbers, uint8."""
    word = low.astype(jnp.uint32) << 16 | high.astype(jnp.uint32) << 24
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def scale_bytes(scales: jax.Array) -> jax.Array:
    """The bytes of float32 (m, k) that are exact in bfloat16: uint8 (m, k, 2), the low
    byte first.
    """
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    return jnp.stack(
        ((bits >> 16).astype(jnp.uint8), (bits >> 24).astype(jnp.uint8)), 2
    )


def parts_of(
    form: Format, payload: jax.Array, elements: int
) -> list[tuple[jax.Array, jax.Array]]:
    """For each part: the blocks (m, k, w) before scaling, and the scales (m, k, 1)."""
    out: list[tuple[jax.Array, jax.Array]] = []
    at = 0
    for _, blocks, width in form.parts(elements):
        end = at + blocks * (form.code_bytes(width) + _SCALE_BYTES)
        codes, scales = form.taken_apart(payload[:, at:end], blocks)
        at = end
        out.append((form.decode(codes), add_barrier(scales)[..., None]))
    return out


def _flat(blocks: jax.Array) -> jax.Array:
    """Blocks (m, k, w) as rows, (m, k w)."""
    return blocks.reshape(blocks.shape[0], -1)


def join_parts(parts: list[jax.Array]) -> jax.Array:
    """Joins parts of rows, (m, _), along the last dim."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def usable(scales: jax.Array) -> jax.Array:
    """Replaces scales that are not finite by NaN, and denormal scales by zero."""
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    return jnp.where(scales < _SMALLEST_NORMAL, 0.0, scales)


def largest(blocks: jax.Array, top: float) -> jax.Array:
    """Scales, exact in bfloat16, such that the largest element of a block divided by
    the scale is at most ``top``.

    Float32 (m, k, w) -> (m, k).
    """
    sizes = jnp.abs(blocks)
    # A vector instruction compares many elements at a time here; a plain reduction
    # compares one by one.
    while sizes.shape[-1] > _HALVES and sizes.shape[-1] % 2 == 0:
        half = sizes.shape[-1] // 2
        sizes = jnp.maximum(sizes[..., :half], sizes[..., half:])
    scales = jnp.max(sizes, axis=-1) * jnp.float32(1.0 / top)
    return bfloat16_above(scales)


def bfloat16_above(scales: jax.Array) -> jax.Array:
    """Rounds positive scales up to bfloat16; see `usable` for other scales."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    up = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(up, jnp.float32)
    return add_barrier(usable(jnp.where(jnp.isfinite(scales), rounded, jnp.nan)))


def divide_by_scales(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks divided by their scales.

    The result is zero if the scale is zero. If the scale is NaN, the result is
    arbitrary, because the block is decoded to NaN.
    """
    good = scales > 0
    inverse = jnp.where(good, 1.0 / jnp.where(good, scales, 1.0), 0.0)
    return blocks * add_barrier(inverse)[..., None]


def levels(
    blocks: jax.Array, top: int, rounding: str, salt_word: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Quantises blocks (m, k, w) to whole numbers in -top..top, int32; also returns
    scales (m, k).

    The low 22 bits of each result hold the number in two's complement. The caller must
    ignore the higher bits.
    """
    scales = largest(blocks, top)
    values = divide_by_scales(blocks, scales)
    if rounding == "stochastic":
        values = jnp.floor(values + uniform(values.shape, salt_word))
        values = jnp.clip(values, -top, top)
    # Rounding to the nearest number needs no clipping, because scales are rounded up.
    return jax.lax.bitcast_convert_type(values + _ROUNDER, jnp.int32), scales


def check_block(codec: str, block: int, multiple: int) -> None:
    """Raises `InputError` unless blocks of this size can be packed into bytes."""
    if block < multiple or block % multiple:
        raise InputError(
            f"{codec}: block must be a positive multiple of {multiple}, got {block}."
        )


def check_choice(codec: str, field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless a field has one of its values."""
    if value not in choices:
        raise InputError(
            f"{codec}: {field} must be one of {', '.join(choices)}, got {value!r}."
        )


def round_up(value: int, multiple: int) -> int:
    """Rounds a value up to a multiple."""
    return -(-value // multiple) * multiple


def block_chunk(elements: int, block: int) -> int:
    """Elements of a chunk with padding: large chunks consist of whole blocks, small
    chunks may end in a shorter block.
    """
    return round_up(elements, block) if elements >= _WHOLE_BLOCKS * block else elements
