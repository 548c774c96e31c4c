"""Kernels and indices under microbatches: blocks stay together, or are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autopar
from autopar.errors import PlanError


def by_block(x: Any) -> Any:
    """A kernel that takes from each row the mean of the four rows of its block."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        block = x_ref[...]
        out_ref[...] = block - jnp.mean(block, 0, keepdims=True)

    spec = pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (x.shape[0] // 4,)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )(x)


centred = jax.custom_vjp(by_block)
centred.defvjp(lambda x: (by_block(x), None), lambda _, ct: (by_block(ct),))


def kernel_step(w: Any, x: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return jnp.mean((centred(x @ w) - 1.0) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grad, loss


def graph_step(w: Any, graph: Any) -> Any:
    def loss_of(w: Any) -> Any:
        sent = jnp.tanh(graph["nodes"][graph["from"]] @ w)
        got = jax.ops.segment_sum(sent, graph["to"], len(graph["nodes"]))
        return jnp.mean(got**2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grad, loss


def test_a_kernel_has_whole_blocks_of_rows() -> None:
    draw = np.random.default_rng(0)
    w, x = (draw.standard_normal((n, 8)).astype(np.float32) for n in (8, 32))
    run = autopar.parallelize(
        kernel_step, cluster="2:cpu", microbatches=4, donate=False
    )

    for found, want in zip(run(w, x), jax.jit(kernel_step)(w, x), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("coupled", ["refuse", "microbatch"])
def test_edges_to_nodes_of_other_microbatches_are_refused(coupled: Any) -> None:
    edges = jax.ShapeDtypeStruct((256,), jnp.int32)
    nodes = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    graph = {"nodes": nodes, "from": edges, "to": edges}
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    reason = "coupled=" if coupled == "refuse" else "no option helps"
    with pytest.raises(PlanError, match=reason):
        autopar.plan(
            graph_step, w, graph, cluster="2:cpu", microbatches=4, coupled=coupled
        )


def test_a_foreign_call_needs_the_option_that_couples_microbatches() -> None:
    def called(x: Any) -> Any:
        return jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    foreign = jax.custom_vjp(called)
    foreign.defvjp(lambda x: (called(x), None), lambda _, ct: (ct,))

    def step(w: Any, x: Any) -> Any:
        loss_of = jax.value_and_grad(lambda w: jnp.mean(foreign(x @ w) ** 2))
        loss, grad = loss_of(w)
        return w - 0.1 * grad, loss

    arrays = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 32)]
    with pytest.raises(PlanError, match=r"'ffi_call'.* coupled=\"microbatch\""):
        autopar.plan(step, *arrays, cluster="2:cpu", microbatches=4)
    plan = autopar.plan(
        step, *arrays, cluster="2:cpu", microbatches=4, coupled="microbatch"
    )
    assert any("ffi_call" in line for line in plan.local)
