"""Tests of `autopar_passes.stages.layers`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.trace import trace
from autopar_passes.stages.layers import cluster_layers, forward_chain

WIDTH, ROWS = 8, 16


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def trained(loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def residual(params: Any, x: jax.Array) -> jax.Array:
    """Six blocks whose hidden arrays are four times as wide as their results."""
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def blocks(count: int) -> list[Any]:
    return [(struct(WIDTH, 4 * WIDTH), struct(4 * WIDTH, WIDTH)) for _ in range(count)]


def clustered(step: Callable[..., Any], *args: Any, **options: Any) -> list[int]:
    """The positions of layers' first equations within the forward pass."""
    traced = trace(step, args)
    graph = step_graph(traced)
    batch = {i.value for i in graph.inputs if i.role is InputRole.BATCH}
    starts = cluster_layers(traced.program, graph, batch=batch, **options)
    chain = forward_chain(traced.program, graph, batch)
    return [chain.equations.index(start) for start in starts]


def test_each_repeat_is_a_layer() -> None:
    """Six blocks are six layers, all cut at the same place."""
    found = clustered(trained(residual), blocks(6), struct(ROWS, WIDTH))
    assert len(found) == 6
    assert len(set(np.diff(found))) == 1


def test_several_repeats_make_a_layer_where_there_may_be_few() -> None:
    found = clustered(trained(residual), blocks(6), struct(ROWS, WIDTH), most=3)
    assert len(found) == 3
    assert len(set(np.diff(found))) == 1


def test_only_what_the_next_block_reads_crosses() -> None:
    """Wide hidden arrays stay within a layer; a value is counted once."""
    traced = trace(trained(residual), (blocks(6), struct(ROWS, WIDTH)))
    graph = step_graph(traced)
    batch = {i.value for i in graph.inputs if i.role is InputRole.BATCH}
    starts = cluster_layers(traced.program, graph, batch=batch)
    chain = forward_chain(traced.program, graph, batch)
    crossing = [chain.crossing[chain.equations.index(s)] for s in starts[1:]]
    assert crossing == [4 * ROWS * WIDTH] * 5


def test_what_depends_on_parameters_alone_does_not_cross() -> None:
    """A cast weight that a late layer reads is made there."""

    def tied(params: Any, x: jax.Array) -> jax.Array:
        table = params[0].astype(jnp.bfloat16)
        for w in params[1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x.astype(jnp.bfloat16) @ table).astype(jnp.float32) ** 2)

    params = (struct(WIDTH, 64), [struct(WIDTH, WIDTH) for _ in range(4)])
    traced = trace(trained(tied), (params, struct(ROWS, WIDTH)))
    graph = step_graph(traced)
    batch = {i.value for i in graph.inputs if i.role is InputRole.BATCH}
    chain = forward_chain(traced.program, graph, batch)
    # Behind each of the three operators of four layers, their one array.
    assert list(chain.crossing[1:13]) == [4 * ROWS * WIDTH] * 12


def test_layers_that_do_not_repeat_have_about_equal_work() -> None:
    widths = [8, 32, 16, 64, 8, 24, 48, 8]

    def uneven(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [struct(a, b) for a, b in itertools.pairwise(widths)]
    step = trained(uneven)
    traced = trace(step, (params, struct(ROWS, 8)))
    graph = step_graph(traced)
    batch = {i.value for i in graph.inputs if i.role is InputRole.BATCH}
    chain = forward_chain(traced.program, graph, batch)
    found = clustered(step, params, struct(ROWS, 8), layers=3)
    work = np.add.reduceat(chain.work, found)
    assert len(found) == 3
    assert work.max() < 0.5 * work.sum()


def test_a_step_without_a_batch_has_no_layers() -> None:
    def step(w: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(w**2))(w)

    assert clustered(step, struct(WIDTH)) == []
