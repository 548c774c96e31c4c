"""Small train steps of every kind that the passes support, and their graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.program.trace import TracedStep, trace

Step = Callable[..., Any]
ROWS, WIDTH, DEPTH = 4, 6, 3


def random(seed: int, *shape: int) -> jax.Array:
    """Random numbers that need no compiled program."""
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.standard_normal(shape) / 2.0, jnp.float32)


def descent(loss: Step) -> Step:
    """One step of gradient descent that returns new weights and the loss."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def weights(depth: int = DEPTH) -> list[jax.Array]:
    return [random(k, WIDTH, WIDTH) for k in range(depth)]


def mlp_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scan_loss(params: jax.Array, x: jax.Array) -> jax.Array:
    out, sums = jax.lax.scan(
        lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, params, length=DEPTH
    )
    return jnp.mean(out**2) + jnp.sum(sums)


def while_step(params: jax.Array, x: jax.Array) -> Any:
    def body(carry: Any) -> Any:
        count, value = carry
        return count + 1, jnp.tanh(value @ params)

    _, value = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))
    return params + jnp.mean(value), jnp.sum(value)


def cond_loss(params: jax.Array, x: jax.Array) -> jax.Array:
    out = jax.lax.cond(jnp.sum(x) > 0, lambda v: jnp.sin(v @ params), jnp.cos, x)
    return jnp.mean(out**2)


def conv_loss(params: jax.Array, x: jax.Array) -> jax.Array:
    out = jax.lax.conv_general_dilated(
        x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.relu(out) ** 2)


def remat_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)))(x, w)
    return jnp.mean(x**2)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """An identity function whose gradient is clipped."""
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def custom_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.nn.relu(clipped(x @ w))
    return jnp.mean(x**2)


def embedding_loss(params: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.mean(jnp.take(params, ids, axis=0) ** 2)


def momentum_step(params: Any, moments: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(mlp_loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


def microbatch_step(params: jax.Array, batch: jax.Array) -> Any:
    """A step that sums the gradients of microbatches in a loop."""

    def one(total: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(params)
        return total + grads, None

    total, _ = jax.lax.scan(one, jnp.zeros_like(params), batch)
    return params - 0.1 * total / batch.shape[0]


class Mlp(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def nnx_step(model: Mlp, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def nnx_arguments() -> tuple[Any, ...]:
    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, random(9, ROWS, WIDTH)


X = random(8, ROWS, WIDTH)
STEPS: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "mlp": (descent(mlp_loss), (weights(), X)),
    "momentum": (momentum_step, (weights(), weights(), X)),
    "scan": (descent(scan_loss), (random(0, DEPTH, WIDTH, WIDTH), X)),
    "while": (while_step, (random(0, WIDTH, WIDTH), X)),
    "cond": (descent(cond_loss), (random(0, WIDTH, WIDTH), X)),
    "conv": (descent(conv_loss), (random(0, 3, 3, 2, 4), random(1, 2, 4, 4, 2))),
    "remat": (descent(remat_loss), (weights(), X)),
    "custom": (descent(custom_loss), (weights(), X)),
    "embedding": (descent(embedding_loss), (random(0, 5, WIDTH), jnp.arange(ROWS))),
    "microbatches": (
        microbatch_step,
        (random(0, WIDTH, WIDTH), random(1, DEPTH, ROWS, WIDTH)),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A traced step and its graph."""

    name: str
    traced: TracedStep
    graph: OperatorGraph


@functools.cache
def case(name: str) -> Case:
    """Traces each step once, which is safe because graphs are values."""
    step, args = (nnx_step, nnx_arguments()) if name == "nnx" else STEPS[name]
    traced = trace(step, args)
    return Case(name, traced, step_graph(traced))


NAMES = [*STEPS, "nnx"]
