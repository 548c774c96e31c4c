"""Features: optimizers of optax and optax.contrib, and their wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from feature import DEPTH, Feature, X, Y, layers, loss_of

OPTIMIZERS = {
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adadelta": lambda: optax.adadelta(1e-1),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "novograd": lambda: optax.novograd(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True),
    "rprop": lambda: optax.rprop(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "contrib muon": lambda: optax.contrib.muon(1e-2),
    "contrib prodigy": lambda: optax.contrib.prodigy(),
    "contrib schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "contrib cocob": lambda: optax.contrib.cocob(),
    "contrib dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "contrib ademamix": lambda: optax.contrib.ademamix(1e-2),
    "contrib adopt": lambda: optax.contrib.adopt(1e-2),
    "contrib dog": lambda: optax.contrib.dog(1.0),
    "contrib madgrad": lambda: optax.contrib.madgrad(1e-2),
    "contrib galore": lambda: optax.contrib.galore(1e-2, rank=2),
    "contrib mechanize": lambda: optax.contrib.mechanize(optax.sgd(1e-2)),
    "contrib sam": lambda: optax.contrib.sam(
        optax.adam(1e-2),
        optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
        sync_period=2,
    ),
    "masked": lambda: optax.masked(
        optax.add_decayed_weights(0.1), [k % 2 == 0 for k in range(DEPTH)]
    ),
    "optimistic adam": lambda: optax.optimistic_adam_v2(1e-2),
    "skip every second": lambda: optax.conditionally_mask(
        optax.adam(1e-2), lambda step: step % 2 == 0
    ),
    "clip, schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)),
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "apply if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()},
        ["a" if k % 2 else "b" for k in range(DEPTH)],
    ),
    "inject hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 0.0, 10)
    ),
    "average": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "adaptive clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.01), optax.centralize(), optax.sgd(0.1)
    ),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
}


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, make in OPTIMIZERS.items():
        yield _feature(name, make())
    yield Feature("optimizer: lbfgs", _line_search(), _search_state, (X, Y))
    for name, make in OF_VALUES.items():
        yield _of_value(name, make())
    clip = optax.contrib.differentially_private_aggregate
    private = optax.chain(clip(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))
    yield _of_each_row("contrib private", private)
    look = optax.lookahead(optax.adam(1e-2), 2, 0.5)
    yield Feature("optimizer: lookahead", _looking(look), _looks(look), (X, Y))
    yield Feature("optimizer: plateau", _plateau(), _plateau_state, (X, Y))


def _feature(name: str, transform: Any) -> Feature:
    def step(state: Any, x: Any, y: Any) -> Any:
        weights, held = state
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
        updates, held = transform.update(gradient, held, weights)
        metrics = {"loss": loss, "norm": optax.global_norm(gradient)}
        if name == "multi steps":
            metrics["steps"] = held.mini_step
        return (optax.apply_updates(weights, updates), held), metrics

    return Feature(f"optimizer: {name}", step, _state(transform), (X, Y))


def _state(transform: Any) -> Any:
    def state() -> Any:
        # An optimiser may hold a key, which a run gives away with its state.
        return layers(), jax.tree.map(jnp.copy, transform.init(layers()))

    return state


_SEARCH = optax.lbfgs(memory_size=2)


def _search_state() -> Any:
    return layers(), _SEARCH.init(layers())


def _line_search() -> Any:
    def step(state: Any, x: Any, y: Any) -> Any:
        weights, held = state

        def loss(w: Any) -> Any:
            return loss_of(w, x, y)

        value, gradient = optax.value_and_grad_from_state(loss)(weights, state=held)
        updates, held = _SEARCH.update(
            gradient, held, weights, value=value, grad=gradient, value_fn=loss
        )
        return (optax.apply_updates(weights, updates), held), {"loss": value}

    return step


_PLATEAU = optax.contrib.reduce_on_plateau(patience=1)


def _plateau_state() -> Any:
    return layers(), _PLATEAU.init(layers())


def _plateau() -> Any:
    def step(state: Any, x: Any, y: Any) -> Any:
        weights, held = state
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
        updates = jax.tree.map(lambda g: -0.1 * g, gradient)
        updates, held = _PLATEAU.update(updates, held, weights, value=loss)
        weights = optax.apply_updates(weights, updates)
        return (weights, held), {"loss": loss, "scale": jnp.asarray(held.scale)}

    return step


OF_VALUES = {
    "polyak": lambda: optax.polyak_sgd(0.1),
    "contrib momo": lambda: optax.contrib.momo_adam(1e-2),
    "contrib sophia": lambda: optax.contrib.sophia(1e-3, update_interval=2),
    "line search": lambda: optax.chain(
        optax.sgd(0.5), optax.scale_by_backtracking_linesearch(4)
    ),
}


def _of_value(name: str, transform: Any) -> Feature:
    """An optimizer that needs the loss, or a function that computes it."""

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, held = state

        def loss(w: Any) -> Any:
            return loss_of(w, x, y)

        value, gradient = jax.value_and_grad(loss)(weights)
        reads = {"value": value, "grad": gradient}
        reads |= {
            "contrib sophia": {"obj_fn": loss},
            "line search": {"value_fn": loss},
        }.get(name, {})
        updates, held = transform.update(gradient, held, weights, **reads)
        return (optax.apply_updates(weights, updates), held), {"loss": value}

    return Feature(f"optimizer: {name}", step, _state(transform), (X, Y))


def _of_each_row(name: str, transform: Any) -> Feature:
    """An optimizer that needs the gradient of each row."""

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, held = state
        one = jax.value_and_grad(lambda w, x, y: loss_of(w, x[None], y[None]))
        losses, rows = jax.vmap(one, (None, 0, 0))(weights, x, y)
        updates, held = transform.update(rows, held, weights)
        return (optax.apply_updates(weights, updates), held), {"loss": losses.mean()}

    return Feature(f"optimizer: {name}", step, _state(transform), (X, Y))


def _looks(transform: Any) -> Any:
    def state() -> Any:
        both = optax.LookaheadParams.init_synced(layers())
        return both, transform.init(both)

    return state


def _looking(transform: Any) -> Any:
    def step(state: Any, x: Any, y: Any) -> Any:
        both, held = state
        loss, gradient = jax.value_and_grad(loss_of)(both.fast, x, y)
        updates, held = transform.update(gradient, held, both)
        return (optax.apply_updates(both, updates), held), {"loss": loss}

    return step
