"""A codec that predicts which elements are large, and sends them without indices.

The software part of OSCAR (HPCA 2026, known from its abstract) splits the elements into
probably small and probably large ones. In this codec, every worker computes the split
from the sums of earlier steps, which all workers have received. So no index has to be
sent. Each element has a score, computed from the summed gradients. The elements with
the largest scores are sent as blocks of int8. Of the other elements, a different slice
is sent in each step. A count sketch of them can be sent as well.

In shapes: D elements of the gradient, padding included; k elements that are predicted
to be large; e elements of the slice.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from autopar.compression.codecs.codec import Codec, CodecContext, Reduced, Rounds, State
from autopar.compression.codecs.quantise import Bf16, Dense, Int8
from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.sketch import Sketch
from autopar.compression.codecs.sparse import (
    check_ratio,
    elements_in_share,
    shared_salt,
)
from autopar.compression.codecs.threshold import compact, quantile
from autopar_errors import InputError

Score = Literal["second_moment", "previous"]
Wire = Literal["int8", "bf16", "f32"]

# Decay of the score: after an element was sent ten times, the weight of its old
# gradient in the score has fallen to 1/2.718. Adam's second moment remembers longer.
# But here an element that was not sent for long is large for this reason alone, and a
# long memory would keep its score too high.
_DECAY = 0.9


class PredictedState(NamedTuple):
    """The state of `PredictedTopK`, equal on all workers.

    Attributes:
      score: the expected size of each element, f32 (D,).
      indices: indices of the predicted elements, int32 (k,); unused entries are D or
        more.
      seen: number of steps so far, int32 ().
    """

    score: jax.Array
    indices: jax.Array
    seen: jax.Array


@register_codec
@dataclasses.dataclass(frozen=True)
class PredictedTopK(Codec):
    """Sends the elements that are predicted to be large without their indices, and the
    other elements in turn.

    At first there are no scores. Therefore in the first ``ceil(1 / ratio)`` steps each
    element is sent once, in turn. Later the elements with the largest scores are sent.
    In addition a slice of ``explore * D`` successive elements is sent, which starts in
    each step where it ended in the previous step. So each element is sent at least once
    in ``1 / explore`` steps, and can get a large score again.

    Only elements that are sent get new scores. With error feedback, a sent element is
    the sum of its gradients in all steps since it was last sent. For the score, its
    square is divided by the number of these steps, because the square of a sum of
    independent gradients grows in proportion to their number.

    Attributes:
      ratio: fraction of the elements that are predicted to be large and sent.
      every: steps between two predictions.
      explore: fraction of the elements in the slice; 0: no slice.
      score: how scores are computed: as the running mean square of the summed gradient,
        as in Adam's second moment; or as the last magnitude of the summed gradient.
      values: dtype of the sent values; int8 and bf16 are sent in two shots.
      sketch: size of a count sketch of the other elements, as a fraction of the number
        of elements; 0: no sketch.
      heavy: fraction of the elements that are recovered from the sketch.
    """

    name: ClassVar[str] = "predicted"
    feedback: ClassVar[bool] = True
    ratio: float = 0.05
    every: int = 10
    explore: float = 0.005
    score: Score = "second_moment"
    values: Wire = "int8"
    sketch: float = 0.0
    heavy: float = 0.001

    def __post_init__(self) -> None:
        """Check the values."""
        check_ratio(self, self.ratio)
        for field in ("explore", "sketch"):
            if not 0 <= getattr(self, field) <= 1:
                raise InputError(
                    f"predicted: {field} is a share of the elements, in [0, 1]; got "
                    f"{getattr(self, field)}."
                )
        if self.sketch:
            check_ratio(self, self.heavy, "heavy")
        if self.every < 1:
            raise InputError(
                f"predicted: every counts steps and must be positive, got {self.every}."
            )
        if self.score not in ("second_moment", "previous"):
            raise InputError(
                "predicted: score must be second_moment or previous, got "
                f"{self.score!r}."
            )
        if self.values not in _WIRES:
            raise InputError(
                f"predicted: values must be one of {', '.join(_WIRES)}, got "
                f"{self.values!r}."
            )

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `PredictedState`."""
        del shape, workers
        return PredictedState(
            jnp.zeros(size, jnp.float32),
            jnp.zeros(elements_in_share(self.ratio, size), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`."""
        return cls(ratio=0.05), cls(ratio=0.1)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`; it is the error if the same number of elements were sent without
        any prediction.

        The result is the true error in the first ``ceil(1 / ratio)`` steps, and later
        if the large elements have other indices in each step. With error feedback,
        elements that are not sent grow.
        """
        share = min(1.0, self.ratio + self.explore)
        coded = _WIRES[self.values].error(shape)
        return math.sqrt(1 - share * (1 - coded**2))

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 8.5

    def slice_elements(self, elements: int) -> int:
        """Number of elements of the slice, e."""
        return elements_in_share(self.explore, elements) if self.explore else 0

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        flat = chunks.reshape(-1)
        indices = self._indices(state, context)
        first, window = self._slice(flat.size, state.seen)
        values = flat.at[indices].get(mode="fill", fill_value=0)
        rest = flat.at[indices].set(0.0, mode="drop", unique_indices=True)
        part = lax.dynamic_slice(rest, (first,), (window,))
        inner = dataclasses.replace(context, scatter=False)
        reduced = yield from _dense(
            jnp.concatenate([values, part]), _WIRES[self.values], inner
        )

        def place(numbers: jax.Array) -> jax.Array:
            out = jnp.zeros(flat.size, jnp.float32)
            out = lax.dynamic_update_slice(out, numbers[indices.size :], (first,))
            # An element that is both predicted and in the slice is zero in the slice,
            # so that it is sent once.
            return out.at[indices].add(
                numbers[: indices.size], mode="drop", unique_indices=True
            )

        total, sent = place(reduced.total), place(reduced.sent_array)
        if self.sketch:
            rest = lax.dynamic_update_slice(rest, jnp.zeros(window), (first,))
            extra = yield from self._reduce_by_sketch(rest, chunks.shape, inner)
            total, sent = total + extra.total, sent + extra.sent_array
        state = self._learn(state, indices, first, window, total)
        total = total.reshape(chunks.shape)
        if context.scatter:
            total = jnp.take(total, context.worker, axis=0)
        return Reduced(total, sent.reshape(chunks.shape), state)

    def _reduce_by_sketch(
        self, rest: jax.Array, shape: tuple[int, ...], context: CodecContext
    ) -> Rounds:
        codec = Sketch(ratio=self.sketch, heavy=self.heavy)
        out = yield from codec.reduce(rest.reshape(shape), (), context)
        return Reduced(out.total.reshape(-1), out.sent_array.reshape(-1), ())

    def _turns(self, size: int) -> int:
        """Number of steps at the start in which all elements are sent in turn."""
        return -(-size // elements_in_share(self.ratio, size))

    def _indices(self, state: PredictedState, context: CodecContext) -> jax.Array:
        """Indices of this step's predicted elements, int32 (k,)."""
        size, count = state.score.size, state.indices.size
        turns = self._turns(size)
        slots = lax.iota(jnp.int32, count)

        def in_turn() -> jax.Array:
            index = state.seen * count + slots
            return jnp.where(index < size, index, size + slots)

        def most_probable() -> jax.Array:
            salt = shared_salt(context.step, context.seed, stream=5)
            return largest(state.score, count, salt)

        kind = jnp.where(
            state.seen < turns,
            0,
            jnp.where((state.seen - turns) % self.every == 0, 1, 2),
        )
        return lax.switch(kind, (in_turn, most_probable, lambda: state.indices))

    def _slice(self, size: int, seen: jax.Array) -> tuple[jax.Array, int]:
        """First element and length of a step's slice; the last slice is shorter."""
        window = self.slice_elements(size)
        if not window:
            return jnp.zeros((), jnp.int32), 0
        first = (seen % -(-size // window)) * window
        return jnp.minimum(first, size - window), window

    def _learn(
        self,
        state: PredictedState,
        indices: jax.Array,
        first: jax.Array,
        window: int,
        total: jax.Array,
    ) -> PredictedState:
        """The new state after a step with the sum ``total`` over workers, f32 (D,)."""
        size = state.score.size
        square = jnp.square(total)
        if self.score == "previous":
            square = jnp.abs(total)
        early = state.seen < self._turns(size)
        age = jnp.where(early, state.seen + 1, 1).astype(jnp.float32)
        period = float(-(-size // window)) if window else 1.0
        place = lax.iota(jnp.int32, size)
        explored = (place >= first) & (place < first + window)
        predicted = jnp.zeros(size, bool).at[indices].set(True, mode="drop")
        late = jnp.where(predicted, age, jnp.minimum(period, state.seen + 1.0))
        if self.score == "previous":
            late = jnp.sqrt(late)
        fresh = square / late
        known = (predicted | explored | (total != 0)) & jnp.isfinite(fresh)
        if self.score == "second_moment":
            mean = _DECAY * state.score + (1 - _DECAY) * fresh
            fresh = jnp.where(state.score > 0, mean, fresh)
        score = jnp.where(known, fresh, state.score)
        return PredictedState(score, indices, state.seen + 1)


_WIRES: dict[str, Codec] = {"int8": Int8(), "bf16": Bf16(), "f32": Dense()}


def _dense(values: jax.Array, codec: Codec, context: CodecContext) -> Rounds:
    """Sums a vector (m,) over the workers by a codec for dense gradients."""
    size, n = values.size, context.workers
    chunk = codec.chunk(-(-size // n))
    chunks = jnp.pad(values, (0, n * chunk - size)).reshape(n, chunk)
    inner = dataclasses.replace(context, shape=(size,), size=size)
    state = codec.init((size,), n * chunk, n)
    out = yield from codec.reduce(chunks, state, inner)
    sent = out.sent_array.reshape(-1)[:size]
    return Reduced(out.total.reshape(-1)[:size], sent, ())


def largest(scores: jax.Array, count: int, salt: jax.Array) -> jax.Array:
    """Indices of about the ``count`` largest scores; scores are not negative.

    The function finds a threshold and returns the indices of the scores above it. A
    sample of the scores gives a range for the threshold. Then `_PASSES` bisections find
    the lowest threshold that at most ``count`` scores exceed.

    Args:
      scores: f32 (D,).
      count: the largest number of indices to return, k.
      salt: uint32, decides which elements the sample holds.

    Returns:
      int32 (k,), all different; unused entries are D or more.
    """
    share = count / scores.size
    low = quantile(scores, min(1.0, 1.25 * share), salt)
    high = quantile(scores, max(0.8 * share, 1 / scores.size), salt)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> Any:
        low, high = bounds
        middle = 0.5 * (low + high)
        fits = jnp.sum(scores > middle) <= count
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    _, threshold = lax.fori_loop(0, _PASSES, halve, (low, high))
    # The comparison is >= and not >, so that some of many equal scores are taken.
    return compact((scores >= threshold) & (scores > 0), count, salt)[0]


# The range goes from half to twice the sample's threshold. This number of bisections
# narrows it to 1/256 of its size.
_PASSES = 8
