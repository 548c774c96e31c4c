"""Tests that a user's codec is priced and chosen by its own figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.compression.codecs import registry
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    Reduced,
    ReduceScatter,
)
from autopar.compression.codecs.quantise import Int4, Int8
from autopar.compression.codecs.registry import (
    codec_names,
    offered_codecs,
    parse_codec,
    register_codec,
)
from autopar.compression.codecs.trial import try_codec

SHAPE = (2048, 2048)


@dataclasses.dataclass(frozen=True)
class Copy(Int8):
    """Int8 by another name."""

    name = "copy"


@dataclasses.dataclass(frozen=True)
class Coarse(Int8):
    """An int8 codec with a larger error, which it does not state."""

    name = "coarse"

    def encode(self, rows: Any, lengths: Any, salt: Any) -> Any:
        large = jnp.where(jnp.abs(rows) > 1.0, rows, 0.0)
        return super().encode(large, lengths, salt)


@dataclasses.dataclass(frozen=True)
class Alternate(Codec):
    """Sends the elements of ``parts`` in turn; the state is the index of the next
    element.
    """

    name: ClassVar[str] = "alternate"
    feedback: ClassVar[bool] = True
    parts: int = 2

    def init(self, shape: Any, size: int, workers: int) -> Any:
        return jnp.zeros((), jnp.int32)

    def chunk(self, elements: int) -> int:
        return -(-elements // self.parts) * self.parts

    def reduce(self, chunks: Any, state: Any, context: Any) -> Any:
        mine = jnp.arange(chunks.shape[1]) % self.parts == state % self.parts
        rows = chunks.reshape(*chunks.shape[:1], -1, self.parts)
        own = jnp.take(rows, state % self.parts, axis=2)
        if context.scatter:
            total = yield ReduceScatter(own)
        else:
            total = (yield AllReduce(own.reshape(-1))).reshape(own.shape)
        spread = jnp.repeat(total, self.parts, axis=-1)
        sent = jnp.where(mine, chunks, 0.0)
        return Reduced(jnp.where(mine, spread, 0.0), sent, state + 1)


@dataclasses.dataclass(frozen=True)
class Wrapper(Codec):
    """Delegates to another codec, given as text."""

    name: ClassVar[str] = "wrapper"
    inner: str = "int8"

    @property
    def own(self) -> Codec:
        return parse_codec(self.inner)

    def init(self, shape: Any, size: int, workers: int) -> Any:
        return self.own.init(shape, size, workers)

    def chunk(self, elements: int) -> int:
        return self.own.chunk(elements)

    def reduce(self, chunks: Any, state: Any, context: Any) -> Any:
        return (yield from self.own.reduce(chunks, state, context))


@dataclasses.dataclass(frozen=True)
class Stated(Int4):
    """A codec that states its own figures and choices."""

    name = "stated"
    bits: int = 4

    @classmethod
    def choices(cls) -> tuple[Stated, ...]:
        return cls(), cls(bits=2)

    def error(self, shape: tuple[int, ...]) -> float:
        return 0.001 * self.bits

    def cost(self, shape: tuple[int, ...]) -> float:
        return 0.1 * self.bits


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    codec_names()
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))
    parse_codec.cache_clear()
    for cls in (Copy, Coarse, Alternate, Wrapper):
        register_codec(cls)
    yield
    parse_codec.cache_clear()


def planned(compression: str, **options: Any) -> autopar.Plan:
    def step(p: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(p)
        return p - grad, loss

    return autopar.plan(
        step,
        jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        jax.ShapeDtypeStruct((65536, SHAPE[0]), jnp.float32),
        cluster="4x1:a100,network=1Gb/s",
        axis_names=("data",),
        pins={"x": PartitionSpec("data"), "p": PartitionSpec()},
        compression=compression,
        **options,
    )


def test_a_copy_has_the_figures_of_what_it_copies() -> None:
    own, copy = parse_codec("int8"), parse_codec("copy")
    assert copy.error(SHAPE) == own.error(SHAPE)
    assert parse_codec("copy:block=32").error(SHAPE) < own.error(SHAPE)
    (gradient,) = planned("int8").gradients
    made = planned("copy")
    assert made.gradients[0].error == gradient.error
    assert made.predicted.step_s == planned("int8").predicted.step_s
    assert {"copy", "alternate", "wrapper"} < set(offered_codecs())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coarse", None),
        ("alternate", math.sqrt(1 / 2)),
        ("alternate:parts=4", math.sqrt(3 / 4)),
        ("wrapper", "int8"),
        ("wrapper:inner=int4", "int4"),
    ],
)
def test_what_nobody_states_is_measured(text: str, expected: Any) -> None:
    error = parse_codec(text).error(SHAPE)
    if expected is None:
        assert 0.1 < error < 0.9
    else:
        if isinstance(expected, str):
            expected = parse_codec(expected).error(SHAPE)
        assert error == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("text", ["bf16", "int8", "sign", "topk", "randk", "powersgd"])
def test_work_that_nobody_states_is_about_what_was_measured(text: str) -> None:
    codec = parse_codec(text)
    assert 0.5 < Codec.cost(codec, SHAPE) / codec.cost(SHAPE) < 2.5


def test_auto_takes_the_codec_that_is_best_by_its_own_figures() -> None:
    others = {g.codec for g in planned("auto").gradients}
    register_codec(Stated)
    (gradient,) = planned("auto").gradients
    assert others.isdisjoint({"stated", "stated:bits=2"})
    assert gradient.codec == "stated:bits=2"
    assert gradient.error == 0.002


def test_auto_leaves_a_codec_that_loses_too_much() -> None:
    """Of equal bytes and work, within a budget that coarse exceeds."""
    (gradient,) = planned("auto", error_budget=0.02).gradients
    assert gradient.codec in ("int8", "copy", "wrapper")


def test_a_codec_that_makes_infinities_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True)
    class Broken(Codec):
        name = "broken"

        def reduce(self, chunks: Any, state: Any, context: Any) -> Any:
            total = yield AllReduce(chunks.reshape(-1) / 0.0)
            return Reduced(total.reshape(chunks.shape), chunks, state)

    register_codec(Broken)
    with pytest.raises(autopar.AutoparError, match=r"Broken: .* is not finite; state"):
        planned("broken")


@dataclasses.dataclass(frozen=True)
class Mistaken(Codec):
    """A codec with one of several mistakes, chosen by name; without a name it is
    correct.
    """

    name: ClassVar[str] = "mistaken"
    what: str = ""

    def reduce(self, chunks: Any, state: Any, context: Any) -> Any:
        if self.what == "bf16":
            chunks = chunks.astype(jnp.bfloat16).astype(jnp.float32)
        flat = chunks.reshape(-1)
        if self.what == "no_yield":
            return Reduced(chunks, chunks, state)
        return self.rounds(chunks, flat, state, context)

    def rounds(self, chunks: Any, flat: Any, state: Any, context: Any) -> Any:
        if self.what == "rank":
            flat = (yield AllReduce(chunks)).reshape(-1)
        elif self.what == "yielded":
            flat = yield flat
        elif self.what == "branch":
            flat = flat if context.step > 3 else -flat
        elif context.scatter:
            total = yield ReduceScatter(chunks)
            return Reduced(total, chunks, state)
        total = (yield AllReduce(flat)).reshape(chunks.shape)
        if self.what == "returned":
            return total
        if self.what == "flat":
            return Reduced(total.reshape(-1), chunks, state)
        if self.what == "half":
            return Reduced(total / 2, chunks, state)
        if self.what == "short":
            return Reduced(total, chunks[:, 1:], state)
        if self.what == "state":
            return Reduced(total, chunks, context.step)
        if self.what == "differs":
            return Reduced(total + context.worker, chunks, state)
        return Reduced(total, chunks, state)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no_yield", "has no `yield`, and returns a Reduced"),
        ("rank", "AllReduce(values) takes float32 of shape (k,), got float32 of shape"),
        ("yielded", "yields float32 of shape"),
        ("returned", "returns float32 of shape"),
        ("flat", "Reduced.total must have the shape"),
        ("short", "Reduced.sent must have the shape"),
        ("state", "Reduced.state is int32 of shape ()"),
        ("branch", "reduce fails at"),
    ],
)
def test_a_mistake_is_found_as_a_step_is_planned(what: str, says: str) -> None:
    """One line, which names the codec and the gradient."""
    register_codec(Mistaken)
    with pytest.raises(autopar.AutoparError) as raised:
        planned(f"mistaken:what={what}")
    (line,) = str(raised.value).splitlines()
    assert "codec 'mistaken', gradient 'p' of shape" in line
    assert says in line


def test_a_total_that_differs_between_workers_is_found() -> None:
    register_codec(Mistaken)
    with pytest.raises(autopar.AutoparError, match="worker 1 differs from"):
        try_codec("mistaken:what=differs", (8, 8))
    with pytest.raises(autopar.AutoparError, match="not the sum of"):
        try_codec("mistaken:what=half", (8, 8))
    good = try_codec("mistaken", (8, 8))
    assert good.error == 0
    assert good.total_error < 1e-6
    rounded = Mistaken("bf16")
    assert try_codec(rounded, (64, 64)).error == pytest.approx(1.66e-3, rel=0.02)
    assert rounded.error((64, 64)) == pytest.approx(1.66e-3, rel=0.02)
    assert good.wire_bytes == good.dense_bytes
    turns = try_codec("alternate", (8, 8), steps=20)
    assert turns.error > 0.5
    assert turns.sum_error < turns.error


@pytest.mark.parametrize("text", ["int8", "alternate", "wrapper", "predicted"])
def test_a_scattered_sum_is_tried(text: str) -> None:
    """The same is sent of each gradient; no second shot brings the sum to all."""
    whole = try_codec(text, (16, 64), steps=4)
    parts = try_codec(text, (16, 64), steps=4, scatter=True)
    assert parts.error == pytest.approx(whole.error)
    assert parts.sum_error <= whole.sum_error
    assert parts.dense_bytes == whole.dense_bytes / 2
    with pytest.raises(autopar.AutoparError, match="15 rows have no 4 equal parts"):
        try_codec(text, (15, 64), scatter=True)
