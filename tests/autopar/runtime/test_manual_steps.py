"""Tests that a step's own shard_map keeps its meaning under a plan, or is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import autopar


def mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def tensor_parallel(a: Any, b: Any, x: Any) -> Any:
    """Two products in a loop of two rounds; the second one is summed over shards."""

    def body(_: int, x: Any) -> Any:
        return jax.lax.psum(jax.nn.relu(x @ a) @ b, "tp")

    return jax.lax.fori_loop(0, 2, body, x)


def numbered(a: Any, b: Any, x: Any) -> Any:
    """Local code that depends on the number of its shard."""
    return jax.lax.psum(x @ a @ b, "tp") + jax.lax.axis_index("dp")


def training(body: Any, own: Mesh) -> Any:
    mapped = jax.shard_map(
        body,
        mesh=own,
        in_specs=(P(None, "tp"), P("tp", None), P("dp", None)),
        out_specs=P("dp", None),
    )

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (mapped(params["a"], params["b"], x) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((16, 32), (32, 16), (32, 16))
    a, b, x = (0.3 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    return {"a": a, "b": b}, x


@pytest.mark.parametrize("body", [tensor_parallel, numbered])
@pytest.mark.parametrize("cluster", ["2x4:cpu", "4x2:cpu"])
def test_local_code_runs_on_the_axes_of_the_plan(body: Any, cluster: str) -> None:
    """The plan's axes have other names, and on 4x2 another order."""
    step, given = training(body, mesh(dp=2, tp=4)), arguments()
    planned = autopar.parallelize(step, cluster=cluster, seconds=1, donate=False)

    got = planned(*given)

    for mine, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*given)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert planned.plan.unsupported_ops == ()
    assert any("its own psum" in text for text in planned.plan.assumed)


def test_the_work_of_the_body_is_counted() -> None:
    step, given = training(numbered, mesh(dp=2, tp=4)), arguments()
    plan = autopar.plan(step, *given, cluster="2x4:h100", seconds=1)
    larger = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4096, 4096), x.dtype), given)
    wide = autopar.plan(step, *larger, cluster="2x4:h100", seconds=1)

    flops = 3 * 2 * 2 * 4096**3  # two products, forward and twice backward
    assert wide.predicted.compute_s > flops / 8 / 495e12
    assert wide.predicted.compute_s > 5 * plan.predicted.compute_s


@pytest.mark.parametrize(("cluster", "max_axes"), [("2x2:cpu", None), ("8:cpu", 1)])
def test_a_mesh_without_its_axes_is_refused(cluster: str, max_axes: int | None) -> None:
    step = training(numbered, mesh(dp=2, tp=4))

    with pytest.raises(autopar.PlanError, match=r"shard_map over dp=2 tp=4.*2 and 4"):
        autopar.plan(step, *arguments(), cluster=cluster, max_axes=max_axes, seconds=1)


def test_an_axis_that_no_array_names_is_refused() -> None:
    own = mesh(dp=2, tp=4)
    mapped = jax.shard_map(
        lambda x: jax.lax.pcast(x, "tp", to="varying") * 1.0,
        mesh=own,
        in_specs=P("dp"),
        out_specs=P("dp"),
        check_vma=False,
    )

    with pytest.raises(autopar.PlanError, match="none of its in_specs"):
        autopar.plan(lambda x: mapped(x) + 1, jnp.ones((8, 8)), cluster="2x4:cpu")
