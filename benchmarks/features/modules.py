"""Models of Flax NNX, Flax Linen, Equinox, and of plain containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from feature import WIDTH, Feature, X, Y, layers, loss_of
from flax import linen, nnx
from flax.training import train_state


def features() -> Iterator[Feature]:
    """The features of this module."""
    yield Feature("model: nnx", _nnx_step, _nnx(0.0), (X, Y), objects=True)
    yield Feature("model: nnx dropout", _nnx_step, _nnx(0.3), (X, Y), objects=True)
    yield Feature("model: linen", _linen_step, _linen, (X, Y))
    yield Feature("model: dict of dicts", _dict_step, _dict, (X, Y))
    yield Feature("model: dataclass", _dataclass_step, _dataclass, (X, Y))
    try:
        import equinox
    except ImportError:
        return
    yield _equinox_feature(equinox)


class Net(nnx.Module):
    """Four layers with dropout, and a normalisation."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for layer in self.layers:
            x = self.dropout(jnp.tanh(layer(self.norm(x))))
        return x


def _nnx(rate: float) -> Any:
    def state() -> Any:
        model = Net(rate, nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return state


def _nnx_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return {"loss": value}


class Dense(linen.Module):
    """Four layers."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Runs them."""
        for _ in range(4):
            x = jnp.tanh(linen.Dense(WIDTH)(linen.LayerNorm()(x)))
        return x


def _linen() -> Any:
    model = Dense()
    params = model.init(jax.random.key(0), X)["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
    )


def _linen_step(state: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), {"loss": value}


def _dict() -> Any:
    return {"a": {"w": layers(2)}, "b": {"w": layers(2), "none": None}}


def _dict_step(state: Any, x: Any, y: Any) -> Any:
    def loss(state: Any) -> Any:
        return loss_of([*state["a"]["w"], *state["b"]["w"]], x, y)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), {"loss": value}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    """Weights, and a number that is part of the program."""

    arrays: list[Any]
    rate: float = dataclasses.field(metadata={"static": True})


def _dataclass() -> Any:
    return Weights(layers(), 0.1)


def _dataclass_step(state: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda s: loss_of(s.arrays, x, y))(state)
    made = jax.tree.map(lambda p, g: p - state.rate * g, state, gradient)
    return made, {"loss": value}


def _equinox_feature(equinox: Any) -> Feature:
    def state() -> Any:
        return equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 3, key=jax.random.key(0))

    def step(model: Any, x: Any, y: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradient = equinox.filter_value_and_grad(loss)(model)
        updates = jax.tree.map(lambda g: -0.1 * g, gradient)
        return equinox.apply_updates(model, updates), {"loss": value}

    return Feature("model: equinox", step, state, (X, Y))
