"""A codec that sends a matrix as two factors of low rank: PowerSGD, arXiv 1905.13727.

In shapes: a gradient reshaped to a matrix M with h rows and w columns, factors P (h, r)
and Q (w, r) of rank r.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compression.codecs.blocks import uniform_at
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    CodecContext,
    Reduced,
    Request,
    Rounds,
    State,
)
from autopar.compression.codecs.quantise import Bf16, Dense, Int8
from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.sparse import shared_salt
from autopar_errors import InputError

# By default, accelerators may compute float32 products with fewer bits. But P must be
# orthonormal in float32, so that the codec's error is M minus its projection.
_PRECISION = lax.Precision.HIGHEST

Values = Literal["f32", "bf16", "int8"]

# The codecs that send the factors. With f32, an all-reduce sends them instead of two
# shots.
_WIRES: dict[str, Codec] = {"f32": Dense(), "bf16": Bf16(), "int8": Int8(block=64)}


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of rows and columns to which a gradient is reshaped.

    The leading dims become rows and the other dims columns, such that the factors have
    the fewest elements.

    >>> matrix_shape((3, 3, 64, 128)), matrix_shape((512, 8, 64))
    ((576, 128), (512, 512))
    """
    splits = [
        (math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))
    ]
    return min(splits, key=sum) if splits else (math.prod(shape), 1)


@register_codec
@dataclasses.dataclass(frozen=True)
class PowerSGD(Codec):
    """PowerSGD: one power iteration in each training step, started from the previous
    step's result.

    Let M be the sum of the gradient over the workers. The codec computes ``P =
    orthonormal(M Q)`` and ``Q' = M^T P``, and decodes ``P Q'^T``, which is the
    projection of M on the columns of P. The products ``M Q`` and ``M^T P`` are linear
    in M, so all-reduces over the workers' products give P and Q'. In f32 these send ``8
    (n - 1) / n * r (h + w)`` bytes. In bf16 the codec sends half of these bytes, in
    int8 a quarter plus the scales, in two shots for each factor. The rounding of P
    changes the subspace slightly. The rounding of Q' counts as a part of this codec's
    error.

    Attributes:
      rank: columns of the factors, r; at most the rank that M can have.
      values: dtype in which the factors are sent; only with f32 is the codec linear.
    """

    name: ClassVar[str] = "powersgd"
    feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    sized: ClassVar[str] = "rank"
    restarts: ClassVar[tuple[str, ...]] = ("rank",)
    rank: int = 4
    values: Values = "f32"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.values not in _WIRES:
            raise InputError(
                f"powersgd: values must be one of {', '.join(_WIRES)}, got "
                f"{self.values!r}."
            )
        if self.rank < 1:
            raise InputError(f"powersgd: rank must be positive, got {self.rank}.")

    @property
    def adjustable(self) -> bool:
        """See `Codec`; false if the codec of the factors works on blocks."""
        return self.values == "f32"

    def amounts(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool
    ) -> dict[str, int]:
        """See `Codec`: columns of the factors."""
        del workers, scatter
        return {"rank": min(self.rank, *matrix_shape(shape))}

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`."""
        return tuple(cls(rank=rank) for rank in (1, 4, 8, 16, 32, 64))

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`.

        The error is a power law in the rank, fitted to relative errors of .93, .65 and
        .45 at ranks of 1/64, 1/16 and 1/8 of the smaller of h and w. These errors were
        measured with error feedback on gradients of a character language model of width
        128. The batches of this model were so small that its gradients are mostly
          noise. With larger
        batches the errors are smaller.
        """
        part = self.rank / max(1, min(matrix_shape(shape)))
        return math.sqrt(1.0 - min(0.95, 1.9 * part**0.42))

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`; it is the cost of three products with a factor, and of making a
        factor orthonormal.
        """
        return 5.8 + 0.33 * self.rank

    def check(self, shape: tuple[int, ...], *, scatter: bool) -> str:
        """See `Codec`."""
        rows, columns = matrix_shape(shape)
        if scatter:
            return (
                "powersgd sends a whole matrix and cannot sum the parts of a "
                "scattered one"
            )
        if min(rows, columns) < 2:
            return f"powersgd needs a matrix; {shape} is a vector"
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) >= rows * columns:
            return (
                f"powersgd of rank {rank} would send {rank * (rows + columns)} "
                f"numbers for the {rows * columns} of {shape}"
            )
        return ""

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """The factor Q to start from, f32 (w, r); zeros stand for a random factor."""
        del size, workers
        rows, columns = matrix_shape(shape)
        return jnp.zeros((columns, min(self.rank, rows, columns)), jnp.float32)

    def extent(self, shape: tuple[int, ...]) -> float:
        """See `Codec`: the number of elements of P and Q together."""
        rows, columns = matrix_shape(shape)
        return float(min(self.rank, rows, columns) * (rows + columns))

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        rows, columns = matrix_shape(context.shape)
        flat = chunks.reshape(-1)
        matrix = flat[: context.size].reshape(rows, columns)
        rank = context.amount("rank", state.shape[1])
        start = _first_columns(_start(state, context, rank), rank)
        summed, _ = yield from self._sum(_dot(matrix, start), context)
        # The result of Householder's QR is orthonormal even if P has fewer than r
        # independent columns. All workers have the same P, so all workers get the same
        # result. Columns of zeros at the end do not change the result for the other
        # columns.
        left = _first_columns(jnp.linalg.qr(summed)[0], rank)
        right, own = yield from self._sum(_dot(matrix.T, left), context)

        def to_chunks(factor: jax.Array) -> jax.Array:
            whole = _dot(left, factor.T).reshape(-1)
            padding = flat.size - context.size
            return jnp.pad(whole, (0, padding)).reshape(chunks.shape)

        return Reduced(to_chunks(right), to_chunks(own), right)

    def _sum(
        self, factor: jax.Array, context: CodecContext
    ) -> Generator[Request, jax.Array, tuple[jax.Array, jax.Array]]:
        """Sums a factor, (m, r), over the workers; also returns this worker's factor as
        other workers decode it.

        The factor is sent column by column. The norms of the columns are the singular
        values, which differ. In this order a block, which has one scale, has elements
        of mostly one column.
        """
        columns = factor.T
        if context.inputs is not None:
            used = context.part(context.inputs["rank"] * factor.shape[0])
            total = yield AllReduce(columns.reshape(-1), used)
            return total.reshape(columns.shape).T, factor
        if self.values == "f32":
            total = yield AllReduce(factor.reshape(-1))
            return total.reshape(factor.shape), factor
        codec, n, size = _WIRES[self.values], context.workers, factor.size
        chunk = codec.chunk(-(-size // n))
        flat = jnp.pad(columns.reshape(-1), (0, n * chunk - size))
        inner = dataclasses.replace(context, shape=(size,), size=size, scatter=False)
        state = codec.init((size,), n * chunk, n)
        out = yield from codec.reduce(flat.reshape(n, chunk), state, inner)

        def whole(parts: jax.Array) -> jax.Array:
            return parts.reshape(-1)[:size].reshape(columns.shape).T

        return whole(out.total), whole(out.sent_array)


def _start(state: jax.Array, context: CodecContext, rank: int | jax.Array) -> jax.Array:
    """The previous step's Q, divided by its largest magnitude; a random factor if Q is
    zero or not finite.

    The first ``rank`` columns of the random factor are the same whatever its number of
    columns.
    """
    salt = shared_salt(context.step, context.seed, stream=3)
    row, column = (lax.broadcasted_iota(jnp.uint32, state.shape, d) for d in (0, 1))
    width = jnp.asarray(rank, jnp.uint32)
    random = uniform_at(row * width + column, salt) - 0.5
    largest = jnp.max(jnp.abs(state))
    usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(usable, state / jnp.where(usable, largest, 1.0), random)


def _first_columns(factor: jax.Array, rank: int | jax.Array) -> jax.Array:
    """A factor whose columns after the first ``rank`` are zero."""
    if isinstance(rank, int):
        return factor
    column = lax.broadcasted_iota(jnp.int32, factor.shape, 1)
    return jnp.where(column < rank, factor, 0.0)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, precision=_PRECISION)
