"""Features: several networks, optimizers or updates in a step; states with rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from feature import (
    ROWS,
    WIDTH,
    Feature,
    X,
    Y,
    descent,
    forward,
    layers,
    loss_of,
    numbers,
    updated,
)


def features() -> Iterator[Feature]:
    """The features of this module."""
    yield Feature("updates: two optimisers", _critic, _critic_state, (X, Y))
    yield Feature("updates: minibatches", _minibatches, _keyed, (X, Y))
    yield Feature("updates: ppo", _ppo, _keyed, _ppo_batch())
    yield Feature("updates: every second step", _seldom, _counted, (X, Y))
    yield Feature("updates: dynamic loss scale", _dynamic, _dynamic_state, (X, Y))
    yield Feature("updates: ensemble", _ensemble, _ensemble_state, (X, Y))
    yield Feature("updates: queue of rows", _queue, _queue_state, (X, Y))
    yield Feature("updates: codebook", _codebook, _codebook_state, (X, Y))
    yield Feature("updates: replay buffer", _replay, _replay_state, (X, Y))


_ADAM = optax.adam(1e-2)


def _critic_state() -> Any:
    a, b = layers(2), layers(4)[2:]
    return a, b, _ADAM.init(a), _ADAM.init(b)


def _critic(state: Any, x: Any, y: Any) -> Any:
    """Two networks with an optimizer each; neither reads the other's update."""
    actor, critic, held_a, held_c = state

    def judged(c: Any, a: Any) -> Any:
        return jnp.mean((forward(c, jax.lax.stop_gradient(forward(a, x))) - y) ** 2)

    loss, of_critic = jax.value_and_grad(judged)(critic, actor)
    of_actor = jax.grad(lambda a: -jnp.mean(forward(critic, forward(a, x))))(actor)
    updates, held_c = _ADAM.update(of_critic, held_c)
    moves, held_a = _ADAM.update(of_actor, held_a)
    made = optax.apply_updates(actor, moves), optax.apply_updates(critic, updates)
    return (*made, held_a, held_c), {"loss": loss}


def _keyed() -> Any:
    return layers(), _ADAM.init(layers()), jax.random.key(0)


def _minibatches(state: Any, x: Any, y: Any) -> Any:
    """Two epochs over permuted minibatches, with an update for each minibatch."""
    weights, held, key = state

    def one(carry: Any, batch: Any) -> Any:
        weights, held = carry
        loss, gradient = jax.value_and_grad(loss_of)(weights, *batch)
        updates, held = _ADAM.update(gradient, held)
        return (optax.apply_updates(weights, updates), held), loss

    def epoch(carry: Any, key: Any) -> Any:
        order = jax.random.permutation(key, x.shape[0]).reshape(2, -1)
        return jax.lax.scan(one, carry, (x[order], y[order]))

    key, own = jax.random.split(key)
    (weights, held), losses = jax.lax.scan(
        epoch, (weights, held), jax.random.split(own, 2)
    )
    return (weights, held, key), {"loss": jnp.mean(losses)}


def _ppo_batch() -> tuple[Any, ...]:
    actions = np.random.default_rng(0).integers(0, WIDTH, ROWS).astype(np.int32)
    return X, actions, numbers(2, ROWS) / 9 - 2, numbers(3, ROWS)


def _ppo(state: Any, x: Any, actions: Any, old: Any, gains: Any) -> Any:
    """One epoch of proximal policy optimisation with normalised advantages."""
    weights, held, key = state
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)

    def loss(weights: Any) -> Any:
        logits = jax.nn.log_softmax(forward(weights, x))
        chosen = jnp.take_along_axis(logits, actions[:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - old)
        limited = jnp.clip(ratio, 0.8, 1.2) * gains
        entropy = -jnp.sum(jnp.exp(logits) * logits, 1)
        value = -jnp.mean(jnp.minimum(ratio * gains, limited)) - 0.01 * entropy.mean()
        return value, {"clipped": jnp.mean(jnp.abs(ratio - 1) > 0.2)}

    (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    updates, held = _ADAM.update(gradient, held)
    return (optax.apply_updates(weights, updates), held, key), {"loss": value, **seen}


def _counted() -> Any:
    return layers(), jnp.zeros((), jnp.int32)


def _seldom(state: Any, x: Any, y: Any) -> Any:
    weights, n = state
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    weights = jax.lax.cond(
        n % 2 == 1, lambda: updated(weights, gradient), lambda: weights
    )
    return (weights, n + 1), {"loss": loss}


def _dynamic_state() -> Any:
    zero = jnp.zeros((), jnp.int32)
    return layers(), _ADAM.init(layers()), jnp.float32(2.0**15), zero


def _dynamic(state: Any, x: Any, y: Any) -> Any:
    """Half precision with a loss scale that adapts."""
    weights, held, scale, good = state

    def scaled(weights: Any) -> Any:
        half = jax.tree.map(lambda w: w.astype(jnp.float16), weights)
        loss = loss_of(half, x.astype(jnp.float16), y.astype(jnp.float16))
        return loss.astype(jnp.float32) * scale

    value, gradient = jax.value_and_grad(scaled)(weights)
    gradient = jax.tree.map(lambda g: g / scale, gradient)
    finite = jnp.isfinite(optax.global_norm(gradient))
    updates, made = _ADAM.update(gradient, held)
    new = (optax.apply_updates(weights, updates), made)
    weights, held = jax.tree.map(
        lambda a, b: jnp.where(finite, a, b), new, (weights, held)
    )
    grown = jnp.where(good == 1, scale * 2, scale)
    scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
    good = jnp.where(finite & (good < 1), good + 1, 0)
    return (weights, held, scale, good), {"loss": value / scale, "finite": finite}


def _ensemble_state() -> Any:
    return [jnp.stack([w, w.T, -w]) for w in layers()]


def _ensemble(weights: Any, x: Any, y: Any) -> Any:
    """Three models that train at once, each on the whole batch."""

    def one(weights: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
        return updated(weights, gradient), loss

    weights, losses = jax.vmap(one)(weights)
    return weights, {"losses": losses}


def _queue_state() -> Any:
    return layers(), layers(), jnp.asarray(numbers(8, 2 * ROWS, WIDTH))


def _queue(state: Any, x: Any, y: Any) -> Any:
    """A contrastive loss with the rows of earlier batches (MoCo)."""
    weights, slow, queue = state
    keys = forward(slow, y)

    def loss(weights: Any) -> Any:
        query = forward(weights, x)
        own = jnp.sum(query * keys, 1, keepdims=True)
        logits = jnp.concatenate([own, query @ queue.T], 1)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    value, gradient = jax.value_and_grad(loss)(weights)
    weights = updated(weights, gradient)
    slow = jax.tree.map(lambda s, w: 0.9 * s + 0.1 * w, slow, weights)
    queue = jnp.concatenate([keys, queue[: -x.shape[0]]])
    return (weights, slow, queue), {"loss": value}


def _codebook_state() -> Any:
    return layers(), jnp.asarray(numbers(8, 5, WIDTH)), jnp.ones(5)


def _codebook(state: Any, x: Any, y: Any) -> Any:
    """Vector quantisation; each code is a running mean of the rows nearest to it."""
    weights, codes, counts = state

    def loss(weights: Any) -> Any:
        hidden = forward(weights[:2], x)
        held = jax.lax.stop_gradient(hidden)
        near = jnp.argmin(jnp.sum((held[:, None] - codes) ** 2, 2), 1)
        code = codes[near]
        passed = hidden + jax.lax.stop_gradient(code - hidden)
        apart = jnp.mean((hidden - code) ** 2)
        return loss_of(weights[2:], passed, y) + apart, (held, near)

    (value, (held, near)), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    number = jax.ops.segment_sum(jnp.ones(x.shape[0]), near, 5)
    total = jax.ops.segment_sum(held, near, 5)
    new = 0.9 * counts + 0.1 * number
    codes = (codes * counts[:, None] * 0.9 + 0.1 * total) / new[:, None]
    used = jnp.exp(-jnp.sum(number / ROWS * jnp.log(number / ROWS + 1e-9)))
    return (updated(weights, gradient), codes, new), {"loss": value, "used": used}


def _replay_state() -> Any:
    buffer = {"x": jnp.zeros((32, WIDTH)), "y": jnp.zeros((32, WIDTH))}
    return layers(), buffer, jnp.zeros((), jnp.int32), jax.random.key(0)


def _replay(state: Any, x: Any, y: Any) -> Any:
    """Writes the rows to a replay buffer, and trains on rows drawn from it."""
    weights, buffer, at, key = state
    buffer = {
        name: jax.lax.dynamic_update_slice(buffer[name], v, (at, 0))
        for name, v in (("x", x), ("y", y))
    }
    key, own = jax.random.split(key)
    drawn = jax.random.randint(own, (ROWS,), 0, at + x.shape[0])
    step = descent(loss_of)
    weights, metrics = step(weights, buffer["x"][drawn], buffer["y"][drawn])
    return (weights, buffer, (at + x.shape[0]) % 32, key), metrics
