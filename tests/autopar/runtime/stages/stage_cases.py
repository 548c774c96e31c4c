"""Small steps in pipeline stages, and their results on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import autopar
from autopar.goodput import NoiseOptions

WIDTH, LAYERS, ROWS = 16, 4, 16

Case = tuple[Callable[..., Any], Any, Any]


def weights(width: int = WIDTH, layers: int = LAYERS) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    return [
        {
            "w": jax.random.normal(keys[2 * k], (width, width)) / 4.0,
            "b": jax.random.normal(keys[2 * k + 1], (width,)) / 4.0,
        }
        for k in range(layers)
    ]


def batch(rows: int = ROWS, seed: int = 7) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((2, rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "mask": (random.random(rows) < 0.7).astype(np.float32)}


def chain(params: Any, x: jax.Array) -> jax.Array:
    for p in params:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return x


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((chain(params, batch["x"]) - batch["y"]) ** 2)


def masked_loss(params: Any, batch: Any) -> jax.Array:
    """A mean over the rows that a mask selects, plus a regularisation."""
    rows = jnp.mean((chain(params, batch["x"]) - batch["y"]) ** 2, axis=-1)
    mean = jnp.sum(rows * batch["mask"]) / jnp.maximum(
        jnp.sum(batch["mask"]), np.float32(1.0)
    )
    return mean + 0.01 * sum(jnp.sum(p["w"] ** 2) for p in params)


def tied_loss(params: Any, batch: Any) -> jax.Array:
    x = chain(params[1:], batch["x"] @ params[0]["w"])
    return jnp.mean((x @ params[0]["w"].T - batch["y"]) ** 2)


def skip_loss(params: Any, batch: Any) -> jax.Array:
    x, kept = batch["x"], list[Any]()
    for p in params[:2]:
        x = jnp.tanh(x @ p["w"] + p["b"])
        kept.append(x)
    for p, other in zip(params[2:], reversed(kept), strict=True):
        x = jnp.tanh(x @ p["w"] + p["b"]) + other
    return jnp.mean((x - batch["y"]) ** 2)


def adam(loss: Callable[..., Any]) -> Case:
    """``step(state, batch) -> (state, loss)``, with weights and Adam's moments as
    state.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def step(state: Any, batch: Any) -> Any:
        params = state["params"]
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(grads, state["moments"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "moments": moments}, value

    params = weights()
    return step, {"params": params, "moments": optimizer.init(params)}, batch()


# Arrays that the step holds: constants of its program.
TABLE = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
ORDER = np.arange(WIDTH)[::-1].copy()


def mixed_step(state: Any, batch: Any, scale: Any) -> Any:
    """A step with state, constants and results of every kind."""
    params, (key, new) = state["params"], jax.random.split(state["key"])

    def loss(params: Any) -> Any:
        x = batch["x"]
        for k, p in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, (WIDTH,))
            x = x + kept * jnp.tanh(x @ p["w"] + p["b"])
            x = x[:, ORDER] * TABLE + state["frozen"] + state["reset"]
        rows = jnp.mean((x - batch["y"]) ** 2, axis=-1)
        return scale * jnp.mean(rows), (rows, x)

    (value, (rows, x)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    count = state["count"] + 1
    told = {"loss": value, "rows": rows, "x": x, "norm": norm}
    told |= {"count": count, "passed": batch["y"], "weight": params[0]["w"]}
    told |= {"table": TABLE, "frozen": state["frozen"], "number": x.shape[0]}
    after = {"params": params, "key": new, "count": count, "reset": TABLE}
    return {**after, "frozen": state["frozen"]}, told


def mixed_state() -> Any:
    return {
        "params": weights(),
        "key": jax.random.key(5),
        "count": jnp.int32(0),
        "frozen": jnp.full((WIDTH,), 0.1),
        "reset": jnp.zeros(WIDTH),
    }


def mixed_distance(
    step: Callable[..., Any], rows_of: Callable[[int], Any] = lambda k: batch(seed=k)
) -> float:
    """The difference between the results of steps and those of one device."""
    state, same, most = mixed_state(), mixed_state(), 0.0
    for k in range(2):
        scale = np.float32(0.5 + k)
        state, told = step(state, rows_of(k), scale)
        same, expected = jax.jit(mixed_step)(same, batch(seed=k), scale)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(told))
        most = max(most, distance(expected, told))
    return most


LOSSES = {
    "mean": mean_loss,
    "masked": masked_loss,
    "tied": tied_loss,
    "skip": skip_loss,
}


def train(
    step: Callable[..., Any], state: Any, count: int = 3
) -> tuple[Any, list[float]]:
    losses: list[float] = []
    for number in range(count):
        state, loss = step(state, batch(seed=number))
        losses.append(float(loss))
    return state, losses


def copied(state: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def distance(one: Any, other: Any) -> float:
    """The largest difference of two states, relative to the largest element of each
    array.
    """
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(np.abs(1.0 * np.asarray(a) - b).max() / (np.abs(a).max() + 1e-3))
        for a, b in pairs
    )


class Asking:
    """A policy that requests errors of codecs, and changes nothing."""

    probes, every = ("int8", "topk:ratio=0.25"), 2

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def observe(self, seen: Any) -> None:
        self.seen.append(seen)


# Numbers of layers, of which two stages cannot share three evenly, and schedules.
LOOPS = ((3, "1f1b"), (4, "interleaved"))


def layer_loop(params: Any, batch: Any) -> Any:
    """A step with a loop over layers."""

    def loss(params: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            return x + jnp.tanh(x @ own["w"] + own["b"]), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def looped_layers(count: int) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *weights(layers=count))


def all_beside_the_step(devices: Any, mine: Callable[[int], slice]) -> dict[str, Any]:
    """Everything besides the step: codecs, a policy that probes some, noise and
    evaluation.

    Args:
      devices: four, of two stages.
      mine: selects the rows of this process from all rows.
    """
    asked: dict[str, Any] = {"stages": 2, "microbatches": 2, "devices": devices}

    def rows_of(seed: int, rows: int = 512, width: int = 32) -> dict[str, np.ndarray]:
        x, y = np.random.default_rng(seed).standard_normal((2, rows, width))
        own = mine(rows)
        return {"x": x[own].astype(np.float32), "y": y[own].astype(np.float32)}

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(mean_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    policy, params = Asking(), weights(32)
    run = autopar.parallelize(
        step, cluster="4x1:cpu,network=100Mb/s", axis_names=("data",),
        pins={"batch/*": PartitionSpec("data")}, compression="int4",
        policy=policy, noise_scale=NoiseOptions(every=1), **asked,
    )  # fmt: skip
    losses: list[float] = []
    for seed in range(4):
        params, loss = run(params, rows_of(seed))
        losses.append(float(loss))
    noise, evaluate = run.noise_scale, run.jit(mean_loss)
    errors = {
        name: [choice.error for choice in found.choices]
        for seen in policy.seen
        for name, found in seen.measured.items()
    }
    evaluated = float(evaluate(params, rows_of(9)))
    # The stages change places, and then one stage takes all on half of the devices.
    swapped, moved = [*devices[2:], *devices[:2]], list[float]()
    every = dict.fromkeys("xy", jax.ShapeDtypeStruct((512, 32), np.float32))
    alone = autopar.plan(
        step, params, every, cluster="2x1:cpu,network=100Mb/s", axis_names=("data",),
        pins={"batch/*": PartitionSpec("data")}, compression="int4",
    )  # fmt: skip
    plans = [(swapped, run.plan), (swapped[::2], alone)]
    if jax.process_count() > 2:  # each has to have a part of one stage
        plans.pop()
    for where, plan in plans:
        params = run.replan(plan.cluster.read(), params, devices=where, plan=plan)
        kept = sum(r.residual_norm for r in run.telemetry.values())
        params, loss = run(params, rows_of(5))
        reports = run.telemetry.values()
        moved += [float(loss), kept, sum(r.residual_norm for r in reports)]
    looped = list[float]()
    for count, schedule in LOOPS:
        loop = autopar.parallelize(
            layer_loop, cluster="4:cpu", schedule=schedule, **asked
        )
        layers = looped_layers(count)
        for seed in range(3):
            layers, loss = loop(layers, rows_of(seed, 16, WIDTH))
            looped.append(float(loss))
    return {
        "losses": losses,
        "noise": [noise.sqr, noise.var, noise.groups],
        "errors": [x for _, found in sorted(errors.items()) for x in found],
        "evaluated": evaluated,
        "moved": moved,
        "looped": looped,
    }
