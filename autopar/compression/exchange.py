"""Runs many codecs together, so that their messages need few collectives.

A codec describes the communication of one gradient as a generator. In each round the
generator yields a request, such as `AllReduce`, and receives the answer. `exchange`
runs the generators of many gradients together. All requests of the same kind in a round
become one collective.

An input of the program may decide how many elements of a request are sent (`UsedPart`).
The positions of such requests in the collective's message are then computed while the
step runs. The message has a fixed size for all of them together. So one request may use
more bytes if another uses fewer.

In shapes: n workers, c elements of one chunk (the part of a gradient that one worker
sums), b bytes of one message.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from autopar_passes.audit.partitioned import sent_ratio

# A codec's state: a pytree of arrays, each of which is local to one device.
State = Any


@dataclasses.dataclass(frozen=True, slots=True)
class UsedPart:
    """How many elements of a request are sent, if an input of the program decides it.

    The used elements come first in the request, and only they are sent (`_pack`). In
    the answer, zeros follow them.

    Attributes:
      used: number of used elements along the last dim, an int32 scalar, equal on all
        workers.
      room: the fraction of the last dim for which the message reserves space. All
        requests in a message share the reserved space.
    """

    used: jax.Array
    room: float


@dataclasses.dataclass(frozen=True, slots=True)
class AllToAll:
    """Sends row i of ``payload``, uint8 (n, b), to worker i; the answer is (n, b)."""

    payload: jax.Array
    part: UsedPart | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllGather:
    """Sends ``payload``, uint8 (b,), to all workers; the answer is (n, b)."""

    payload: jax.Array
    part: UsedPart | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums ``values``, float32 (k,), over the workers; the answer is (k,)."""

    values: jax.Array
    part: UsedPart | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Sums ``values``, float32 (n, c), over the workers; the answer is this worker's
    row, (c,).
    """

    values: jax.Array
    part: UsedPart | None = None


Request = AllToAll | AllGather | AllReduce | ReduceScatter


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a codec for one gradient.

    Attributes:
      total: the decoded sum over all workers, (n, c), bit-identical on all workers; if
        the sum is scattered, only this worker's row, (c,).
      sent: this worker's gradient as other workers decode it, (n, c). The error of
        sending is ``chunks - sent``. ``sent`` may also be a function that computes this
        array from data in memory; a step that needs no error does not call it.
      state: the codec's new state.
      again: a function that computes the total again from data in memory, for a branch
        that few steps take; None: such a branch reads ``total``.
    """

    total: jax.Array
    sent: jax.Array | Callable[[], jax.Array]
    state: State
    again: Callable[[], jax.Array] | None = None

    @property
    def sent_array(self) -> jax.Array:
        """``sent`` as an array."""
        return self.sent() if callable(self.sent) else self.sent

    understood = sent_array  # the old name, kept for one release


Rounds = Generator[Request, jax.Array, Reduced]


class WorkerLinks(Protocol):
    """The collectives over a group of workers."""

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        ...

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """uint8 (n, b) -> (n, b)."""
        ...

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """uint8 (b,) -> (n, b)."""
        ...

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """float32 (k,) -> (k,)."""
        ...

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """float32 (n, c) -> (c,)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class MeshLinks:
    """Collectives over mesh axes, inside a fully manual `jax.shard_map`."""

    axes: tuple[str, ...]
    workers: int

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        return jax.lax.all_to_all(payload, self.axes, 0, 0, tiled=True)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        return jax.lax.all_gather(payload, self.axes, axis=0, tiled=False)

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        return jax.lax.psum(values, self.axes)

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        out = jax.lax.psum_scatter(values, self.axes, scatter_dimension=0, tiled=True)
        return out.reshape(values.shape[1:])


def exchange(rounds: Sequence[Rounds], links: WorkerLinks) -> list[Reduced]:
    """Runs all generators round by round until all have returned.

    All requests of the same kind in a round share one collective.
    """
    out: list[Reduced | None] = [None] * len(rounds)
    answers: list[jax.Array | None] = [None] * len(rounds)
    running = list(range(len(rounds)))
    while running:
        asked: dict[int, Request] = {}
        for k in running:
            try:
                answer = answers[k]
                generator = rounds[k]
                asked[k] = next(generator) if answer is None else generator.send(answer)
            except StopIteration as stop:
                out[k] = stop.value
        answers = _answer(asked, links, len(rounds))
        running = list(asked)
    assert all(r is not None for r in out)
    return [r for r in out if r is not None]


def _answer(
    asked: dict[int, Request], links: WorkerLinks, count: int
) -> list[jax.Array | None]:
    answers: list[jax.Array | None] = [None] * count
    kinds: tuple[tuple[type[Any], Callable[[Any], jax.Array]], ...] = (
        (AllToAll, links.all_to_all),
        (AllGather, links.all_gather),
        (AllReduce, links.all_reduce),
        (ReduceScatter, links.reduce_scatter),
    )
    for kind, collective in kinds:
        members = [k for k, request in asked.items() if type(request) is kind]
        if not members:
            continue
        members.sort(key=lambda k: asked[k].part is not None)
        arrays = [_content(asked[k]) for k in members]
        parts = [asked[k].part for k in members]
        whole = collective(_pack(arrays, parts))
        for k, answer in zip(members, _taken_apart(whole, arrays, parts), strict=True):
            answers[k] = answer
    return answers


def _content(request: Request) -> jax.Array:
    match request:
        case AllToAll() | AllGather():
            return request.payload
        case AllReduce() | ReduceScatter():
            return request.values


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What one gradient sends in one collective.

    Attributes:
      kind: ``all_to_all``, ``all_gather``, ``all_reduce`` or ``reduce_scatter``.
      nbytes: bytes of the whole result for an all-gather; for other kinds, bytes of the
        operand on one device.
      sent: bytes that one worker sends: ``nbytes`` times `sent_ratio`.
    """

    kind: str
    nbytes: float
    sent: float


@dataclasses.dataclass(slots=True)
class RecordingLinks:
    """Records messages and sends nothing; answers as if all workers held the same
    values.

    Attributes:
      workers: number of workers.
      messages: the messages so far, one for each collective.
    """

    workers: int
    messages: list[Message] = dataclasses.field(default_factory=list[Message])

    def _record(self, kind: str, nbytes: float) -> None:
        sent = sent_ratio(kind, self.workers) * nbytes
        self.messages.append(Message(kind, nbytes, sent))

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """See `WorkerLinks`. This method answers as if this worker were the first one,
        which gets the first row of every worker.
        """
        self._record("all_to_all", payload.size)
        return jnp.broadcast_to(payload[0], payload.shape)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        self._record("all_gather", payload.size * self.workers)
        return jnp.broadcast_to(payload, (self.workers, *payload.shape))

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        self._record("all_reduce", 4.0 * values.size)
        return values * self.workers

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """See `WorkerLinks`."""
        self._record("reduce_scatter", 4.0 * values.size)
        return values[0] * self.workers


Parts = Sequence[UsedPart | None]


def _room_of(elements: int, room: float) -> int:
    """Number of elements for which a message reserves space for a request."""
    return min(elements, math.ceil(elements * room))


def _pack(arrays: Sequence[jax.Array], parts: Parts) -> jax.Array:
    """Joins requests (..., b) to one message; those that are sent whole come first.

    Args:
      arrays: the requests; those with a `UsedPart` come last.
      parts: the `UsedPart` of each request; None for a fully used request.
    """
    count = parts.count(None)
    out = list(arrays[:count])
    given = [part for part in parts if part is not None]
    if given:
        out.append(_behind_each_other(arrays[count:], given))
    return jnp.concatenate(out, axis=-1)


def _taken_apart(
    whole: jax.Array, arrays: Sequence[jax.Array], parts: Parts
) -> list[jax.Array]:
    """Splits the answer to a message of `_pack` into answers (..., b), with zeros after
    the used elements.

    Args:
      whole: the answer to all requests together; it has the same last dim as the
        message.
      arrays: the requests.
      parts: used part of each request.
    """
    count = parts.count(None)
    ends = list(itertools.accumulate(a.shape[-1] for a in arrays[:count]))
    *answers, rest = jnp.split(whole, ends, axis=-1)
    given = [part for part in parts if part is not None]
    if not given:
        return answers
    widths = [a.shape[-1] for a in arrays[count:]]
    padding = [(0, 0)] * (rest.ndim - 1) + [(0, max(widths))]
    rest = jnp.pad(rest, padding)
    for width, first, part in zip(widths, _firsts(given), given, strict=True):
        values = lax.dynamic_slice_in_dim(rest, first, width, axis=-1)
        counts = lax.iota(jnp.int32, width) < part.used
        answers.append(jnp.where(counts, values, jnp.zeros((), values.dtype)))
    return answers


def _behind_each_other(
    arrays: Sequence[jax.Array], parts: Sequence[UsedPart]
) -> jax.Array:
    """Writes the sent elements of requests one after the other into shared space."""
    widths = [a.shape[-1] for a in arrays]
    room = sum(_room_of(w, p.room) for w, p in zip(widths, parts, strict=True))
    # Each request is written whole. The next request overwrites the elements that are
    # not sent; those of the last request are cut off.
    shape = (*arrays[0].shape[:-1], room + max(widths))
    out = jnp.zeros(shape, arrays[0].dtype)
    for array, first in zip(arrays, _firsts(parts), strict=True):
        out = lax.dynamic_update_slice_in_dim(out, array, first, axis=-1)
    return out[..., :room]


def _firsts(parts: Sequence[UsedPart]) -> list[jax.Array]:
    """For each request, its first position in the shared space, as int32 scalars."""
    used = [part.used for part in parts]
    return list(itertools.accumulate(used[:-1], initial=jnp.int32(0)))
