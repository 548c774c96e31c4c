"""Runs the rounds of many codecs in step, one collective for each kind of request."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.compression import packing
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
)
from autopar_errors import InputTypeError
from autopar_passes.audit.collectives import sent_ratio


class Links(Protocol):
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
        """See `Links`."""
        return jax.lax.all_to_all(payload, self.axes, 0, 0, tiled=True)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """See `Links`."""
        return jax.lax.all_gather(payload, self.axes, axis=0, tiled=False)

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """See `Links`."""
        return jax.lax.psum(values, self.axes)

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """See `Links`."""
        out = jax.lax.psum_scatter(values, self.axes, scatter_dimension=0, tiled=True)
        return out.reshape(values.shape[1:])


def exchange(rounds: Sequence[Rounds], links: Links) -> list[Reduced]:
    """Runs generators in step until all have returned.

    Requests of one kind that are made in the same round travel together.
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
    asked: dict[int, Request], links: Links, count: int
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
        whole = collective(packing.packed(arrays, parts))
        for k, answer in zip(
            members, packing.taken_apart(whole, arrays, parts), strict=True
        ):
            answers[k] = answer
    return answers


def _content(request: Request) -> jax.Array:
    match request:
        case AllToAll() | AllGather():
            if request.payload.dtype != jnp.uint8:
                raise InputTypeError(
                    f"a payload must be uint8, not {request.payload.dtype}"
                )
            return request.payload
        case AllReduce() | ReduceScatter():
            return request.values


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """The message of one gradient in one collective.

    Attributes:
      kind: ``all_to_all``, ``all_gather``, ``all_reduce`` or ``reduce_scatter``.
      nbytes: its size: of the whole result of an all-gather, of the operand on one
        device of the others.
      sent: bytes that one worker sends, `sent_ratio` times the size.
    """

    kind: str
    nbytes: float
    sent: float


@dataclasses.dataclass(slots=True)
class _Recorder:
    """Stands for links and records what is asked of them."""

    workers: int
    messages: list[Message] = dataclasses.field(default_factory=list[Message])

    def _record(self, kind: str, nbytes: float) -> None:
        sent = sent_ratio(kind, self.workers) * nbytes
        self.messages.append(Message(kind, nbytes, sent))

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        self._record("all_to_all", payload.size)
        return payload

    def all_gather(self, payload: jax.Array) -> jax.Array:
        self._record("all_gather", payload.size * self.workers)
        return jnp.broadcast_to(payload, (self.workers, *payload.shape))

    def all_reduce(self, values: jax.Array) -> jax.Array:
        self._record("all_reduce", 4.0 * values.size)
        return values

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        self._record("reduce_scatter", 4.0 * values.size)
        return values[0]


@functools.lru_cache(maxsize=1 << 14)
def codec_messages(
    codec: Codec, shape: tuple[int, ...], workers: int, *, scatter: bool = False
) -> tuple[Message, ...]:
    """The messages of a codec for one gradient, one a round.

    The codec's generator is run on abstract values, so this is what is sent.

    Args:
      codec: the codec.
      shape: of the gradient on one device.
      workers: number of workers, n.
      scatter: whether each worker needs only its part of the sum.
    """
    size = math.prod(shape)
    if not size:
        return ()
    recorder = _Recorder(workers)
    chunk = chunk_elements(codec, size, workers, scatter=scatter)

    def run(chunks: Any, state: Any, worker: Any) -> Any:
        context = CodecContext(workers, worker, worker, 0, shape, size, scatter)
        reduced = exchange([codec.reduce(chunks, state, context)], recorder)[0]
        return reduced.total

    jax.eval_shape(
        run,
        jax.ShapeDtypeStruct((workers, chunk), jnp.float32),
        jax.eval_shape(lambda: codec.init(shape, workers * chunk, workers)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return tuple(recorder.messages)


# Rows for each worker and columns of the gradient that estimates start from: wide
# enough that blocks and padding weigh as little as in most gradients.
_ROWS, _COLUMNS = 64, 1024


def example_messages(
    codec: Codec, workers: int, *, scatter: bool = False
) -> tuple[tuple[Message, ...], float]:
    """The messages of a gradient of 1024 columns, and its `Codec.extent`.

    Those of any other are nearly in proportion to its extent, which spares running
    the codec on every shape.

    Args:
      codec: the codec.
      workers: number of workers, n.
      scatter: whether each worker needs only its part of the sum.
    """
    shape = (_ROWS * workers, _COLUMNS)
    return codec_messages(codec, shape, workers, scatter=scatter), codec.extent(shape)


def wire_cost(
    codec: Codec, shape: tuple[int, ...], workers: int, *, scatter: bool = False
) -> tuple[float, int]:
    """Bytes that one worker sends for a gradient, and in how many rounds."""
    found = codec_messages(codec, shape, workers, scatter=scatter)
    return sum(m.sent for m in found), len(found)


def wire_bytes(
    codec: Codec, shape: tuple[int, ...], workers: int, *, scatter: bool = False
) -> float:
    """Bytes that one worker sends for a gradient; see `codec_messages`."""
    return wire_cost(codec, shape, workers, scatter=scatter)[0]


def chunk_elements(codec: Codec, size: int, workers: int, *, scatter: bool) -> int:
    """Elements of one of the chunks that a gradient is cut into."""
    if scatter:
        return size // workers
    return codec.chunk(max(1, -(-size // workers)))
