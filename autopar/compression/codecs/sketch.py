"""A codec that sends a count sketch and recovers the largest elements of the sum.

Count sketch: Charikar, Chen and Farach-Colton, ICALP 2002; for gradients, Sketched-SGD,
arXiv 1903.04488, and FetchSGD, arXiv 2007.07682. A usual count sketch draws a random
bucket for each element. Here the vector is cut into pieces as long as a row of the
sketch. Each piece is multiplied by random signs, rotated by a random offset, and added
to the row. So two elements of the same piece never share a bucket. Two elements of
different pieces share a bucket with probability 1 / C, as with independent buckets. The
advantage is that no scatter operation is needed.

In shapes: R rows and C columns of the sketch, p pieces of C elements.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compression.codecs.blocks import mix
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    CodecContext,
    Reduced,
    Rounds,
    State,
)
from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.sparse import (
    check_ratio,
    elements_in_share,
    error_without,
    shared_salt,
)
from autopar.compression.codecs.threshold import kth_largest, quantile
from autopar_errors import InputError


@register_codec
@dataclasses.dataclass(frozen=True)
class Sketch(Codec):
    """Sends a count sketch, and recovers the largest elements of the sum from it.

    An element's estimate is the median of its R buckets in the summed sketch. The codec
    decodes the largest estimates, and sets all other elements to zero. What a worker
    contributes to an element is the value of the worker's own sketch in the bucket of
    the median. So the workers' contributions add up to the decoded sum. Signs and
    rotations are new in every step. A worker sends ``8 (n - 1) / n * R C`` bytes.

    Attributes:
      ratio: numbers in the sketch divided by elements of the gradient, R C / D.
      rows: R; 1, 3 or 5.
      heavy: fraction of the elements that are recovered.
      exact: whether the threshold above which estimates are recovered is computed from
        all estimates; if False, from a sample of them.
    """

    name: ClassVar[str] = "sketch"
    feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    ratio: float = 0.1
    rows: int = 3
    heavy: float = 0.005
    exact: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_ratio(self, self.ratio)
        check_ratio(self, self.heavy, "heavy")
        if self.rows not in (1, 3, 5):
            raise InputError(f"sketch: rows must be 1, 3 or 5, got {self.rows}.")

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return error_without(self.heavy)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 10.6 * self.rows

    def columns(self, elements: int) -> int:
        """The length of a row, C, for a gradient with this number of elements."""
        return max(1, round(self.ratio * elements / self.rows))

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        size = chunks.size if context.scatter else context.size
        salt = shared_salt(context.step, context.seed, stream=4)
        flat = chunks.reshape(-1)[:size]
        columns = self.columns(size)
        own = sketch(flat, self.rows, columns, salt)
        summed = (yield AllReduce(own.reshape(-1))).reshape(own.shape)
        estimates, mine = unsketch(summed, own, size, salt)
        floor = self._floor(estimates, salt)
        heavy = ~(jnp.abs(estimates) < floor)

        def to_chunks(values: jax.Array) -> jax.Array:
            out = jnp.where(heavy, values, 0.0)
            return jnp.pad(out, (0, chunks.size - size)).reshape(chunks.shape)

        total = to_chunks(estimates)
        if context.scatter:
            total = jnp.take(total, context.worker, axis=0)
        return Reduced(total, to_chunks(mine), state)

    def _floor(self, estimates: jax.Array, salt: jax.Array) -> jax.Array:
        if self.exact:
            count = elements_in_share(self.heavy, estimates.size)
            return kth_largest(estimates, count)
        return quantile(estimates, self.heavy, salt)


def sketch(flat: jax.Array, rows: int, columns: int, salt: jax.Array) -> jax.Array:
    """The count sketch (R, C) of a vector (D,); a linear function of the vector."""
    pieces = _pieces(flat, columns)
    hashes = _hashes(columns, salt)

    def add(table: jax.Array, item: tuple[jax.Array, jax.Array]) -> Any:
        piece, number = item
        added = [
            _rotate(_apply_signs(piece, hashes, number, r, salt), shift)
            for r, shift in enumerate(_shifts(number, rows, columns, salt))
        ]
        return table + jnp.stack(added), None

    zeros = jnp.zeros((rows, columns), jnp.float32)
    numbers = lax.iota(jnp.uint32, pieces.shape[0])
    return lax.scan(add, zeros, (pieces, numbers))[0]


def unsketch(
    summed: jax.Array, own: jax.Array, size: int, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Estimates of the summed vector, and this worker's contribution to them, both
    (D,).

    Args:
      summed: the sum of all workers' sketches, (R, C).
      own: this worker's sketch, (R, C).
      size: elements of the vector, D.
      salt: as in `sketch`.
    """
    rows, columns = summed.shape
    # A rotation by s is undone by a slice that starts at s. The array is written twice
    # in a row, so that the slice need not wrap around.
    twice = jnp.concatenate([summed, summed], axis=1)
    own_twice = jnp.concatenate([own, own], axis=1)
    hashes = _hashes(columns, salt)

    def piece(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        estimates: list[jax.Array] = []
        parts: list[jax.Array] = []
        for r, shift in enumerate(_shifts(number, rows, columns, salt)):
            for table, values in ((twice, estimates), (own_twice, parts)):
                bucket = lax.dynamic_slice(table[r], (shift,), (columns,))
                values.append(_apply_signs(bucket, hashes, number, r, salt))
        middle = median(estimates)
        mine = parts[-1]
        for estimate, part in zip(estimates[:-1], parts[:-1], strict=True):
            mine = jnp.where(estimate == middle, part, mine)
        return middle, mine

    numbers = lax.iota(jnp.uint32, -(-size // columns))
    estimates, mine = lax.map(piece, numbers)
    return estimates.reshape(-1)[:size], mine.reshape(-1)[:size]


def median(values: list[jax.Array]) -> jax.Array:
    """Element-wise median of 1, 3 or 5 arrays, by comparisons only."""
    low, high = jnp.minimum, jnp.maximum
    if len(values) == 1:
        return values[0]
    if len(values) == 3:
        a, b, c = values
        return high(low(a, b), low(high(a, b), c))
    # Of any four of the five values, neither the smallest nor the largest can be the
    # median of the five.
    a, b, c, d, e = values
    first = high(low(a, b), low(c, d))
    second = low(high(a, b), high(c, d))
    return median([first, second, e])


def _pieces(flat: jax.Array, columns: int) -> jax.Array:
    count = -(-flat.size // columns)
    return jnp.pad(flat, (0, count * columns - flat.size)).reshape(count, columns)


def _rotate(piece: jax.Array, shift: jax.Array) -> jax.Array:
    """Moves element j of the piece to index ``(j + shift) % C``."""
    columns = piece.shape[0]
    twice = jnp.concatenate([piece, piece])
    return lax.dynamic_slice(twice, (columns - shift,), (columns,))


def _shifts(
    number: jax.Array, rows: int, columns: int, salt: jax.Array
) -> list[jax.Array]:
    return [
        (mix(mix(number + jnp.uint32(r << 24)) ^ salt) % jnp.uint32(columns)).astype(
            jnp.int32
        )
        for r in range(rows)
    ]


def _apply_signs(
    piece: jax.Array, hashes: jax.Array, number: jax.Array, row: int, salt: jax.Array
) -> jax.Array:
    """Multiplies a piece (C,) by its random signs in one row of the sketch.

    The sign is the top bit of a product: the hash of the element's index times an odd
    number that is different for each piece and row. The method is multiply-shift
    hashing (Dietzfelbinger et al., 1997), which needs one product per element.
    """
    odd = mix(mix(number * 8 + jnp.uint32(row)) + salt) | jnp.uint32(1)
    flips = (hashes * odd) & jnp.uint32(0x80000000)
    bits = lax.bitcast_convert_type(piece, jnp.uint32) ^ flips
    return lax.bitcast_convert_type(bits, jnp.float32)


def _hashes(columns: int, salt: jax.Array) -> jax.Array:
    """A hash of each index in a piece, uint32 (C,)."""
    return mix(mix(lax.iota(jnp.uint32, columns)) ^ salt)
