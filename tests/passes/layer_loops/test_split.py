"""Tests that loops over layers in pieces give the results of the whole loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_passes.layer_loops.split import (
    in_pieces,
    piece_arguments,
    piece_paths,
    stacked_state,
    whole_path,
)
from autopar_passes.program.equations import evaluate
from autopar_passes.program.trace import TracedStep, trace

LAYERS, WIDTH, ROWS = 6, 8, 4

State = dict[str, Any]


def params() -> State:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4.0,
        "b": jax.random.normal(keys[1], (LAYERS, WIDTH)) / 4.0,
        "head": jax.random.normal(keys[2], (WIDTH, 3)),
    }


def batch() -> State:
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "x": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "y": jax.random.normal(keys[1], (ROWS, 3)),
    }


def through(p: State, x: jax.Array, remat: bool = False) -> jax.Array:
    def layer(x: jax.Array, own: State) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["w"] + own["b"]), None

    body = jax.checkpoint(layer) if remat else layer
    x, _ = jax.lax.scan(body, x, {"w": p["w"], "b": p["b"]})
    return x


def plain(p: State, batch: State) -> jax.Array:
    return jnp.mean((through(p, batch["x"]) @ p["head"] - batch["y"]) ** 2)


def recomputed(p: State, batch: State) -> jax.Array:
    made = through(p, batch["x"], remat=True) @ p["head"]
    return jnp.mean((made - batch["y"]) ** 2)


def cast(p: State, batch: State) -> jax.Array:
    half = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), p)
    return plain(half, batch)


def penalised(p: State, batch: State) -> jax.Array:
    """A loss with penalties per layer, over layers and on products of stacks."""
    layers = jnp.einsum("lij,lkj->lik", p["w"], p["w"])
    over = jnp.einsum("lij,lik->jk", p["w"], p["w"])
    free = jnp.einsum("lij,jk->lik", p["w"], p["head"])
    largest = jnp.max(p["b"], axis=0)
    terms = (layers**2, over**2, free**2, largest**2, jnp.transpose(p["w"], (1, 0, 2)))
    return plain(p, batch) + 1e-3 * sum(jnp.sum(t) for t in terms)


def one_layer_by_hand(p: State, batch: State) -> jax.Array:
    """A loss that reads the stacked array as a whole."""
    return plain(p, batch) + jnp.sum(jnp.cumsum(p["b"], axis=0)[2] ** 2)


def there_and_back(p: State, batch: State) -> jax.Array:
    """A loop in reverse order, and a loop that returns stacked results."""

    def layer(x: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(x @ own)
        return x, x.mean()

    x, means = jax.lax.scan(layer, batch["x"], p["w"], reverse=True)
    return plain(p, {**batch, "x": x}) + jnp.sum(means**2)


def layer_numbers(p: State, batch: State) -> jax.Array:
    """A loop that also iterates over an array that is not split."""

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        w, number = own
        return x + jnp.tanh(x @ w) * (1.0 + number), None

    x, _ = jax.lax.scan(layer, batch["x"], (p["w"], jnp.arange(LAYERS) / LAYERS))
    return plain(p, {**batch, "x": x})


LOSSES: dict[str, Callable[..., jax.Array]] = {
    f.__name__: f
    for f in (
        plain,
        recomputed,
        cast,
        penalised,
        one_layer_by_hand,
        there_and_back,
        layer_numbers,
    )
}


def traced(loss: Callable[..., Any]) -> tuple[TracedStep, list[Any]]:
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))

    def step(p: State, moments: Any, batch: State) -> Any:
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, moments = optimizer.update(grads, moments, p)
        return optax.apply_updates(p, updates), moments, value

    p = params()
    args = (p, optimizer.init(p), batch())
    return trace(step, args), jax.tree.leaves(args)


def check(
    found: TracedStep, flat: list[Any], sizes: dict[int, tuple[int, ...]]
) -> None:
    split = in_pieces(found, sizes)
    places = piece_arguments(len(flat), sizes)
    given_ = [*flat, *([None] * (len(split.input_paths) - len(flat)))]
    for k, own in places.items():
        ends = np.cumsum(sizes[k])[:-1]
        for place, piece in zip(own, jnp.split(flat[k], ends), strict=True):
            given_[place] = piece
    expected = evaluate(found.program, *flat)
    made = evaluate(split.program, *given_)
    for argument, own in places.items():
        result = found.carried[argument]
        pieces = [made[split.carried[k]] for k in own]
        made[result] = jnp.concatenate(pieces)
    for want, have in zip(expected, made, strict=False):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_in_pieces_computes_the_same(name: str) -> None:
    """Whatever else is done with the stacked arrays."""
    found, flat = traced(LOSSES[name])
    stacked = stacked_state(found.program, found.carried)
    paths = {found.input_paths[k].rpartition("/")[2] for k in stacked}
    assert paths >= {"w", "b"}
    assert "head" not in paths
    assert len(stacked) == 6, "parameters and both moments"
    check(found, flat, dict.fromkeys(stacked, (2, 4)))


@settings(max_examples=examples(6), deadline=None)
@given(st.permutations([1, 1, 2, 2]), st.integers(1, 4))
def test_pieces_may_have_any_sizes(sizes: list[int], count: int) -> None:
    """Also of one layer."""
    joined = (*sizes[: count - 1], sum(sizes[count - 1 :]))
    found, flat = traced(plain)
    stacked = stacked_state(found.program, found.carried)
    check(found, flat, dict.fromkeys(stacked, joined))


def test_no_array_is_put_together_that_need_not_be() -> None:
    """Not in the loops, nor in the update."""
    found, _ = traced(recomputed)
    stacked = stacked_state(found.program, found.carried)
    split = in_pieces(found, dict.fromkeys(stacked, (3, 3)))
    kinds = [eqn.primitive for eqn in split.program.body.equations]
    assert kinds.count("scan") == 4
    assert "concatenate" not in kinds
    assert [e.index for e in split.program.body.equations] == sorted(
        e.index for e in split.program.body.equations
    )


def test_a_loop_over_time_is_no_loop_over_layers() -> None:
    """Its arrays come from the batch."""

    def step(p: State, batch: jax.Array) -> Any:
        def loss(p: State) -> jax.Array:
            def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(h @ p["w"][0] + x)
                return h, h

            _, hs = jax.lax.scan(cell, jnp.zeros((WIDTH,)), batch)
            return jnp.mean(hs**2)

        grads = jax.grad(loss)(p)
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads)

    found = trace(step, (params(), jnp.ones((LAYERS, WIDTH))))
    assert stacked_state(found.program, found.carried) == {}


def test_sizes_must_make_up_the_layers() -> None:
    """The message names the argument."""
    found, _ = traced(plain)
    k = next(iter(stacked_state(found.program, found.carried)))
    with pytest.raises(ValueError, match=found.input_paths[k]):
        in_pieces(found, {k: (2, 2)})


def test_paths_of_pieces_lead_back_to_the_array() -> None:
    """And no other path does."""
    for path in piece_paths("state/params/kernel", [3, 3]):
        assert whole_path(path) == "state/params/kernel"
    assert whole_path("state/params/a@b") == ""
