"""Codecs whose parameters are inputs of the program: changing them compiles none.

XLA programs have fixed shapes, so such a codec works with a *limit*: itself with the
parameter that decides how much is sent rounded up to a power of two. Of its message
only the part that counts travels. Messages of one bucket share their room
(`autopar.compression.exchange`), so what one gradient saves another can use, and only
their sum has a size that is fixed: a *room* of ``2 ** (-k / 2)`` of all the limits.

With n changes of parameters that grow F-fold in all there are at most log2 F limits and
2 log2 F rooms, whatever the number of gradients. A room is larger than what it holds by
a factor of 1 to 1.41, 1.21 on average over all sizes; with powers of two it would be up
to 2, and 1.44 on average, to save half of those compilations. Bytes are paid for in
every step, a compilation once, so rooms have the finer steps.

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

# Rooms by which sizes differ by a factor of two.
_STEPS = 2
# The smallest room is a part of 2 ** -16.
_SMALLEST = 16 * _STEPS


@dataclasses.dataclass(frozen=True)
class Adjustable(Codec):
    """A codec whose amounts (`Codec.amounts`) are arrays in its state.

    Its state has ``own``, that of the codec, ``now``, the amounts, and ``last``, those
    of the step before.

    Attributes:
      codec: the limit.
      room: part of the limit's messages that there is room for.
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
    """Whether a state is that of an `Adjustable`."""
    return isinstance(state, dict) and set(state) == {"own", "now", "last"}


def set_amounts(state: State, amounts: dict[str, Any]) -> State:
    """A state of `Adjustable` with other amounts from the next step on."""
    return {**state, "now": amounts}


def family_of(codec: Codec) -> Codec | None:
    """What codecs share that differ in inputs alone; None: it can have none."""
    if not codec.adjustable:
        return None
    fields = {f.name: f.default for f in dataclasses.fields(codec)}
    return dataclasses.replace(
        codec, **{name: fields[name] for name in (codec.sized, *codec.free)}
    )


def limit_of(codecs: Sequence[Codec]) -> Codec:
    """The limit of some codecs of one family."""
    largest = max(codecs, key=lambda codec: getattr(codec, codec.sized))
    family = family_of(largest)
    assert family is not None
    value = _rounded_up(getattr(largest, largest.sized))
    return dataclasses.replace(family, **{family.sized: value})


@dataclasses.dataclass(frozen=True, slots=True)
class Adjusted:
    """A gradient of which an amount is an input.

    Attributes:
      codec: its codec.
      shape: of the gradient on one device.
      workers: number of workers.
      scatter: whether each worker needs only its part of the sum.
    """

    codec: Codec
    shape: tuple[int, ...]
    workers: int
    scatter: bool

    def nbytes(self, codec: Codec) -> list[float]:
        """Bytes of each message, by another codec."""
        found = codec.messages(self.shape, self.workers, scatter=self.scatter)
        return [message.nbytes for message in found]


def room_for(gradients: Sequence[Adjusted], limit: Codec) -> float:
    """The smallest room in which gradients that travel together fit, one family's."""
    used = _sums([g.nbytes(g.codec) for g in gradients])
    whole = _sums([g.nbytes(limit) for g in gradients])
    need = max((u / w for u, w in zip(used, whole, strict=True) if w), default=1.0)
    level = min(_SMALLEST, math.floor(-_STEPS * math.log2(need) + 1e-9)) if need else 0
    while level > 0 and not fits(gradients, limit, _room(level)):
        level -= 1
    return _room(max(0, level))


def fits(gradients: Sequence[Adjusted], limit: Codec, room: float) -> bool:
    """Whether gradients that travel together fit into a room."""
    used = _sums([g.nbytes(g.codec) for g in gradients])
    there = _sums([g.nbytes(Adjustable(limit, room)) for g in gradients])
    return all(u <= t for u, t in zip(used, there, strict=True))


def _room(level: int) -> float:
    return 2.0 ** (-level / _STEPS)


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def _rounded_up(value: float) -> Any:
    """The next power of two; of shares one at most."""
    if isinstance(value, int):
        return 1 << (value - 1).bit_length()
    return min(1.0, 2.0 ** math.ceil(math.log2(value) - 1e-9))
