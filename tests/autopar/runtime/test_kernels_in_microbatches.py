"""Tests kernels and indices with microbatches: blocks stay whole, or are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import autopar
from autopar.errors import PlanError


def by_block(x: Any) -> Any:
    """A kernel that subtracts from each row the mean of the four rows of its block."""

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
    with pytest.raises(PlanError, match="no option helps"):
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


def _tanh(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...])


def _of_columns(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...]) + 0.0 * pl.program_id(0)


def _centred(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...] - jnp.sum(x[...], 0))


def _scaled(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...]) * x.shape[0]


def _turned(x: Any, out: Any) -> None:
    out[...] = jnp.tanh(x[...][::-1])


def _kernel(body: Any, rows: Any, columns: int, by: int) -> Any:
    """A kernel with blocks of rows and columns, and a grid along one of them."""

    def call(x: Any) -> Any:
        block = (rows(len(x)), columns)

        def at(i: Any) -> Any:
            return (i, 0) if by == 0 else (0, i)

        spec = pl.BlockSpec(block, at)
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[by] // block[by],),
            in_specs=[spec],
            out_specs=spec,
            interpret=True,
        )(x)

    return call


def _whole(body: Any) -> Any:
    return lambda x: pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


def _partitioned(function: Any) -> Any:
    made = custom_partitioning(function)
    made.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            function,
            result.sharding,
            tuple(x.sharding for x in args),
        ),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    return made


def _of_shards(function: Any, *more: Any) -> Any:
    auto = (jax.sharding.AxisType.Auto,)
    rows = jax.sharding.PartitionSpec("rows")

    def call(x: Any) -> Any:
        mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows)
        return mapped(x, *more)

    return call


def _tanh_step(call: Any) -> Any:
    function = jax.custom_vjp(call)
    function.defvjp(lambda x: ((y := call(x)), y), lambda y, ct: (ct * (1 - y * y),))

    def step(w: Any, x: Any) -> Any:
        loss_of = jax.value_and_grad(lambda w: jnp.mean((function(x @ w) - 1.0) ** 2))
        loss, grad = loss_of(w)
        return w - 0.1 * grad, loss

    return step


APART = {
    "no grid": _whole(_tanh),
    "right-hand sides": lambda x: jnp.linalg.solve(4 * jnp.eye(8) + 1, x.T).T,
    "grid over columns": _kernel(_of_columns, lambda n: n, 4, 1),
    "blocks that grow": _kernel(_tanh, lambda n: n // 4, 8, 0),
    "smaller blocks": _kernel(_tanh, lambda n: min(n, 16), 8, 0),
    "custom_partitioning": _partitioned(jnp.tanh),
    "shard_map": _of_shards(jnp.tanh),
    "number for each shard": _of_shards(lambda x, n: x * n[0], jnp.arange(1.0, 3.0)),
}
TOGETHER = {
    "sum": (_whole(_centred), "needs a sum over the batch"),
    "turned": (_whole(_turned), "brings rows together"),
    "number of rows": (_whole(_scaled), "reads the number of rows"),
    "blocks that ask": (
        _kernel(_of_columns, lambda n: n // 4, 8, 0),
        "blocks grow with the rows",
    ),
    "partitioned sum": (_partitioned(lambda x: x - x.sum(0)), "needs a sum"),
    "shards": (
        _of_shards(lambda x: x * jax.lax.axis_index("rows")),
        "'axis_index'.* is about the shards of all devices",
    ),
    "rows of shards": (
        _of_shards(lambda x: x - jax.lax.psum(x, "rows")),
        "rows of several shards are added up",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_a_kernel_whose_rows_stay_apart_runs(name: str) -> None:
    draw = np.random.default_rng(0)
    w, x = (draw.standard_normal((n, 8)).astype(np.float32) for n in (8, 32))
    step = _tanh_step(APART[name])
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=4, donate=False)

    for found, want in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("sums", ["rows", "width"])
def test_shards_may_add_up_over_devices(sums: str) -> None:
    """Gradients over those that hold rows, and products over those that hold none."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    specs, out = (P(), P("i")), P("i")
    if sums == "width":
        specs, out = (P("i"), P(None, "i")), P()

    def model(w: Any, x: Any) -> Any:
        def shard(w: Any, x: Any) -> Any:
            return jax.lax.psum(x @ w, "i") if sums == "width" else jnp.tanh(x @ w)

        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out)(w, x)

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((model(w, x) - 1) ** 2))(w)
        return w - 0.1 * grad, loss

    draw = np.random.default_rng(0)
    w, x = (draw.standard_normal((n, 8)).astype(np.float32) for n in (8, 32))
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=4, donate=False)

    for found, want in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)
    assert not run.plan.local


@pytest.mark.parametrize("name", TOGETHER)
def test_a_kernel_that_brings_rows_together_is_refused(name: str) -> None:
    call, reason = TOGETHER[name]
    arrays = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 32)]
    with pytest.raises(PlanError, match=rf"{reason}.* coupled=\"microbatch\""):
        autopar.plan(_tanh_step(call), *arrays, cluster="2:cpu", microbatches=4)


def test_a_loop_over_parts_of_the_batch_that_adds_up_is_exact() -> None:
    def loss_of(w: Any, x: Any) -> Any:
        parts = x.reshape(-1, 4, x.shape[1])

        def add(total: Any, part: Any) -> Any:
            return total + jnp.mean(jnp.tanh(part @ w) ** 2), None

        return jax.lax.scan(add, 0.0, parts)[0] / len(parts)

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        return w - 0.1 * grad, loss

    draw = np.random.default_rng(0)
    w, x = (draw.standard_normal((n, 8)).astype(np.float32) for n in (8, 32))
    run = autopar.parallelize(step, cluster="2:cpu", microbatches=4, donate=False)

    for found, want in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("coupled", ["refuse", "microbatch"])
def test_a_loop_in_which_a_row_needs_those_before_it_is_refused(coupled: Any) -> None:
    def loss_of(w: Any, x: Any) -> Any:
        def turn(h: Any, row: Any) -> Any:
            h = jnp.tanh(h + row @ w)
            return h, h

        return jnp.mean(jax.lax.scan(turn, jnp.zeros(8), x)[1])

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        return w - 0.1 * grad, loss

    arrays = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 32)]
    with pytest.raises(PlanError, match="a row needs those before it"):
        autopar.plan(step, *arrays, cluster="2:cpu", microbatches=4, coupled=coupled)


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return x @ w


def product_backward(read: Any, ct: Any) -> Any:
    """The gradient of the weights by a kernel that is not analysed."""
    x, w = read
    out = jax.ShapeDtypeStruct(w.shape, w.dtype)
    grad = jax.pure_callback(lambda a, b: np.asarray(a).T @ np.asarray(b), out, x, ct)
    return ct @ w.T, grad


product.defvjp(lambda x, w: (x @ w, (x, w)), product_backward)


def test_what_an_opaque_kernel_makes_of_gradients_adds_up() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            return jnp.mean(jnp.sin(product(x, w)) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    w, x = jnp.full((8, 4), 0.1), np.random.default_rng(0).standard_normal((16, 8))
    x = x.astype(np.float32)
    options: dict[str, Any] = {"cluster": "2:cpu", "microbatches": 4}
    with pytest.raises(PlanError, match="coupled="):
        autopar.parallelize(step, **options)(w, x)
    planned = autopar.parallelize(step, **options, coupled="microbatch", donate=False)
    for got, want in zip(planned(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5)
