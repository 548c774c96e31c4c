"""Codecs that send every element, in float32 or in bfloat16."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from autopar.compression.codecs.blocks import (
    add_barrier,
    add_rows,
    joined_bytes,
    two_shot,
)
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    CodecContext,
    Reduced,
    ReduceScatter,
    Rounds,
    State,
)
from autopar.compression.codecs.registry import register_codec


@register_codec
@dataclasses.dataclass(frozen=True)
class Dense(Codec):
    """Sends float32 by the backend's own all-reduce, without any error."""

    name: ClassVar[str] = "dense"
    sound: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """See `Codec`: there are none, because gradients without another codec are sent
        by this codec anyway.
        """
        return ()

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 0.0

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 1.7

    @property
    def unit(self) -> int:
        """See `Codec`.

        The unit is large: the errors of gradients that are encoded together are then
        computed by few separate sums.
        """
        return 32

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        if context.scatter:
            total = yield ReduceScatter(chunks)
        else:
            total = (yield AllReduce(chunks.reshape(-1))).reshape(chunks.shape)
        return Reduced(total, chunks, state)


@register_codec
@dataclasses.dataclass(frozen=True)
class Bf16(Codec):
    """Sends bfloat16 in two shots and sums in float32.

    The values are sent as bytes, so that no backend converts them to a wider dtype. The
    sum over n workers is rounded to bfloat16 only once. In a ring all-reduce of
    bfloat16 it would be rounded n times.
    """

    name: ClassVar[str] = "bf16"
    sound: ClassVar[bool] = True

    def error(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 0.0017

    def cost(self, shape: tuple[int, ...]) -> float:
        """See `Codec`."""
        return 7.0

    @property
    def unit(self) -> int:
        """See `Codec`.

        The unit is large: the errors of gradients that are encoded together are then
        computed by few separate sums.
        """
        return 32

    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """See `Codec`."""
        return (yield from two_shot(self, chunks, state, context))

    def encode(self, rows: jax.Array, lengths: jax.Array, salt: jax.Array) -> jax.Array:
        """See `RowCodec`."""
        del lengths, salt
        words = jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
        words = add_barrier(words)
        low, high = words.astype(jnp.uint8), (words >> 8).astype(jnp.uint8)
        # All low bytes of a row come first, then all high bytes. XLA does not vectorise
        # code that interleaves them.
        return jnp.concatenate((low, high), axis=1)

    def decode(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return joined_bytes(payload[:, :elements], payload[:, elements:])

    def decode_sum(self, payload: jax.Array, elements: int) -> jax.Array:
        """See `RowCodec`."""
        return add_rows(self.decode(payload, elements))
