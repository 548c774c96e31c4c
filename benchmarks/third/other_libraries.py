"""Steps of Equinox and Haiku, as their documentation and examples write them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cases import Case, Size
from flax_examples import returns_state


def equinox_cnn(size: Size) -> Case:
    """The convolutional network of Equinox's MNIST page: functions among the layers."""
    eqx = importlib.import_module("equinox")
    rows = size.of(16, 64)

    class CNN(eqx.Module):
        layers: list

        def __init__(self, key: Any) -> None:
            key1, key2, key3, key4 = jax.random.split(key, 4)
            self.layers = [
                eqx.nn.Conv2d(1, 3, kernel_size=4, key=key1),
                eqx.nn.MaxPool2d(kernel_size=2),
                jax.nn.relu,
                jnp.ravel,
                eqx.nn.Linear(1728, 512, key=key2),
                jax.nn.sigmoid,
                eqx.nn.Linear(512, 64, key=key3),
                jax.nn.relu,
                eqx.nn.Linear(64, 10, key=key4),
                jax.nn.log_softmax,
            ]

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    def cross_entropy(y: Any, pred_y: Any) -> Any:
        pred_y = jnp.take_along_axis(pred_y, jnp.expand_dims(y, 1), axis=1)
        return -jnp.mean(pred_y)

    def loss(model: Any, x: Any, y: Any) -> Any:
        return cross_entropy(y, jax.vmap(model)(x))

    optim = optax.adamw(3e-4)

    @eqx.filter_jit
    def make_step(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss_value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optim.update(
            grads, opt_state, eqx.filter(model, eqx.is_array)
        )
        model = eqx.apply_updates(model, updates)
        return model, opt_state, loss_value

    def state() -> Any:
        model = CNN(jax.random.PRNGKey(5678))
        return model, optim.init(eqx.filter(model, eqx.is_array))

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        x = size.normal(number, rows, 1, 28, 28)
        y = size.integers(number, 0, 10, rows)
        *state, loss_value = step(*state, x, y)
        return tuple(state), loss_value

    return Case(make_step, make_step, state, call)


def equinox_stateful(size: Size) -> Case:
    """The network with batch norm of Equinox's page on stateful operations."""
    eqx = importlib.import_module("equinox")
    rows = size.of(16, 256)

    class Model(eqx.Module):
        norm1: Any
        spectral_linear: Any
        norm2: Any
        linear1: Any
        linear2: Any

        def __init__(self, key: Any) -> None:
            key1, key2, key3, key4 = jax.random.split(key, 4)
            self.norm1 = eqx.nn.BatchNorm(input_size=3, axis_name="batch", mode="batch")
            self.spectral_linear = eqx.nn.SpectralNorm(
                layer=eqx.nn.Linear(in_features=3, out_features=32, key=key1),
                weight_name="weight",
                key=key2,
            )
            self.norm2 = eqx.nn.BatchNorm(
                input_size=32, axis_name="batch", mode="batch"
            )
            self.linear1 = eqx.nn.Linear(in_features=32, out_features=32, key=key3)
            self.linear2 = eqx.nn.Linear(in_features=32, out_features=3, key=key4)

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm1(x, state)
            x, state = self.spectral_linear(x, state)
            x = jax.nn.relu(x)
            x, state = self.norm2(x, state)
            x = self.linear1(x)
            x = jax.nn.relu(x)
            x = self.linear2(x)
            return x, state

    def compute_loss(model: Any, state: Any, xs: Any, ys: Any) -> Any:
        batch_model = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        pred_ys, state = batch_model(xs, state)
        return jnp.mean((pred_ys - ys) ** 2), state

    optim = optax.adam(5e-3)

    @eqx.filter_jit
    def make_step(model: Any, state: Any, opt_state: Any, xs: Any, ys: Any) -> Any:
        grads, state = eqx.filter_grad(compute_loss, has_aux=True)(model, state, xs, ys)
        updates, opt_state = optim.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return model, state, opt_state

    def made() -> Any:
        model, state = eqx.nn.make_with_state(Model)(jax.random.PRNGKey(5678))
        return model, state, optim.init(eqx.filter(model, eqx.is_inexact_array))

    def call(step: Any, state: Any, number: int) -> tuple[Any, Any]:
        xs, ys = size.normal(number, rows, 3), size.normal(number + 9, rows, 3)
        return step(*state, xs, ys), None

    return Case(make_step, make_step, made, call)


def haiku_transformer(size: Size) -> Case:
    """The language model that dm-haiku ships in ``examples/transformer``."""
    train = importlib.import_module("examples.transformer.train")
    train.NUM_LAYERS, train.MODEL_SIZE = size.of((2, 32), (6, 128))
    train.NUM_HEADS, train.KEY_SIZE = size.of((4, 8), (8, 32))
    rows, length = size.of((16, 16), (256, train.SEQUENCE_LENGTH))

    def batch(number: int) -> Any:
        return train.dataset.Batch(
            inputs=size.integers(number, 1, 128, rows, length),
            targets=size.integers(number + 1, 1, 128, rows, length),
        )

    def state() -> Any:
        ones = jnp.ones((rows, length), jnp.int32)
        return train.init(jax.random.PRNGKey(0), train.dataset.Batch(ones, ones))

    def arguments(state: Any, number: int) -> Any:
        return (state, batch(number)), {}

    return Case(train.update, train.update, state, returns_state(arguments))


CASES: dict[str, Callable[[Size], Case]] = {
    f.__name__: f for f in (equinox_cnn, equinox_stateful, haiku_transformer)
}
