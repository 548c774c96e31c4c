"""A small model in the three forms of a train step, and clusters that shard it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training import train_state

from autopar import Cluster

# The number of rows is divisible by 4, 6 and 8 devices.
BATCH = 24
WIDTH = 16
HIDDEN = 48
TX = optax.adam(1e-2, eps=1e-3)


def cheap(text: str) -> Cluster:
    """A cluster with links so cheap that plans shard even small arrays."""
    cluster = Cluster.parse(text)
    levels = tuple(
        dataclasses.replace(
            level,
            link=dataclasses.replace(
                level.link, latency_s=1e-12, bandwidth_bytes_per_s=1e15
            ),
        )
        for level in cluster.levels
    )
    return dataclasses.replace(cluster, levels=levels)


def with_memory(cluster: Cluster, nbytes: int) -> Cluster:
    """The same cluster with another memory size."""
    device = dataclasses.replace(cluster.device, memory_bytes=nbytes)
    return dataclasses.replace(cluster, device=device)


def batches(count: int, rows: int = BATCH, convert: Any = np.asarray) -> Iterator[Any]:
    draw = np.random.default_rng(0)
    for _ in range(count):
        x = draw.standard_normal((rows, WIDTH)).astype(np.float32)
        yield {"x": convert(x), "y": convert(np.sin(x))}


def batch_structs(rows: int = BATCH) -> Any:
    one = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    return {"x": one, "y": one}


class _Net(linen.Module):
    logical: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init: Any = linen.initializers.lecun_normal()
        if self.logical:
            init = linen.with_logical_partitioning(init, ("embed", "mlp"))
        x = linen.relu(linen.Dense(HIDDEN, kernel_init=init)(x))
        return linen.Dense(WIDTH)(x)


def create_linen(rng: jax.Array, logical: bool = False) -> Any:
    net = _Net(logical)
    params = net.init(rng, jnp.zeros((1, WIDTH)))["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=TX)


def linen_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        out = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def create_plain(rng: jax.Array) -> Any:
    up, down = jax.random.split(rng)
    params = {
        "up": 0.2 * jax.random.normal(up, (WIDTH, HIDDEN)),
        "bias": jnp.zeros(HIDDEN),
        "down": 0.2 * jax.random.normal(down, (HIDDEN, WIDTH)),
    }
    return params, TX.init(params)


def plain_step(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(jax.nn.relu(self.up(x))))


def create_nnx(rng: jax.Array) -> tuple[NnxNet, nnx.Optimizer]:
    model = NnxNet(nnx.Rngs(rng))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_step(model: NnxNet, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    def loss(model: NnxNet) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of the step.

    ``create(rng)`` creates the state; ``step(*state, batch)`` runs the step.
    """

    create: Callable[..., Any]
    step: Callable[..., Any]
    carries: int

    def arguments(self, state: Any) -> tuple[Any, ...]:
        return state if self.carries > 1 else (state,)

    def advance(self, step: Callable[..., Any], state: Any, batch: Any) -> Any:
        """Returns the next state and the loss."""
        out = step(*self.arguments(state), batch)
        if self.step is nnx_step:
            return state, out
        *new, loss = out
        return (tuple(new) if self.carries > 1 else new[0]), loss

    def losses(self, step: Callable[..., Any], state: Any, given: Any) -> list[float]:
        out: list[float] = []
        for batch in given:
            state, loss = self.advance(step, state, batch)
            out.append(float(loss))
        return out


FORMS = {
    "linen": Form(create_linen, linen_step, 1),
    "plain": Form(create_plain, plain_step, 2),
    "nnx": Form(create_nnx, nnx_step, 2),
}


def plain_losses(form: Form, count: int) -> list[float]:
    """The losses of the unplanned step on one device."""
    jitted = nnx.jit(form.step) if form.step is nnx_step else jax.jit(form.step)
    return form.losses(jitted, form.create(jax.random.key(0)), batches(count))
