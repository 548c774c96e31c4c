"""A codec that sends all elements above a threshold that changes little over steps.

Dynamic communication thresholding, arXiv 2010.08899: the threshold is the k-th largest
magnitude of one step, and is used for many steps. In all other steps, the codec only
compares the elements with the threshold, and collects the indices of the larger ones.
For this, the results of 32 comparisons become the bits of one word, and the numbers of
set bits of the words are summed cumulatively. Then, for each of the k outputs,
bisection finds the word that has its element, and five more bisection steps find the
bit in the word. This takes a tenth of the time of a selection by sorting.

In shapes: g groups of m elements, of each of which at most k are sent (k slots), W =
ceil(m / 32) words of bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compression.codecs.codec import Codec, CodecContext, Rounds, State
from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.sparse import (
    VALUE_TYPES,
    Values,
    check_ratio,
    elements_in_share,
    error_without,
    group_size,
    groups,
    send_selected,
    shared_salt,
)
from autopar_errors import InputError

_WORD = 32
# Number of words whose numbers of set bits are summed in one row of a matrix product.
_ROW = 64
# Number of elements of the sample from which a threshold is estimated. If 1 % of all
# elements are to be sent, about 655 elements of the sample exceed the threshold. The
# number of sent elements then deviates by about 4 %.
_SAMPLE = 1 << 16
# In each step the threshold is multiplied by a power of the ratio of elements above it
# to elements that can be sent. This is the exponent of the power. Assume that elements
# are normally distributed. If 1 % of them exceed the threshold, a threshold 1 % higher
# lowers their number by 7 %. If 0.01 % exceed it, their number falls by 16 %. With an
# exponent above 2 / 16, the threshold would therefore oscillate more and more.
_POWER = 0.1
# From one step to the next, the threshold is multiplied or divided by at most this
# factor.
_STEEPEST = 2.0


def exceeding(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """Whether each element must be sent: it is not zero, and not below the threshold.

    NaN is sent, too, so that it shows in the sum and does not stay in the residual.
    """
    return ~(jnp.abs(x) < threshold) & (x != 0)


def compact(
    mask: jax.Array, slots: int, first_word: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Indices of at most ``slots`` True elements of ``mask``.

    Args:
      mask: bool (m,).
      slots: largest number of indices to return, k.
      first_word: uint32, the word from which the search starts. This word decides which
        elements are left out if more than ``slots`` elements are True.

    Returns:
      The indices, int32 (k,), all different, with m or more in unused slots; and the
      number of True elements, int32 ().
    """
    elements = mask.shape[0]
    count = -(-elements // _WORD)
    bits = jnp.pad(mask, (0, count * _WORD - elements)).reshape(_WORD, count)
    words = jnp.zeros(count, jnp.uint32)
    for j in range(_WORD):  # Bit j of word w stands for element j * W + w.
        words = words | (bits[j].astype(jnp.uint32) << j)
    first = (first_word % jnp.uint32(count)).astype(jnp.int32)
    words = jnp.roll(words, -first)
    counts = lax.population_count(words).astype(jnp.int32)
    ends = _cumulative_sums(counts)
    starts = ends - counts
    # The number of each word with set bits is written into the word's first slot, and
    # then copied to the word's other slots.
    marked = jnp.where(counts > 0, starts, slots)
    at = (
        jnp.zeros(slots, jnp.int32)
        .at[marked]
        .max(lax.iota(jnp.int32, count), mode="drop")
    )
    at = lax.cummax(at)
    slot = lax.iota(jnp.int32, slots)
    index = _nth_bit(words[at], slot - starts[at]) * count + (at + first) % count
    indices = jnp.where(slot < ends[-1], index, count * _WORD + slot)
    return indices, ends[-1]


def _cumulative_sums(counts: jax.Array) -> jax.Array:
    """Inclusive cumulative sums of int32 (W,), each at most 32. The function sums first
    within rows of a table, then over the rows.
    """
    rows = -(-counts.size // _ROW)
    table = jnp.pad(counts, (0, rows * _ROW - counts.size)).reshape(rows, _ROW)
    # A product with a matrix that has ones on and above the diagonal is many times
    # faster than a scan. It is exact, because sums up to 2 ** 11 are exact in float32
    # and TF32.
    upper = jnp.triu(jnp.ones((_ROW, _ROW), jnp.float32))
    within = jnp.dot(table.astype(jnp.float32), upper).astype(jnp.int32)
    before = jnp.cumsum(within[:, -1]) - within[:, -1]
    return (within + before[:, None]).reshape(-1)[: counts.size]


def _nth_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Index of the set bit of a word below which there are ``rank`` other set bits."""
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        half = (word >> place.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        below = lax.population_count(half).astype(jnp.int32)
        upper = rank >= below
        rank = jnp.where(upper, rank - below, rank)
        place = jnp.where(upper, place + width, place)
    return place


def kth_largest(x: jax.Array, k: int | jax.Array) -> jax.Array:
    """The k-th largest magnitude of a vector, exactly; NaN counts as the largest.

    The bit patterns of non-negative floats have the same order as the floats. So
    bisection finds the bits of the result one by one: it counts the elements above a
    value 31 times. This is faster than a sort, especially in a branch, where XLA does
    not recognise a partial sort.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)

    def decide(step: int, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 30) >> jnp.uint32(step))
        return jnp.where(jnp.sum(bits >= tried) >= k, tried, found)

    found = lax.fori_loop(0, 31, decide, jnp.uint32(0))
    return lax.bitcast_convert_type(found, jnp.float32)


def quantile(
    x: jax.Array, share: float, key: jax.Array, count: int | jax.Array | None = None
) -> jax.Array:
    """Estimates the magnitude that the fraction ``share`` of the elements exceeds.

    The estimate uses at most 65536 elements at regular distances. ``key`` decides at
    which element they start.

    Args:
      x: the elements.
      share: the fraction of the elements that exceed the result.
      key: uint32, for the choice of the sample.
      count: number of elements of the sample that exceed the result; default: the
        fraction ``share`` of `sample_size`.
    """
    flat = x.reshape(-1)
    stride = -(-flat.size // _SAMPLE)
    if stride > 1:
        rows = flat.size // stride
        offset = key % jnp.uint32(stride)
        columns = flat[: rows * stride].reshape(rows, stride)
        flat = jnp.take(columns, offset.astype(jnp.int32), axis=1)
    if count is None:
        count = elements_in_share(share, flat.size)
    return kth_largest(flat, count)


def sample_size(elements: int) -> int:
    """Number of elements of the sample that `quantile` takes."""
    return elements // max(1, -(-elements // _SAMPLE))


@register_codec
@dataclasses.dataclass(frozen=True)
class Threshold(Codec):
    """Sends all elements above a threshold that is computed anew in every ``every``-th
    step.

    A message has room for the fraction ``ratio`` of the elements. Elements above the
    threshold that do not fit stay in the residual for the next step. In the other steps
    the threshold is corrected by the number of elements that exceed it: ``threshold *=
    (count / room) ** 0.1``, where ``count`` elements exceed it and ``room`` elements
    fit into the message. The codec sends as many bytes as `TopK`. Each worker has its
    own threshold.

    Attributes:
      ratio: fraction of the elements that is sent.
      every: number of steps after which the threshold is computed anew.
      exact: whether the threshold is computed from all elements, and not from a sample.
      values: dtype of the sent values.
    """

    name: ClassVar[str] = "threshold"
    feedback: ClassVar[bool] = True
    sized: ClassVar[str] = "ratio"
    free: ClassVar[tuple[str, ...]] = ("every",)
    ratio: float = 0.01
    every: int = 1000
    exact: bool = False
    values: Values = "bf16"

    def __post_init__(self) -> None:
        """Check the values."""
        check_ratio(self, self.ratio)
        if self.every < 1:
            raise InputError(
                f"threshold: every counts steps and must be positive, got {self.every}."
            )

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`."""
        return cls(ratio=0.01), cls(ratio=0.05)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return error_without(self.ratio)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 8.6

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """The threshold, f32 (); with zero it is computed in the next step."""
        del shape, size, workers
        return jnp.zeros((), jnp.float32)

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return -(-elements // _WORD) * _WORD

    def amounts(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool
    ) -> dict[str, int]:
        """See `Codec`. The amounts are the number of elements that are sent of a group,
        and the number that exceed a newly computed threshold.
        """
        whole = math.prod(shape)
        seen = whole if self.exact else sample_size(whole)
        return {
            "kept": elements_in_share(
                self.ratio, group_size(shape, workers, scatter=scatter)
            ),
            "larger": elements_in_share(self.ratio, seen),
            "every": self.every,
        }

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        x = groups(chunks, context)
        elements = chunks.shape[1] if context.scatter else context.size
        slots = elements_in_share(self.ratio, elements)
        used = context.amount("kept", slots)
        key = shared_salt(context.step, context.seed, stream=2)
        # A threshold of zero or NaN is computed anew.
        stale = (context.step % context.amount("every", self.every) == 0) | ~(state > 0)
        threshold = lax.cond(
            stale, lambda: self._new_threshold(chunks, context, key), lambda: state
        )
        indices, count = jax.vmap(
            lambda row: compact(exceeding(row, threshold), slots, key)
        )(x)
        values = jnp.take_along_axis(x, indices, axis=1, mode="fill", fill_value=0)
        out = yield from send_selected(
            indices, values, chunks, context, VALUE_TYPES[self.values]
        )
        excess = count.sum() / (used * x.shape[0])
        factor = jnp.clip(excess**_POWER, 1 / _STEEPEST, _STEEPEST)
        return dataclasses.replace(out, state=threshold * factor)

    def _new_threshold(
        self, chunks: jax.Array, context: CodecContext, key: jax.Array
    ) -> jax.Array:
        flat = chunks.reshape(-1)
        if not context.scatter:
            flat = flat[: context.size]
        if self.exact:
            larger = context.amount("larger", elements_in_share(self.ratio, flat.size))
            return kth_largest(flat, larger)
        sampled = elements_in_share(self.ratio, sample_size(flat.size))
        return quantile(flat, self.ratio, key, context.amount("larger", sampled))
