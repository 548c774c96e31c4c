"""Tests that parameters read in bfloat16 are gathered in bfloat16, once per step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import Cluster
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import Candidate
from autopar.planner.recipes import masters_of, recipes, restriction_of
from autopar.planner.search import candidate_meshes, search
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import InputRole

CLUSTER = Cluster.parse("8:h100")
WIDTH, ROWS = 1024, 32768


def convolved(params: Any, x: jax.Array) -> jax.Array:
    kernel = params["kernel"].astype(jnp.bfloat16)
    dims = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(
        x[:, None], kernel, (1,), "SAME", dimension_numbers=dims
    )
    return jax.nn.gelu(y[:, 0]) @ params["out"].astype(jnp.bfloat16)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["in"].astype(jnp.bfloat16))
    return hidden @ params["out"].astype(jnp.bfloat16)


def workload(model: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """A step with Adam on float32 parameters, whose model computes in bfloat16."""
    optimizer = optax.adam(1e-3)

    def step(params: Any, moments: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            out = model(params, batch.astype(jnp.bfloat16))
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {name: struct(shape) for name, shape in shapes.items()}
    moments = jax.eval_shape(optimizer.init, params)
    return step, (params, moments, struct((ROWS, WIDTH)))


CASES = {
    "mlp": (mlp, {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}),
    "convolution": (
        convolved,
        {"kernel": (3, WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)},
    ),
}


@functools.cache
def analysis(name: str) -> Analysis:
    return analyse(*workload(*CASES[name]))


def expert(name: str, recipe: str) -> Candidate:
    pricer = Pricer(CLUSTER, candidate_meshes(CLUSTER)[0])
    rule = next(r for r in recipes(1) if r.name == recipe)
    limit = restriction_of(analysis(name), rule, pricer)
    return solve_mesh(analysis(name), pricer, limit)


def gathered(found: Candidate) -> set[str]:
    """The dtypes of the gathered arrays."""
    values = found.assignment.graph.values
    return {
        str(values[c.value].dtype)
        for c in found.collectives
        if c.step.kind == "all_gather"
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_optimizer_may_hold_parameters_that_are_read_narrower(name: str) -> None:
    graph, homes = analysis(name).graph, analysis(name).contraction.homes
    params = {
        homes[i.value].node for i in graph.inputs if i.role is InputRole.PARAMETER
    }
    assert masters_of(analysis(name)) == params


def sent_once(found: Candidate) -> float:
    """Bytes that a plan sends if a sum of which parts are kept is scattered.

    A plan may choose a whole sum because it shares no message with scattered sums, and
    can be hidden sooner.
    """
    homes, values = found.assignment.contraction.homes, found.assignment.graph.values
    more = 0.0
    for c in found.collectives:
        if c.step.kind == "all_reduce" and values[c.value].shape and c.value in homes:
            more += c.sent_bytes(found.pricer) / 2
    return found.communication_bytes - more


@pytest.mark.parametrize("name", sorted(CASES))
def test_zero_1_sends_no_more_than_data_parallelism(name: str) -> None:
    plain, zero = expert(name, "data parallel"), expert(name, "ZeRO-1")
    assert plain.communication_bytes > 0
    assert gathered(zero) == {"bfloat16"}
    arrays = [c.value for c in zero.collectives if c.step.kind == "all_gather"]
    assert len(arrays) == len(set(arrays)) == 2  # each parameter once
    assert sent_once(zero) <= plain.communication_bytes * (1 + 1e-6)
    assert zero.cost.optimizer_bytes <= plain.cost.optimizer_bytes / 7.9


@pytest.mark.parametrize("name", sorted(CASES))
def test_so_does_what_the_search_finds(name: str) -> None:
    plain = expert(name, "data parallel")
    found = search(analysis(name), CLUSTER, experts=False).best
    zero = expert(name, "ZeRO-1")
    assert found.step_s <= zero.step_s * (1 + 5e-3)
    assert found.communication_bytes <= plain.communication_bytes * (1 + 1e-6)
    assert gathered(found) <= {"bfloat16"}


def test_parameters_that_are_read_as_they_are_stay_whole() -> None:
    def model(params: Any, x: jax.Array) -> jax.Array:
        scale = 1.0 + jnp.sum(params["in"] ** 2)
        return mlp(params, x) / scale.astype(jnp.bfloat16)

    found = analyse(*workload(model, CASES["mlp"][1]))
    homes, masters = found.contraction.homes, masters_of(found)
    paths = {
        i.path
        for i in found.graph.inputs
        if i.role is InputRole.PARAMETER and homes[i.value].node in masters
    }
    assert paths == {"params/out"}


def test_the_compiler_gathers_the_narrow_type() -> None:
    step, args = workload(*CASES["mlp"])
    pins = {f"params/{name}": PartitionSpec("data") for name in ("in", "out")}
    plan = autopar.plan(step, *args, cluster=CLUSTER, pins=pins)
    assert plan.inputs["params/in"] != ((), ())
    audited = autopar.audit(step, *args, plan=plan)
    assert audited.agrees
    # Two matrices in bfloat16, of which a device lacks seven parts of eight.
    assert audited.shardy["all_gather"] == 7 / 8 * 2 * 2 * 4 * WIDTH * WIDTH
