"""Makes parameters of codecs inputs of the compiled program, so that a change of them
needs no new compilation.

XLA programs have fixed shapes. So each codec whose parameters may change has a *limit*:
a codec with the same parameters, except that the parameter that decides the message
size is rounded up to a power of two. The program is compiled for messages of the
limit's size, but sends only the part of a message that is used. Gradients that are sent
together share a send buffer (`autopar.compression.exchange`), so bytes that one
gradient does not use are free for another. Only the size of the buffer, its *room*, is
fixed in the program. The room is ``2 ** (-k / 2)`` times the size of the messages of
all limits together, for a whole number k.

If parameters grow F-fold in total, there are at most log2 F limits and 2 log2 F rooms,
whatever the number of gradients and changes. So this bounds the number of compilations.
A room is larger than the messages in it by a factor of 1 to 1.41, on average 1.21.
Rooms in powers of two would halve the number of compilations, but would be larger than
the messages by a factor of up to 2, on average 1.44. The finer sizes are used because
each byte takes time in every training step, and a compilation only once.

>>> from autopar.compression.codecs.registry import parse_codec
>>> limit_of([parse_codec("topk:ratio=0.01"), parse_codec("topk:ratio=0.003")])
TopK(ratio=0.015625, values='bf16')
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from autopar.compression.codecs.codec import Codec, CodecContext, Rounds, State

# Number of different room sizes between a size of messages and its double.
_STEPS = 2
# The smallest room is 2 ** -16 times the size of all limits' messages together.
_SMALLEST = 16 * _STEPS


@dataclasses.dataclass(frozen=True)
class Adjustable(Codec):
    """A codec whose parameters (`Codec.amounts`) are inputs: arrays in its state.

    The state has three fields: ``own`` is the state of the codec itself, ``now`` the
    amounts of this step, and ``last`` the amounts of the previous step.

    Attributes:
      codec: the limit (module docstring).
      room: size of the send buffer, as a fraction of the size of the limits' messages.
    """

    name: ClassVar[str] = "adjustable"
    feedback: ClassVar[bool] = True

    codec: Codec
    room: float = 1.0

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """See `Codec`; the amounts are zero until `set_amounts`."""
        names = self.codec.amounts(shape, workers, scatter=False)
        zeros = {name: jnp.zeros((), jnp.int32) for name in names}
        own = self.codec.init(shape, size, workers)
        return {"own": own, "now": zeros, "last": dict(zeros)}

    def chunk(self, elements: int) -> int:
        """See `Codec`."""
        return self.codec.chunk(elements)

    def extent(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return self.codec.extent(shape)

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return self.codec.error(shape)

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return self.codec.cost(shape)

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        own, now = state["own"], state["now"]
        if names := self.codec.restarts:
            last = state["last"]
            anew = jnp.stack([now[name] != last[name] for name in names]).any()
            begin = self.codec.init(context.shape, chunks.size, context.workers)
            own = jax.tree.map(lambda a, b: jnp.where(anew, a, b), begin, own)
        inner = dataclasses.replace(context, inputs=now, room=self.room)
        out = yield from self.codec.reduce(chunks, own, inner)
        return dataclasses.replace(
            out, state={"own": out.state, "now": now, "last": dict(now)}
        )


def is_adjusted(state: State) -> bool:
    """Whether a state belongs to an `Adjustable`."""
    return isinstance(state, dict) and set(state) == {"own", "now", "last"}


def set_amounts(state: State, amounts: dict[str, Any]) -> State:
    """Sets the amounts in a state of `Adjustable`; they apply from the next step on."""
    return {**state, "now": amounts}


def family_of(codec: Codec) -> Codec | None:
    """The family of a codec: codecs that differ only in parameters that can be inputs.

    A family is represented by the codec with the default values of these parameters.
    None: the codec has no such parameters.
    """
    if not codec.adjustable:
        return None
    fields = {f.name: f.default for f in dataclasses.fields(codec)}
    return dataclasses.replace(
        codec, **{name: fields[name] for name in (codec.sized, *codec.free)}
    )


def limit_of(codecs: Sequence[Codec]) -> Codec:
    """The common limit of codecs of one family (`family_of`)."""
    largest = max(codecs, key=lambda codec: getattr(codec, codec.sized))
    family = family_of(largest)
    assert family is not None
    value = _rounded_up(getattr(largest, largest.sized))
    return dataclasses.replace(family, **{family.sized: value})


@dataclasses.dataclass(frozen=True, slots=True)
class Adjusted:
    """A gradient whose codec has an input of the program as its parameter.

    Attributes:
      codec: codec of the gradient.
      shape: shape of the gradient on one device.
      workers: number of workers.
      scatter: whether each worker needs only its own part of the sum.
    """

    codec: Codec
    shape: tuple[int, ...]
    workers: int
    scatter: bool

    def nbytes(self, codec: Codec) -> list[float]:
        """Bytes of each message of the gradient if ``codec`` sends it."""
        found = codec.messages(self.shape, self.workers, scatter=self.scatter)
        return [message.nbytes for message in found]


def room_for(gradients: Sequence[Adjusted], limit: Codec) -> float:
    """The smallest room for gradients that codecs of one family send together."""
    used = _sums([g.nbytes(g.codec) for g in gradients])
    whole = _sums([g.nbytes(limit) for g in gradients])
    need = max((u / w for u, w in zip(used, whole, strict=True) if w), default=1.0)
    level = min(_SMALLEST, math.floor(-_STEPS * math.log2(need) + 1e-9)) if need else 0
    while level > 0 and not fits(gradients, limit, _room(level)):
        level -= 1
    return _room(max(0, level))


def fits(gradients: Sequence[Adjusted], limit: Codec, room: float) -> bool:
    """Whether the messages of gradients that are sent together fit into a room."""
    used = _sums([g.nbytes(g.codec) for g in gradients])
    there = _sums([g.nbytes(Adjustable(limit, room)) for g in gradients])
    return all(u <= t for u, t in zip(used, there, strict=True))


def _room(level: int) -> float:
    return 2.0 ** (-level / _STEPS)


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def _rounded_up(value: float) -> Any:
    """The smallest power of two from ``value`` on; at most 1 for a fraction."""
    if isinstance(value, int):
        return 1 << (value - 1).bit_length()
    return min(1.0, 2.0 ** math.ceil(math.log2(value) - 1e-9))
