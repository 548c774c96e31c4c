"""Train steps whose layers can be recomputed, and their rewritten programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from microbatch_cases import evaluated

from autopar.plans import Rematerialisation
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.remat import layer_starts, rematerialise
from autopar_passes import jax_compat
from autopar_passes.program.trace import open_arguments

Step = Callable[..., Any]
ROWS, WIDTH, DEPTH, WORDS = 8, 16, 3, 11


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers of the size of weights, made without compiling a program."""
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.standard_normal(shape) / 4, jnp.float32)


def descent(loss: Step, *, aux: bool = False) -> Step:
    """A step of gradient descent; returns the new state and the loss's results."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=aux)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def blocks(depth: int = DEPTH) -> list[tuple[jax.Array, jax.Array]]:
    """The weights of `depth` layers."""
    return [
        (drawn(WIDTH, 4 * WIDTH, seed=k), drawn(4 * WIDTH, WIDTH, seed=9 + k))
        for k in range(depth)
    ]


def block(w: Any, x: jax.Array) -> jax.Array:
    """A layer with an activation between two products."""
    return x + jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1])


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = block(w, x)
    return jnp.mean(x**2)


def dropout(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for k, w in enumerate(params):
        kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, x.shape)
        x = block(w, jnp.where(kept, x / 0.8, 0))
    return jnp.mean(x**2)


def tied(params: Any, tokens: jax.Array) -> jax.Array:
    table, layers = params
    x = table[tokens]
    for w in layers:
        x = block(w, x)
    logits = x @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def with_results(params: Any, x: jax.Array) -> Any:
    """A loss that also returns the largest activation of each layer."""
    sizes: list[jax.Array] = []
    for w in params:
        x = block(w, x)
        sizes.append(jnp.max(jnp.abs(x)))
    return jnp.mean(x**2), jnp.stack(sizes)


def checkpointed(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.checkpoint(block)(w, x)
    return jnp.mean(x**2)


def looping(params: Any, x: jax.Array) -> jax.Array:
    """Layers with an inner loop, which is a small part of their work."""

    def halved(c: jax.Array, _: Any) -> Any:
        return jnp.sin(c) / 2, c.sum()

    for w in params:
        x, sums = jax.lax.scan(halved, block(w, x), None, length=3)
        x = x + jnp.mean(sums)
    return jnp.mean(x**2)


def stacked(depth: int = DEPTH) -> Any:
    """The weights of `depth` layers, stacked into one array per kind."""
    return jax.tree.map(lambda *w: jnp.stack(w), *blocks(depth))


def in_loop(params: Any, x: jax.Array) -> jax.Array:
    """Layers as the iterations of a scan."""
    out, _ = jax.lax.scan(lambda c, w: (block(w, c), None), x, params)
    return jnp.mean(out**2)


def backwards(params: Any, x: jax.Array) -> jax.Array:
    """A scan over the layers in reverse order."""
    out, _ = jax.lax.scan(
        lambda c, w: (block(w, c), None), x, params, reverse=True, unroll=2
    )
    return jnp.mean(out**2)


def remembered(params: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda c, w: (block(w, c), None))
    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


def loop_with_results(params: Any, x: jax.Array, key: jax.Array) -> Any:
    """A scan with dropout, whose key is carried, a mask, an inner loop and results."""
    mask = jnp.where(jnp.arange(WIDTH) % 2, 1.0, jnp.tanh(x[0]))

    def layer(carried: Any, w: Any) -> Any:
        x, key = carried
        key, mine = jax.random.split(key)
        kept = jax.random.bernoulli(mine, 0.8, x.shape)
        x, sums = jax.lax.scan(
            lambda c, _: (jnp.sin(c) / 2 + x, c.sum()), jnp.where(kept, x, 0), length=3
        )
        x = block(w, x * mask) + jnp.mean(sums)
        return (x, key), jnp.max(jnp.abs(x))

    (x, key), sizes = jax.lax.scan(layer, (x, key), params)
    return jnp.mean(x**2), sizes


def encoder_decoder(params: Any, x: jax.Array) -> jax.Array:
    """Two loops over different layers; the second reads the result of the first."""
    first, second = params
    read, _ = jax.lax.scan(lambda c, w: (block(w, c), None), x, first)

    def layer(c: jax.Array, w: Any) -> Any:
        return jnp.tanh(block(w, c) * read) + c, None

    out, _ = jax.lax.scan(layer, x, second)
    return jnp.mean(out**2)


def two_views(params: Any, x: jax.Array) -> jax.Array:
    """A loop over the same layers on two views of the batch."""

    def tower(c: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (block(w, c), None), c, params)[0]

    return jnp.mean(tower(x) * tower(jnp.flip(x, 1)))


def taught(params: Any, x: jax.Array) -> jax.Array:
    """A loss between a loop over layers and its own outputs on two other views."""

    def tower(c: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (block(w, c), None), c, params)[0]

    wanted = tower(jnp.flip(x, 1)) + tower(-x)
    return jnp.mean((tower(x) - jax.lax.stop_gradient(wanted)) ** 2)


def experts(params: Any, x: jax.Array) -> jax.Array:
    """Layers with an inner loop over experts, which all read the layer's input."""
    for w in params:

        def expert(c: jax.Array, v: Any, x: jax.Array = x) -> Any:
            return c + jnp.tanh(x @ v[0]) @ v[1], None

        x, _ = jax.lax.scan(expert, jnp.sin(x), w)
    return jnp.mean(x**2)


def named_block(w: Any, x: jax.Array) -> jax.Array:
    """A layer that gives checkpoint names to both products and to its activation."""
    up = checkpoint_name(x @ w[0], "up")
    act = checkpoint_name(jax.nn.gelu(up), "act")
    return x + jnp.tanh(checkpoint_name(act @ w[1], "down"))


def named(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = named_block(w, x)
    return jnp.mean(x**2)


def named_in_loop(params: Any, x: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(lambda c, w: (named_block(w, c), None), x, params)
    return jnp.mean(out**2)


def two_losses(params: Any, x: jax.Array) -> Any:
    """A second forward and backward pass, with the weights that the first updated."""
    value, grads = jax.value_and_grad(mlp)(params, x)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    again, more = jax.value_and_grad(mlp)(moved, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, moved, more), value + again


class Normed(nn.Module):
    """Layers with batch normalisation, whose statistics the forward pass updates."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each row to one output."""
        for _ in range(DEPTH):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
            x = nn.relu(x)
        return nn.Dense(1)(x)


def normed(state: Any, x: jax.Array) -> Any:
    params, stats = state

    def loss(p: Any) -> Any:
        out, changed = Normed().apply(
            {"params": p, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return jnp.mean((out - 1) ** 2), changed["batch_stats"]

    (value, made), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), made), value


def normed_state() -> Any:
    variables = Normed().init(jax.random.key(0), drawn(ROWS, WIDTH))
    return variables["params"], variables["batch_stats"]


X = drawn(ROWS, WIDTH, seed=5)
TOKENS = jnp.arange(ROWS * 2).reshape(ROWS, 2) % WORDS
# Each name maps to a step and its arguments.
CASES: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "mlp": (descent(mlp), (blocks(), X)),
    "dropout": (descent(dropout), (blocks(), X, jax.random.key(3))),
    "raw key": (descent(dropout), (blocks(), X, jax.random.PRNGKey(3))),
    "tied": (descent(tied), ((drawn(WORDS, WIDTH), blocks()), TOKENS)),
    "results": (descent(with_results, aux=True), (blocks(), X)),
    "checkpoint": (descent(checkpointed), (blocks(), X)),
    "loops": (descent(looping), (blocks(), X)),
    "named": (descent(named), (blocks(), X)),
    "scan": (descent(in_loop), (stacked(), X)),
    "scan backwards": (descent(backwards), (stacked(), X)),
    "scan with checkpoint": (descent(remembered), (stacked(), X)),
    "scan with results": (
        descent(loop_with_results, aux=True),
        (stacked(), X, jax.random.key(3)),
    ),
    "scans": (descent(encoder_decoder), ((stacked(2), stacked(3)), X)),
    "scans of one kind": (descent(two_views), (stacked(), X)),
    "taught": (descent(taught), (stacked(), X)),
    "experts": (descent(experts), ([stacked(2)] * 3, X)),
    "scan named": (descent(named_in_loop), (stacked(), X)),
    "two losses": (two_losses, (blocks(), X)),
    "batch norm": (normed, (normed_state(), X)),
}


def again(
    analysis: Analysis, layers: int | None, level: str = "full", count: int = 1
) -> Analysis:
    """The analysis of a step that recomputes its first `layers` layers, or all."""
    starts = layer_starts(analysis, count)
    number = len(starts) if layers is None else layers
    remat = Rematerialisation(layers=tuple(range(number)), starts=starts, level=level)
    return rematerialise(analysis, remat, count)


def analysed(name: str) -> Analysis:
    step, args = CASES[name]
    return analyse(step, args)


def flat(name: str) -> list[Any]:
    step, args = CASES[name]
    return [jnp.asarray(x) for x in open_arguments(step, args).arrays]


def results(analysis: Analysis, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The results of a program, evaluated equation by equation without compiling it."""
    with jax.disable_jit():  # iterations of loops are not compiled either
        found = evaluated(analysis.program, arrays)
    return [
        np.asarray(jax.random.key_data(x) if jax_compat.is_extended(x.dtype) else x)
        for x in map(jnp.asarray, found)
    ]
