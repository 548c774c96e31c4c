"""A small train step that uses one feature of JAX or of its libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH, DEPTH = 16, 8, 4
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Feature:
    """One step and its arguments.

    Attributes:
      name: name of the feature; it begins with its kind.
      step: takes the state first and returns ``(state, metrics)``.
      state: makes the state.
      batch: makes the arguments after the state.
      objects: whether the state consists of NNX objects, which the step changes in
        place.
      static: names of the static arguments.
    """

    name: str
    step: Step
    state: Callable[[], Any]
    batch: tuple[Any, ...]
    objects: bool = False
    static: tuple[str, ...] = ()


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = numbers(0, ROWS, WIDTH)
Y = numbers(1, ROWS, WIDTH)
LABELS = np.arange(ROWS, dtype=np.int32) % WIDTH


def layers(depth: int = DEPTH) -> list[Any]:
    """Square weights, one for each layer."""
    return [jnp.asarray(numbers(k, WIDTH, WIDTH) / 3) for k in range(2, 2 + depth)]


def stacked() -> Any:
    """The same weights as one array."""
    return jnp.stack(layers())


def forward(weights: Sequence[Any], x: Any) -> Any:
    """A multilayer perceptron."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def loss_of(weights: Sequence[Any], x: Any, y: Any) -> Any:
    """The mean squared error of the perceptron."""
    return jnp.mean((forward(weights, x) - y) ** 2)


def descent(loss: Callable[..., Any], rate: float = 0.1) -> Step:
    """Gradient descent on a loss of the state and the batch."""

    def step(state: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(state, *batch)
        return updated(state, gradient, rate), {"loss": value}

    return step


def updated(weights: Any, gradient: Any, rate: float = 0.1) -> Any:
    """The weights after a step of gradient descent."""
    return jax.tree.map(lambda w, g: w - rate * g.astype(w.dtype), weights, gradient)


def between(function: Callable[..., Any]) -> Callable[..., Any]:
    """A perceptron's loss with a row-wise function between its layers."""

    def loss(weights: Sequence[Any], x: Any, y: Any) -> Any:
        for k, w in enumerate(weights):
            x = jnp.tanh(x @ w)
            x = function(x) if k % 2 == 0 else x
        return jnp.mean((x - y) ** 2)

    return loss
