"""Steps with layers, for tests of pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.cluster import Cluster
from autopar.planner.stages.layer_map import LayerMap, batch_inputs, layer_map
from autopar.planner.stages.submeshes import Submesh, submeshes
from autopar.planner.weights import partly
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.stages.layers import cluster_layers

WIDTH, BLOCKS, ROWS = 64, 6, 32
COUNTS = (1, 2, 4)
SCALES = np.array([1 / count for count in COUNTS])


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trained(loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def analysed(loss_of: Callable[..., jax.Array], params: Any, batch: Any) -> Analysis:
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    return analyse(trained(loss_of), (params, state, batch))


def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def residual(params: Any, x: jax.Array) -> jax.Array:
    for p in params:
        x = block(p, x)
    return jnp.mean(x**2)


def blocks(count: int = BLOCKS, width: int = WIDTH) -> list[Any]:
    return [
        {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
        for _ in range(count)
    ]


@functools.cache
def mlp() -> Analysis:
    """Equal blocks, with the mean square as loss."""
    return analysed(residual, blocks(), struct(ROWS, WIDTH))


def tied_loss(params: Any, tokens: jax.Array) -> jax.Array:
    table = params["table"].astype(jnp.bfloat16)
    x = table[tokens]
    for p in params["blocks"]:
        cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        x = block(cast, x)
    logits = (x @ table.T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return losses.mean()


@functools.cache
def tied() -> Analysis:
    """An embedding whose weights are also the output weights, in bfloat16."""
    params = {"table": struct(512, WIDTH), "blocks": blocks(3)}
    return analysed(tied_loss, params, struct(ROWS, 8, dtype=jnp.int32))


CASES: dict[str, Callable[[], Analysis]] = {"mlp": mlp, "tied": tied}


@functools.cache
def layers_of(case: str) -> LayerMap:
    """The layers of a case."""
    analysis = CASES[case]()
    batch = batch_inputs(analysis)
    starts = cluster_layers(analysis.program, analysis.graph, batch=batch)
    return layer_map(analysis, starts, batch)


@functools.cache
def on(case: str, cluster: str) -> tuple[Submesh, ...]:
    """The submeshes of a cluster, given by its text."""
    found = submeshes(CASES[case](), Cluster.parse(cluster), partly(4.0, 1.0))
    return tuple(found)
