"""Codecs that send few elements: the largest, random ones, or the largest of each
block.

In shapes: n workers, c elements of a chunk, g groups of m elements, k kept elements, B
elements of a block. Elements to send are selected from each group separately. If every
worker needs the whole sum, the whole gradient is one group. If the sum is scattered,
each chunk is a group, because a chunk is then sent only to the worker that owns it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compression.codecs.blocks import mix
from autopar.compression.codecs.codec import (
    AllGather,
    AllReduce,
    AllToAll,
    Codec,
    CodecContext,
    Reduced,
    ReduceScatter,
    Request,
    Rounds,
    State,
)
from autopar.compression.codecs.registry import register_codec
from autopar_errors import InputError

Values = Literal["bf16", "f32"]

# Names of the dtypes in which the values of elements can be sent.
VALUE_TYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "f32": jnp.float32}


def to_bytes(array: jax.Array) -> jax.Array:
    """The bytes of each row: (g, k) of any type -> uint8 (g, b)."""
    if array.dtype == jnp.uint8:
        return array
    return lax.bitcast_convert_type(array, jnp.uint8).reshape(array.shape[0], -1)


def from_bytes(payload: jax.Array, dtype: Any) -> jax.Array:
    """The rows that `to_bytes` wrote: uint8 (g, b) -> (g, k) of ``dtype``."""
    width = jnp.dtype(dtype).itemsize
    if width == 1:
        return payload
    rows = payload.reshape(payload.shape[0], -1, width)
    return lax.bitcast_convert_type(rows, dtype)


def shared_salt(step: jax.Array, seed: int, stream: int = 0) -> jax.Array:
    """A uint32 that all workers share and that is different in every step."""
    first = mix(jnp.uint32((seed * 0x9E3779B1 + stream) & 0xFFFFFFFF))
    return mix(first ^ jnp.asarray(step).astype(jnp.uint32))


def elements_in_share(ratio: float, elements: int) -> int:
    """The number of elements in a fraction of ``elements``, at least one.

    >>> [elements_in_share(*x) for x in ((0.01, 1000), (0.01, 3), (1.0, 3))]
    [10, 1, 3]
    """
    return min(elements, max(1, round(ratio * elements)))


# `_ENERGIES` is the fraction of the squared norm that the largest elements have, for
# each fraction of the elements in `_PARTS`. The values are those of 1e7 heavy-tailed
# samples (Student's t with four degrees of freedom). In gradients of large batches, the
# largest elements have far more of the squared norm: 1 % of the elements have .78 of
# it, and 5 % have .92.
_PARTS = 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0
_ENERGIES = 0.024, 0.075, 0.228, 0.465, 0.612, 0.826, 0.958, 1.0


def error_without(ratio: float) -> float:
    """The norm of what is not sent, divided by the norm of the gradient.

    The largest elements are sent. The norms are those of measured gradients (see
    `_ENERGIES`).

    Args:
      ratio: the fraction of elements that is sent, 0 to 1.
    """
    x = math.log(min(1.0, max(ratio, _PARTS[0])))
    energy = float(np.interp(x, np.log(_PARTS), _ENERGIES))
    return math.sqrt(1.0 - energy)


def group_size(shape: tuple[int, ...], workers: int, *, scatter: bool) -> int:
    """Number of elements of each group, without padding."""
    return math.prod(shape) // (workers if scatter else 1)


def check_ratio(codec: Codec, ratio: float, field: str = "ratio") -> None:
    """Raises `InputError` unless 0 < ``ratio`` <= 1."""
    if not 0 < ratio <= 1:
        raise InputError(
            f"{codec.name}: {field} is the share of the elements that is sent, in "
            f"(0, 1]; got {ratio}."
        )


def groups(chunks: jax.Array, context: CodecContext) -> jax.Array:
    """Arranges chunks (n, c) as groups (g, m), from which elements are selected."""
    return chunks if context.scatter else chunks.reshape(1, -1)


def share(
    payload: jax.Array, context: CodecContext, used: int | jax.Array | None = None
) -> Request:
    """Sends each group's message, uint8 (g, b), to the workers that need it.

    Args:
      payload: the messages.
      context: the step.
      used: number of bytes at the start of each message that are sent; default: all.
    """
    part = None if used is None else context.part(used)
    if context.scatter:
        return AllToAll(payload, part)
    return AllGather(payload[0], part)


def spread(indices: jax.Array, values: jax.Array, elements: int) -> jax.Array:
    """Writes values (g, k) at their indices (g, k) into zeros (g, m).

    A value with an index of m or more (an empty slot) is dropped.
    """

    def row(index: jax.Array, value: jax.Array) -> jax.Array:
        out = jnp.zeros(elements, jnp.float32)
        return out.at[index].set(value, mode="drop", unique_indices=True)

    # All empty slots have the same index. It is out of range, so writes to it are
    # dropped.
    return jax.vmap(row)(indices, values)


def add_all(indices: jax.Array, values: jax.Array, elements: int) -> jax.Array:
    """Sums the elements that n workers sent, indices (n, k) and values (n, k), to (m,).

    The function adds one worker after the other, and the indices of a worker are all
    different. So the sum does not depend on the order in which a device writes.
    """

    def add(total: jax.Array, sent: tuple[jax.Array, jax.Array]) -> Any:
        index, value = sent
        return total.at[index].add(value, mode="drop", unique_indices=True), None

    zeros = jnp.zeros(elements, jnp.float32)
    return lax.scan(add, zeros, (indices, values))[0]


def send_selected(
    indices: jax.Array,
    values: jax.Array,
    chunks: jax.Array,
    context: CodecContext,
    dtype: Any,
) -> Rounds:
    """Sends selected elements with their int32 indices, and sums them over workers.

    Args:
      indices: int32 (g, k), different in each row; m or more for an empty slot.
      values: float32 (g, k).
      chunks: the partial gradient, (n, c).
      context: facts of the step. Its amount ``kept`` is the number of slots that are
        sent.
      dtype: dtype of the sent values.
    """
    elements = groups(chunks, context).shape[1]
    slots = values.shape[1]
    used = context.amount("kept", slots)
    indices = _kept_slots(indices, used, elements)
    coded = values.astype(dtype)
    payload, width = _payload(coded, indices, used)
    answer = yield share(payload, context, used * width)
    values_of, places = _taken_apart(answer, dtype, slots, used)
    places = _kept_slots(places, used, elements)
    total = add_all(places, values_of.astype(jnp.float32), elements)
    sent = spread(indices, coded.astype(jnp.float32), elements)
    if not context.scatter:
        total = total.reshape(chunks.shape)
    return Reduced(total, sent.reshape(chunks.shape), ())


def _kept_slots(indices: jax.Array, used: int | jax.Array, elements: int) -> jax.Array:
    """Indices (g, k), with the index of an empty slot in all slots that are not
    sent.
    """
    if isinstance(used, int):
        return indices
    slot = lax.iota(jnp.int32, indices.shape[1])
    return jnp.where(slot < used, indices, elements)


def _payload(
    coded: jax.Array, indices: jax.Array, used: int | jax.Array
) -> tuple[jax.Array, int]:
    """The bytes to send, first all values and then all indices; and the bytes of a
    slot.
    """
    values, places = to_bytes(coded), to_bytes(indices.astype(jnp.int32))
    width = (values.shape[1] + places.shape[1]) // coded.shape[1]
    if isinstance(used, int):
        return jnp.concatenate([values, places], axis=1), width
    out = jnp.pad(values, ((0, 0), (0, places.shape[1])))
    first = used * jnp.int32(coded.dtype.itemsize)
    return lax.dynamic_update_slice_in_dim(out, places, first, axis=1), width


def _taken_apart(
    answer: jax.Array, dtype: Any, slots: int, used: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Splits the bytes of `_payload` into values and indices. Entries after the sent
    slots are arbitrary.
    """
    item, end = jnp.dtype(dtype).itemsize, answer.shape[1]
    values = from_bytes(answer[:, : slots * item], dtype)
    if isinstance(used, int):
        return values, from_bytes(answer[:, slots * item :], jnp.int32)
    width = end - slots * item
    places = lax.dynamic_slice_in_dim(answer, used * item, width, axis=1)
    return values, from_bytes(places, jnp.int32)


def blocks_of(rows: jax.Array, block: int) -> jax.Array:
    """Arranges chunks (n, c) as blocks in columns (n, B, c' / B), padded with zeros.

    c' is c with padding. Element j of block b is element ``j * c' / B + b`` of the
    chunk. So a reduction over blocks can use vector instructions. Neighbouring
    elements, which are often large together, are in different blocks.
    """
    count = -(-rows.shape[1] // block)
    padding = count * block - rows.shape[1]
    if padding:
        rows = jnp.pad(rows, ((0, 0), (0, padding)))
    return rows.reshape(rows.shape[0], block, count)


def _flat(columns: jax.Array, elements: int) -> jax.Array:
    return columns.reshape(columns.shape[0], -1)[:, :elements]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


@register_codec
@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Sends the largest elements by magnitude, with their indices.

    The codec selects exactly the largest elements of the whole gradient, or of each
    chunk if the sum is scattered. If a value takes v bytes, each worker sends ``(n - 1)
    k (v + 4)`` bytes, or ``(n - 1) k (v + 4) / n`` bytes if the sum is scattered.

    Attributes:
      ratio: fraction of the elements that are sent.
      values: dtype of the sent values.
    """

    name: ClassVar[str] = "topk"
    feedback: ClassVar[bool] = True
    sized: ClassVar[str] = "ratio"
    ratio: float = 0.01
    values: Values = "bf16"

    def __post_init__(self) -> None:
        """Check the values."""
        check_ratio(self, self.ratio)

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`."""
        return cls(ratio=0.01), cls(ratio=0.05)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return error_without(self.ratio)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 20.6

    def amounts(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool
    ) -> dict[str, int]:
        """See `Codec`; the amount is the number of sent elements."""
        return {
            "kept": elements_in_share(
                self.ratio, group_size(shape, workers, scatter=scatter)
            )
        }

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        del state
        x = groups(chunks, context)
        share_of = chunks.shape[1] if context.scatter else context.size
        _, indices = lax.top_k(jnp.abs(x), elements_in_share(self.ratio, share_of))
        values = jnp.take_along_axis(x, indices, axis=1)
        out = yield from send_selected(
            indices, values, chunks, context, VALUE_TYPES[self.values]
        )
        return out


@register_codec
@dataclasses.dataclass(frozen=True)
class RandK(Codec):
    """Sends one random element of each block, the same on all workers.

    All workers compute the index of the element by the same hash, so no indices are
    sent. An all-reduce sums the values; a worker sends ``8 (n - 1) / n * k`` bytes. A
    block has ``round(1 / ratio)`` elements, each of which is chosen with the same
    probability, anew in every step.

    Attributes:
      ratio: fraction of the elements that are sent.
      unbiased: whether the values are multiplied by the size of a block. The expected
        value of the sum is then the exact sum, and no error feedback is used.
    """

    name: ClassVar[str] = "randk"
    feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_ratio(self, self.ratio)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`. The result is the error of leaving out the other elements or,
        with ``unbiased``, the noise of the random choice.
        """
        return math.sqrt(1 / self.ratio - 1 if self.unbiased else 1 - self.ratio)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 6.7

    @property
    def block(self) -> int:
        """Number of elements of a block, B."""
        return round(1 / self.ratio)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return _next_multiple(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        del state
        n, c = chunks.shape
        x = blocks_of(chunks, self.block)
        key = shared_salt(context.step, context.seed, stream=1)
        number = lax.iota(jnp.uint32, n * x.shape[2]).reshape(n, 1, -1)
        place = mix(number ^ key) % jnp.uint32(self.block)
        chosen = lax.broadcasted_iota(jnp.uint32, x.shape, 1) == place
        values = jnp.where(chosen, x, 0.0).sum(axis=1)
        scale = float(self.block) if self.unbiased else 1.0
        if context.scatter:
            row = yield ReduceScatter(values * scale)
            mine = jnp.take(chosen, context.worker, axis=0)
            total = jnp.where(mine, row, 0.0).reshape(-1)[:c]
        else:
            summed = yield AllReduce((values * scale).reshape(-1))
            total = jnp.where(chosen, summed.reshape(n, 1, -1), 0.0)
            total = _flat(total, c)
        sent = chunks if self.unbiased else _flat(jnp.where(chosen, x, 0.0), c)
        return Reduced(total, sent, ())


@register_codec
@dataclasses.dataclass(frozen=True)
class BlockTopK(Codec):
    """Sends the k largest elements of each block, with one-byte indices.

    The selection uses vector instructions and no sort, and the decoding no scatter
    operation. If a value takes v bytes, each worker sends ``(n - 1) ceil(D / B) k (v +
    1)`` bytes, or 1 / n of these bytes if the sum is scattered.

    Attributes:
      k: number of elements that are sent of each block.
      block: number of elements of a block, B, at most 256.
      values: dtype of the sent values.
    """

    name: ClassVar[str] = "blocktopk"
    feedback: ClassVar[bool] = True
    k: int = 1
    block: int = 100
    values: Values = "bf16"

    def __post_init__(self) -> None:
        """Check the values."""
        if not 1 <= self.block <= 256:
            raise InputError(
                f"blocktopk: block must be 1 to 256, for a place is one byte; got "
                f"{self.block}."
            )
        if not 1 <= self.k <= self.block:
            raise InputError(
                f"blocktopk: k must be 1 to block = {self.block}, got {self.k}."
            )

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`. The error is larger than that of `TopK`, because the largest
        elements of each block are not the largest elements of the whole gradient.
        """
        return min(0.99, 1.1 * error_without(self.k / self.block))

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 8.6

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return _next_multiple(elements, self.block)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        del state
        n, c = chunks.shape
        dtype = VALUE_TYPES[self.values]
        x = blocks_of(chunks, self.block)
        places, values = _largest(x, self.k)
        coded = values.astype(dtype)
        payload = jnp.concatenate(
            [to_bytes(coded.reshape(n, -1)), places.reshape(n, -1)], axis=1
        )
        whole = payload if context.scatter else payload.reshape(1, -1)
        answer = yield share(whole, context)
        # The answer has the messages of all workers for the chunks that this worker
        # sums.
        answer = answer.reshape(n, -1, payload.shape[1])
        split = coded.size // n * jnp.dtype(dtype).itemsize
        rows = answer.shape[:2] + coded.shape[1:]
        theirs = from_bytes(answer[..., :split].reshape(n, -1), dtype).reshape(rows)
        at = answer[..., split:].reshape(rows)
        zeros = jnp.zeros((rows[1], *x.shape[1:]), jnp.float32)

        def add(total: jax.Array, message: tuple[jax.Array, jax.Array]) -> Any:
            return total + _expand(*message, self.block), None

        total = _flat(lax.scan(add, zeros, (at, theirs))[0], c)
        sent = _flat(_expand(places, coded, self.block), c)
        return Reduced(total[0] if context.scatter else total, sent, ())


def _largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Indices (uint8) and values of the largest elements of each block, both (n, k,
    blocks).
    """
    size = jnp.abs(x)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    places: list[jax.Array] = []
    for _ in range(k):
        place = jnp.argmax(size, axis=1)[:, None].astype(jnp.int32)
        places.append(place)
        size = jnp.where(row == place, -1.0, size)
    at = jnp.concatenate(places, axis=1)
    return at.astype(jnp.uint8), jnp.take_along_axis(x, at, axis=1)


def _expand(places: jax.Array, values: jax.Array, block: int) -> jax.Array:
    """Writes values (n, k, blocks) at their indices into zeros (n, B, blocks)."""
    n, k, count = places.shape
    row = lax.broadcasted_iota(jnp.uint8, (n, block, count), 1)
    out = jnp.zeros((n, block, count), jnp.float32)
    for i in range(k):
        value = values[:, i : i + 1].astype(jnp.float32)
        out = jnp.where(row == places[:, i : i + 1], value, out)
    return out
