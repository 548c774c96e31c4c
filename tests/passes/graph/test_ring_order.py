"""Tests which values of a step may have their tokens in the order of a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.ring_order import (
    RingOrder,
    from_ring,
    ring_order,
    to_ring,
)
from autopar_passes.program.trace import TracedStep, trace
from autopar_passes.rules.factor_rule import worker

ROWS, SEQ, HEADS, DIM, WORDS = 2, 64, 4, 16, 32
WIDTH = HEADS * DIM
Mix = Callable[[Any, jax.Array], jax.Array]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_device_gets_the_chunks_that_it_works_on(devices: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = 2 * devices * 5
    x = np.arange(np.prod(shape)).reshape(shape)

    made = to_ring(jnp.asarray(x), dim, devices)

    chunks = np.split(x, 2 * devices, dim)
    for device, shard in enumerate(np.split(made, devices, dim)):
        own = [c for k, c in enumerate(chunks) if worker(k, devices) == device]
        np.testing.assert_array_equal(shard, np.concatenate(own, dim))
    np.testing.assert_array_equal(from_ring(made, dim, devices), x)


def attention(p: Any, x: jax.Array, *, causal: bool = True) -> jax.Array:
    q, k, v = jnp.split((x @ p["in"]).reshape(*x.shape[:2], 3 * HEADS, DIM), 3, 2)
    mixed = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn"
    )
    return x + mixed.reshape(x.shape) @ p["out"]


def language_model(mix: Mix = lambda _, x: x, *, causal: bool = True) -> TracedStep:
    """A traced step of gradient descent, with another operator between two layers."""

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["table"][tokens[:, :-1]].astype(jnp.bfloat16)
        x = attention(p, x, causal=causal)
        x = attention(p, mix(p, x), causal=causal)
        scores = (x @ p["table"].T).astype(jnp.float32)
        found = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(found, tokens[:, 1:, None], -1).mean()

    def step(p: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {
        "in": struct(WIDTH, 3 * WIDTH),
        "out": struct(WIDTH, WIDTH),
        "table": struct(WORDS, WIDTH),
        "positions": struct(SEQ, WIDTH),
    }
    return trace(step, (params, struct(ROWS, SEQ + 1, dtype=jnp.int32)))


def order_of(traced: TracedStep) -> RingOrder | str:
    return ring_order(traced.program, step_graph(traced).operators)


def rotary(_: Any, x: jax.Array) -> jax.Array:
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None]
    turned = x * jnp.cos(angle) + jnp.roll(x, 1, -1) * jnp.sin(angle)
    return turned.astype(x.dtype)


def gated(p: Any, x: jax.Array) -> jax.Array:
    y = x - x.mean(-1, keepdims=True)
    return x * jax.nn.sigmoid(jnp.pad(y[..., 1:], ((0, 0), (0, 0), (0, 1))))


@pytest.mark.parametrize("mix", [lambda _, x: x, rotary, gated])
def test_only_tokens_and_positions_enter(mix: Mix) -> None:
    """Nothing else than numbers of tokens and positions is permuted."""
    traced = language_model(mix)

    found = order_of(traced)

    assert isinstance(found, RingOrder)
    assert len(found.kernels) == 4
    values = traced.program.values
    assert {values[v].dtype.kind for v in found.entering} == {"i"} or mix is rotary
    assert max(values[v].size for v in found.entering) <= ROWS * SEQ
    assert all(values[v].shape[d] == SEQ for v in found.dims for d in found.dims[v])
    for op in step_graph(traced).operators:
        sent = [e.messages(8) for e in op.rule.exchanges if not e.around]
        assert not any(sent)


def shifted(_: Any, x: jax.Array) -> jax.Array:
    """Mixes each token with the one before, as in RWKV."""
    return x + jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def reversed_tokens(_: Any, x: jax.Array) -> jax.Array:
    return x + x[:, ::-1]


def summed(_: Any, x: jax.Array) -> jax.Array:
    return x + jnp.cumsum(x, 1) / SEQ


def dropped(_: Any, x: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    return jnp.where(kept, x, 0)


def chosen(_: Any, x: jax.Array) -> jax.Array:
    """Reads tokens by their numbers, which depend on data."""
    return x + jnp.take_along_axis(x, jnp.argsort(x[..., :1], 1), 1)


def looped(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, y: (c + y, c), x[:, 0], x.swapaxes(0, 1))[1].swapaxes(
        0, 1
    )


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (shifted, "would have to be permuted"),
        (reversed_tokens, "would have to be permuted"),
        (summed, "would have to be permuted"),
        (dropped, "would have to be permuted"),
        (looped, "would have to be permuted"),
        (chosen, "'gather' reads tokens in two ways"),
    ],
)
def test_activations_that_depend_on_positions_are_not_permuted(
    mix: Mix, reason: str
) -> None:
    found = order_of(language_model(mix))

    assert isinstance(found, str)
    assert reason in found


def test_parameters_with_positions_keep_their_order() -> None:
    found = order_of(language_model(lambda p, x: x + p["positions"]))

    assert found == "a parameter has an entry for each position"


def test_attention_without_a_mask_needs_no_order() -> None:
    found = order_of(language_model(causal=False))

    assert isinstance(found, str)
    assert "no causal attention kernel" in found
