"""Tests that attention which a step writes out is found, and means the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_on_cpu import cudnn_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar_passes.graph import attention_blocks
from autopar_passes.graph.attention_blocks import FoundAttention, attend_in_blocks
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.score_masks import hidden_differences, is_causal
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.trace import trace
from autopar_passes.rules import blockwise, kernels

BATCH, SEQ, HEADS, DIM = 2, 8, 4, 8


def causal(length: int = SEQ) -> Any:
    return jnp.tril(jnp.ones((length, length), bool))


def by_hand(scores: Any) -> Any:
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def scores_of(q: Any, k: Any) -> Any:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])


def mixed(weights: Any, v: Any) -> Any:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def plain(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(jnp.where(causal(), scores_of(q, k), -1e30)), v)


def full(q: Any, k: Any, v: Any) -> Any:
    return mixed(by_hand(scores_of(q, k)), v)


def capped(q: Any, k: Any, v: Any) -> Any:
    scores = 5.0 * jnp.tanh(scores_of(q, k) / 5.0)
    return mixed(by_hand(jnp.where(causal(), scores, -jnp.inf)), v)


def window(q: Any, k: Any, v: Any) -> Any:
    away = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]
    scores = jnp.where((away >= 0) & (away < 3), scores_of(q, k), -1e30)
    return mixed(jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)), v)


def slopes(q: Any, k: Any, v: Any) -> Any:
    """Biases that fall with the distance, and another slope for each head."""
    away = (jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]).astype(jnp.float32)
    bias = -away * (0.1 * jnp.arange(1, HEADS + 1))[:, None, None]
    bias = jnp.where(away >= 0, bias, -1e30)
    return mixed(jax.nn.softmax(scores_of(q, k) + bias), v)


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores + jnp.where(causal(), 0.0, -1e30)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)


def grouped(q: Any, k: Any, v: Any) -> Any:
    q = q.reshape(BATCH, SEQ, 2, HEADS // 2, DIM)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k[:, :, :2]) / 2.0
    weights = jax.nn.softmax(jnp.where(causal(), scores, -1e30))
    made = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v[:, :, :2])
    return made.reshape(BATCH, SEQ, HEADS, DIM)


def repeated(q: Any, k: Any, v: Any) -> Any:
    """Each of two key heads is repeated for the two query heads of its group."""
    k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (k, v))
    return plain(q, k, v)


def tiled(q: Any, k: Any, v: Any) -> Any:
    """Query heads of a group are not neighbours, and heads have biases."""
    k, v = (jnp.tile(x[:, :, :2], (1, 1, 2, 1)) for x in (k, v))
    return slopes(q, k, v)


def one_key_head(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(x[:, :, :1], HEADS, axis=2) for x in (k, v))
    return heads_first(q, k, v)


def masked_rows(q: Any, k: Any, v: Any) -> Any:
    """The first queries see no key that is not padding."""
    padding = jnp.arange(SEQ) >= jnp.arange(BATCH)[:, None] * 3
    seen = padding[:, None, None] & causal()
    return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e9)), v)


def segments(q: Any, k: Any, v: Any) -> Any:
    """One array has the segments of queries and of keys."""
    own = jnp.asarray([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
    seen = (own[:, :, None] == own[:, None]) & causal()
    return mixed(jax.nn.softmax(jnp.where(seen[:, None], scores_of(q, k), -jnp.inf)), v)


def both_ways(q: Any, k: Any, v: Any) -> Any:
    """A mask, and the mask with queries and keys exchanged."""
    near = jnp.arange(SEQ)[:, None] + 1 >= jnp.arange(SEQ)[None]
    return mixed(jax.nn.softmax(jnp.where(near & near.T, scores_of(q, k), -1e30)), v)


def falling(q: Any, k: Any, v: Any) -> Any:
    """All heads have the same bias, which is 0 at the query's own position."""
    away = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]
    scores = scores_of(q, k) - 0.5 * away
    return mixed(jax.nn.softmax(jnp.where(causal(), scores, -1e30)), v)


def clipped(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(jnp.clip(scores_of(q, k), -5.0, 5.0)), v)


FOUND = [
    *(plain, full, capped, window, slopes, heads_first, grouped),
    *(masked_rows, segments, both_ways, falling, clipped),
    *(repeated, tiled, one_key_head),
]
# The key heads of steps that repeat them for the query heads of a group.
KEY_HEADS = {repeated: 2, tiled: 2, one_key_head: 1}


def step(attend: Callable[..., Any], params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params)
        return jnp.sum(jnp.sin(attend(q, k, v)))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, grads


def rewritten(
    run: Any, *args: Any, cudnn: bool = False
) -> tuple[Program, Program, FoundAttention]:
    """The program of a step, the rewritten program, and what was found."""
    traced = trace(run, args)
    graph = step_graph(traced)
    rules = {op.equation: op.rule for op in graph.operators}
    made, found = attend_in_blocks(traced.program, rules, cudnn=cudnn)
    return traced.program, made, found


def arguments(batch: int = BATCH) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(k, (3, HEADS, DIM)) for k in keys[:3]]
    return params, jax.random.normal(keys[3], (batch, SEQ, 3))


@pytest.mark.parametrize("attend", FOUND, ids=lambda f: f.__name__)
def test_attention_in_blocks_gives_the_same_results(
    attend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of three tokens, of which the last has two."""
    monkeypatch.setattr(blockwise, "_SIDE", 3)
    args = arguments()

    before, after, found = rewritten(functools.partial(step, attend), *args)

    assert (found.replaced, found.refused) == (1, ())
    names = [eqn.primitive for eqn in walk(after.body)]
    assert sum(n in blockwise.PRIMITIVES for n in names) == 2
    assert "exp" not in names
    flat = jax.tree.leaves(args)
    pair = [jax.jit(functools.partial(evaluate, p))(*flat) for p in (before, after)]
    for a, b in zip(*pair, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(abs(a).max()))


@pytest.mark.parametrize("attend", FOUND, ids=lambda f: f.__name__)
def test_cudnn_computes_scores_that_are_only_scaled(
    attend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for cuDNN also computes float32, which has less rounding."""
    monkeypatch.setattr(attention_blocks, "_CUDNN_DTYPES", {"float32"})
    args = arguments()
    run = functools.partial(step, attend)

    with cudnn_on_cpu():
        before, after, found = rewritten(run, *args, cudnn=True)
        flat = jax.tree.leaves(args)
        pair = [jax.jit(functools.partial(evaluate, p))(*flat) for p in (before, after)]

    assert found.replaced == 1
    names = {eqn.primitive for eqn in walk(after.body)}
    scaled = attend in (plain, full, heads_first, grouped, repeated, one_key_head)
    assert names & kernels.RINGS == (
        kernels.PRIMITIVES if scaled else blockwise.PRIMITIVES
    )
    for a, b in zip(*pair, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(abs(a).max()))


@pytest.mark.parametrize("attend", KEY_HEADS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "again"])
def test_key_heads_of_a_group_are_not_repeated(
    attend: Callable[..., Any], remat: bool
) -> None:
    """Kernels read the key heads, and add up the gradients of a group."""
    args, heads = arguments(), KEY_HEADS[attend]
    run = functools.partial(step, jax.checkpoint(attend) if remat else attend)

    _, after, found = rewritten(run, *args)

    assert found.refused == ()
    made = [e for e in walk(after.body) if e.primitive in blockwise.PRIMITIVES]
    assert {e.primitive for e in made} == blockwise.PRIMITIVES
    whole = BATCH * SEQ * HEADS * DIM
    for eqn in made:
        query, key, value = (after.values[a] for a in eqn.inputs[:3])
        assert query.size == whole
        assert {key.size, value.size} == {whole * heads // HEADS}


def test_repeated_keys_that_something_else_reads_stay_repeated() -> None:
    """The gradient of the repeated keys has another summand."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (k, v))
        return plain(q, k, v) + k

    args = arguments()
    before, after, found = rewritten(functools.partial(step, attend), *args)

    assert found == FoundAttention(1, ())
    (eqn,) = (e for e in walk(after.body) if e.primitive == blockwise.BACKWARD)
    assert after.values[eqn.inputs[1]].size == BATCH * SEQ * HEADS * DIM
    flat = jax.tree.leaves(args)
    pair = [jax.jit(functools.partial(evaluate, p))(*flat) for p in (before, after)]
    for a, b in zip(*pair, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(abs(a).max()))


@pytest.mark.parametrize("cudnn", [False, True], ids=["blocks", "cudnn"])
def test_one_row_gives_the_same_results(
    cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one row has no batch dimension that could be split."""
    monkeypatch.setattr(attention_blocks, "_CUDNN_DTYPES", {"float32"})
    args = arguments(batch=1)

    with cudnn_on_cpu():
        before, after, found = rewritten(
            functools.partial(step, plain), *args, cudnn=cudnn
        )
        flat = jax.tree.leaves(args)
        pair = [jax.jit(functools.partial(evaluate, p))(*flat) for p in (before, after)]

    assert found.replaced == 1
    for a, b in zip(*pair, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(abs(a).max()))


def in_bfloat16(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k).astype(jnp.bfloat16)), v)


def dropped(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(scores_of(q, k))
    kept = jax.random.bernoulli(jax.random.key(1), 0.9, weights.shape)
    return mixed(jnp.where(kept, weights / 0.9, 0.0), v)


def one_more(q: Any, k: Any, v: Any) -> Any:
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights / (1.0 + weights.sum(-1, keepdims=True)), v)


def limited(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.minimum(jax.nn.softmax(scores_of(q, k)), 0.9), v)


def without_small(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(scores_of(q, k))
    return mixed(jnp.where(weights > 1e-5, weights, 0.0), v)


def with_a_larger_sum(q: Any, k: Any, v: Any) -> Any:
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights / (1e-6 + weights.sum(-1, keepdims=True)), v)


def without_padding(q: Any, k: Any, v: Any) -> Any:
    """A row of padding has no weights, not equal ones."""
    seen = jnp.arange(SEQ) < jnp.arange(BATCH)[:, None, None, None] * SEQ
    return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e9)) * seen, v)


def symmetric(q: Any, k: Any, v: Any) -> Any:
    scores = scores_of(q, k)
    return mixed(jax.nn.softmax(scores + scores.swapaxes(-1, -2)), v)


@jax.custom_vjp
def limit_gradient(x: Any) -> Any:
    return x


limit_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -9.0, 9.0),))


def with_limited_gradient(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(limit_gradient(scores_of(q, k))), v)


def watched(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(scores_of(q, k))
    return mixed(weights, v) + weights.max()


@jax.custom_vjp
def wrong(x: Any) -> Any:
    return jax.nn.softmax(x)


wrong.defvjp(lambda x: (wrong(x), wrong(x)), lambda y, g: (y * g,))


def with_another_gradient(q: Any, k: Any, v: Any) -> Any:
    return mixed(wrong(scores_of(q, k)), v)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (in_bfloat16, "softmax is computed in bfloat16"),
        (dropped, "not a softmax"),
        (one_more, "not a softmax"),
        (limited, "not a softmax"),
        (without_small, "not a softmax"),
        (with_a_larger_sum, "not a softmax"),
        (without_padding, "not a softmax"),
        (symmetric, "several orders of dimensions"),
        (with_limited_gradient, "not the gradient of one"),
        (watched, "reduced in several ways"),
        (with_another_gradient, "not the gradient of one"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_no_softmax_stays_as_written(
    attend: Callable[..., Any], reason: str
) -> None:
    before, after, found = rewritten(functools.partial(step, attend), *arguments())

    assert found.replaced == 0
    assert after is before
    assert any(reason in line for line in found.refused), found.refused


def test_a_loss_over_classes_is_no_attention() -> None:
    def loss_step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            logs = jax.nn.log_softmax(x @ w)
            return -logs[..., 0].mean()

        return w - jax.grad(loss)(w)

    *_, found = rewritten(loss_step, jnp.ones((8, 8)), jnp.ones((2, 8, 8)))

    assert found == FoundAttention(0, ())


def test_a_softmax_in_float64_stays_as_written() -> None:
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype(jnp.float64), arguments())
        *_, found = rewritten(functools.partial(step, plain), *args)

    assert found.replaced == 0
    assert found.refused == ("its softmax is computed in float64",)


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "uint32"])
def test_rounded_positions_hide_nothing_for_certain(dtype: str) -> None:
    """A mask of chunks of three tokens is not causal, and bfloat16 rounds positions."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        places = jnp.arange(SEQ) / 3 if dtype == "int32" else jnp.arange(SEQ) + 256
        places = places.astype(dtype)
        seen = places[:, None] >= places[None]
        if dtype == "uint32":
            seen = places[:, None] - places[None] >= jnp.uint32(0)
        return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e30)), v)

    _, after, found = rewritten(
        lambda w, x: (w, attend(*(jnp.einsum("bsd,dhk->bshk", x, p) for p in w))),
        *arguments(),
    )

    assert found.replaced == 1
    (eqn,) = (e for e in after.body.equations if e.primitive == blockwise.FORWARD)
    assert not eqn.params["form"].scores.causal


@settings(max_examples=20, deadline=None)
@given(
    window=st.integers(1, 9),
    strict=st.booleans(),
    shift=st.integers(-2, 2),
    additive=st.booleans(),
)
def test_hidden_differences_match_the_mask(
    window: int, strict: bool, shift: int, additive: bool
) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        rows, columns = jnp.arange(SEQ)[:, None] + shift, jnp.arange(SEQ)[None]
        seen = (rows > columns) if strict else (rows >= columns)
        seen &= rows - columns < window
        scores = scores_of(q, k)
        low = jnp.where(seen, 0.0, -1e30)
        scores = scores + low if additive else jnp.where(seen, scores, -1e30)
        return mixed(jax.nn.softmax(scores), v)

    _, after, found = rewritten(
        lambda w, x: (w, attend(*(jnp.einsum("bsd,dhk->bshk", x, p) for p in w))),
        *arguments(),
    )

    assert found.replaced == 1
    (eqn,) = (e for e in after.body.equations if e.primitive == blockwise.FORWARD)
    form = eqn.params["form"]
    labels = ["product", *(x[0] for x in form.operands[3:])]
    hidden = hidden_differences(form.scores.steps, labels, form.scores.result, SEQ)
    away = np.arange(1 - SEQ, SEQ) + shift
    seen = ((away > 0) if strict else (away >= 0)) & (away < window)
    np.testing.assert_array_equal(hidden, ~seen)
    assert form.scores.causal == is_causal(hidden)
