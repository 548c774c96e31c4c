"""Small steps whose gradients are large enough for codecs, and their plans."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import PartitionSpec
from planner_steps import mlp_block, mlp_loss, mlp_params, normal, trained

import autopar
from autopar import Cluster
from autopar_passes.audit.compiled import hlo_collectives
from autopar_passes.audit.partitioned import AuditedCollective

# With weights of these sizes, this is the smallest batch for which sharding the batch
# is faster than gathering it. No weight is smaller than the least size for codecs.
ROWS, WIDTH, HIDDEN, LAYERS, TIMES = 512, 32, 64, 2, 3
WORKERS = 4
NETWORK = "network=1Gb/s"
ADAM = optax.adamw(1e-2, eps=1e-3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, its first state, its batches, and the hints by which plans shard it.

    ``state`` creates the leading arguments. A step returns their new values and the
    loss.
    """

    step: Callable[..., Any]
    state: Callable[[], tuple[Any, ...]]
    batch: Callable[[int], Any]
    pins: dict[str, PartitionSpec]
    cluster: str = f"4x1:cpu,{NETWORK}"
    axes: tuple[str, ...] = ("data",)

    def parallel(self, compression: str, **options: Any) -> Any:
        """The step under a plan that shards the batch."""
        return autopar.parallelize(
            self.step,
            cluster=Cluster.parse(self.cluster),
            compression=compression,
            axis_names=self.axes,
            max_axes=len(self.axes),
            pins=self.pins,
            **{"seconds": None, "split_batch": False, **options},
        )

    def batches(self, count: int, start: int = 0) -> Iterator[Any]:
        return map(self.batch, range(start, start + count))

    def train(self, step: Any, state: Any, batches: Any) -> tuple[Any, list[float]]:
        """Runs a step on some batches; returns the state and the losses."""
        losses: list[float] = []
        for batch in batches:
            out = step(*state, batch)
            *new, loss = out if isinstance(out, tuple) else (*state, out)
            state = tuple(new)
            losses.append(float(loss))
        return state, losses


def rows(seed: int, *front: int) -> Any:
    """A batch of inputs, and of targets that a model can learn."""
    x = 0.5 * np.random.default_rng(seed).standard_normal((*front, WIDTH))
    x = x.astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def plain(loss: Any, params: Any, tx: Any, pins: Any = None, **options: Any) -> Case:
    """A case whose step takes parameters, optimizer state and batch."""
    return Case(
        trained(loss, tx),
        lambda: jax.tree.map(jnp.array, (params, tx.init(params))),
        lambda seed: rows(seed, ROWS),
        {"batch/*": PartitionSpec("data"), **(pins or {})},
        **options,
    )


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAM)
MLP = mlp_params(WIDTH, HIDDEN, 1)


def data_parallel() -> Case:
    return plain(mlp_loss, MLP, CLIPPED, {"params/*": PartitionSpec()})


def sharded_state() -> Case:
    """ZeRO: each device updates its shard of the parameters."""
    part = PartitionSpec("data")
    pins = {f"state/*/{m}/*/{w}": part for m in ("mu", "nu") for w in ("up", "down")}
    return plain(mlp_loss, MLP, ADAM, pins)


def tensor_parallel() -> Case:
    pins = {
        "params/*/up": PartitionSpec(None, "tensor"),
        "params/*/bias": PartitionSpec("tensor"),
        "params/*/down": PartitionSpec("tensor"),
    }
    cluster, axes = f"2x2:cpu,{NETWORK}", ("data", "tensor")
    return plain(mlp_loss, MLP, CLIPPED, pins, cluster=cluster, axes=axes)


def two_levels() -> Case:
    """Data parallelism within hosts and between hosts."""
    pins = {"batch/*": PartitionSpec(("data", "tensor")), "params/*": PartitionSpec()}
    cluster, axes = f"2x2:cpu,{NETWORK}", ("data", "tensor")
    return plain(mlp_loss, MLP, CLIPPED, pins, cluster=cluster, axes=axes)


def split_over_levels() -> Case:
    """As `two_levels`, but each device of all hosts keeps a shard of the parameters."""
    part = PartitionSpec(("data", "tensor"))
    pins = {"batch/*": part, "params/*/up": part, "params/*/down": part}
    cluster, axes = f"2x2:cpu,{NETWORK}", ("data", "tensor")
    return plain(mlp_loss, MLP, ADAM, pins, cluster=cluster, axes=axes)


def scanned_layers() -> Case:
    def loss(params: Any, batch: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, p: (mlp_block(p, x), None), batch["x"], params)
        return jnp.mean((out - batch["y"]) ** 2)

    layers = mlp_params(WIDTH, HIDDEN, LAYERS)
    params = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return plain(loss, params, ADAM, {"params/*": PartitionSpec()})


def recurrent() -> Case:
    """A recurrent step on sequences of shape (time, batch, features)."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            update, new = jnp.split(x @ params["in"] + h @ params["rec"], 2, axis=1)
            h = h + jax.nn.sigmoid(update) * (jnp.tanh(new) - h)
            return h, h

        _, out = jax.lax.scan(cell, jnp.zeros((ROWS, WIDTH)), batch["x"])
        return jnp.mean((out @ params["out"] - batch["y"]) ** 2)

    params = {
        "in": normal(0, WIDTH, 2 * WIDTH, scale=0.2),
        "rec": normal(1, WIDTH, 2 * WIDTH, scale=0.2),
        "out": normal(2, WIDTH, WIDTH, scale=0.2),
    }
    case = plain(loss, params, ADAM, {"params/*": PartitionSpec()})
    return dataclasses.replace(
        case,
        batch=lambda seed: rows(seed, TIMES, ROWS),
        pins={**case.pins, "batch/*": PartitionSpec(None, "data")},
    )


def tied_embedding() -> Case:
    """An embedding table that is also the output matrix; the state has a random key."""
    words = 64

    def step(state: Any, batch: Any) -> Any:
        key, drop = jax.random.split(state["key"])

        def loss(params: Any) -> jax.Array:
            x = params["table"][batch["tokens"]]
            x = jnp.where(jax.random.bernoulli(drop, 0.9, x.shape), x / 0.9, 0.0)
            logits = jnp.tanh(x @ params["w"]) @ params["table"].T
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["labels"]
            ).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.5 * g, state["params"], grads)
        return {"key": key, "params": params}, value

    def state() -> tuple[Any, ...]:
        params = {"table": normal(0, words, WIDTH), "w": normal(1, WIDTH, WIDTH)}
        return ({"key": jax.random.key(0), "params": params},)

    def batch(seed: int) -> Any:
        draw = np.random.default_rng(seed)
        tokens = draw.integers(0, words, (ROWS, TIMES), np.int32)
        return {"tokens": tokens, "labels": (tokens + 1) % words}

    pins = {"batch/*": PartitionSpec("data"), "state/params/*": PartitionSpec()}
    return Case(step, state, batch, pins)


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(WIDTH)(linen.relu(linen.Dense(HIDDEN)(x)))


def linen_form() -> Case:
    net = _Linen()

    def state() -> tuple[Any, ...]:
        params = net.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
        made = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=ADAM)
        return (made,)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            out = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((out - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Case(
        step, state, lambda seed: rows(seed, ROWS), {"batch/*": PartitionSpec("data")}
    )


class _Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def nnx_form() -> Case:
    def state() -> tuple[Any, ...]:
        model = _Nnx(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return Case(
        step, state, lambda seed: rows(seed, ROWS), {"batch/*": PartitionSpec("data")}
    )


CASES: dict[str, Callable[[], Case]] = {
    "data_parallel": data_parallel,
    "sharded_state": sharded_state,
    "tensor_parallel": tensor_parallel,
    "two_levels": two_levels,
    "split_over_levels": split_over_levels,
    "scanned_layers": scanned_layers,
    "recurrent": recurrent,
    "tied_embedding": tied_embedding,
    "linen": linen_form,
    "nnx": nnx_form,
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name]()


@functools.cache
def plain_losses(name: str, count: int) -> tuple[float, ...]:
    """The losses of the unplanned step on one device."""
    case = case_of(name)
    jitted = nnx.jit(case.step) if name == "nnx" else jax.jit(case.step)
    return tuple(case.train(jitted, case.state(), case.batches(count))[1])


@functools.cache
def plan_of(codec: str, name: str = "data_parallel") -> autopar.Plan:
    """The plan of a case with one codec, computed once."""
    case = case_of(name)
    step = case.parallel(codec)
    step.prepare(*case.state(), case.batch(0))
    return step.plan


def fresh(codec: str, name: str = "data_parallel", **options: Any) -> Any:
    """A new step of a case under the plan of `plan_of`."""
    plan = plan_of(codec, name)
    return autopar.parallelize(case_of(name).step, plan=plan, **options)


def spoilt(batch: Any) -> Any:
    """The batch with one element replaced by NaN."""
    x = batch["x"].copy()
    x[3, 5] = np.nan
    return {**batch, "x": x}


def on_host(tree: Any) -> Any:
    """The arrays of a tree as numpy arrays, which stay valid after donation."""
    return jax.tree.map(np.asarray, tree)


def compiled(step: Any, *args: Any) -> Any:
    """A planned step, compiled without optimised machine code, only to be read."""
    return step.lower(*args).compile({"xla_backend_optimization_level": 0})


def collectives(program: Any, plan: autopar.Plan) -> tuple[AuditedCollective, ...]:
    """The collectives in a compiled program."""
    mesh = list(zip(plan.axis_names, plan.axis_sizes, strict=True))
    return hlo_collectives(program.as_text(), mesh)


def payloads(program: Any) -> list[tuple[str, str]]:
    """Kind and element type of each collective that sends a codec's payload."""
    lines = [x for x in program.as_text().splitlines() if "shard_map" in x]
    found = [m for x in lines if (m := _PAYLOAD.search(x))]
    return sorted((m["kind"], m["dtype"]) for m in found)


_PAYLOAD = re.compile(
    r" = \(?(?P<dtype>\w+)\[.* (?P<kind>all-to-all|all-gather)(?:-start)?\("
)
