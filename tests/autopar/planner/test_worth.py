"""Tests the speed-up and utilisation of plans against numbers by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest
from planner_harness import pricer_of
from planner_steps import mlp_batch, mlp_block, mlp_loss, mlp_params, training

import autopar
from autopar.cluster import Cluster
from autopar.cost.estimate import estimate
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.planner.experts import expert_plans
from autopar.planner.plan import plan_analysis
from autopar.planner.scheme import model_work, worth_of
from autopar.plans import Plan, Worth
from autopar.plans.records import Compression
from autopar.reports.worth import idle_texts, unused_text, worth_text
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.batch import BATCH, batch_tokens, samples
from autopar.units import count_text

# From small arrays to such whose work is worth splitting.
SCALE = 64
ROWS, WIDTH, HIDDEN, LAYERS = 64, 16, 32, 2
# Each layer's two products: forward, and backward for both operands; but nothing needs
# the gradient of the batch.
FLOPS = (LAYERS * 2 * 3 - 1) * 2 * ROWS * WIDTH * HIDDEN


def remat_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for p in params:
        x = jax.checkpoint(mlp_block)(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


@functools.cache
def analysed(loss: Any = mlp_loss, rows: int = ROWS) -> Analysis:
    params = mlp_params(WIDTH, HIDDEN, LAYERS)
    step, args = training(loss, params, mlp_batch(rows, WIDTH), optax.adam(1e-3))
    return analyse(step, args)


def batch_over(analysis: Analysis, axis: int, sizes: tuple[int, ...]) -> Worth:
    """Data parallelism over one axis; all other axes are unused."""
    strategies = tuple(
        tuple(
            (axis,) if analysis.node_labels.get(n.index, {}).get(f) == BATCH else ()
            for f in range(len(n.factors))
        )
        for n in analysis.contraction.nodes
    )
    assignment = Assignment(analysis, sizes, strategies, {})
    pricer = pricer_of(sizes)
    return worth_of(estimate(assignment, pricer), 1.0)


def test_one_device_costs_what_its_own_plan_does() -> None:
    analysis = analysed()
    many = plan_analysis(analysis, Cluster.parse("4:cpu"))
    one = plan_analysis(analysis, Cluster.parse("1:cpu"))
    assert many.worth
    assert one.worth
    assert many.worth.one_device_s == pytest.approx(one.predicted.step_s)
    assert one.worth.speed_up == pytest.approx(1.0)
    ratio = one.predicted.step_s / many.predicted.step_s
    assert many.worth.speed_up == pytest.approx(ratio)
    assert many.worth.efficiency == pytest.approx(ratio / 4)
    assert one.worth.scheme == "one device: nothing is split"


def test_a_step_that_does_not_fit_one_device_says_so() -> None:
    analysis = analysed()
    tiny = dataclasses.replace(Cluster.parse("4:cpu").device, memory_bytes=1000)
    cluster = dataclasses.replace(Cluster.parse("4:cpu"), device=tiny)
    mesh = cluster.mesh_shapes(1)[0]
    whole = Assignment(
        analysis,
        (4,),
        tuple(((),) * len(n.factors) for n in analysis.contraction.nodes),
        {},
    )
    pricer = Pricer(cluster, mesh)
    worth = worth_of(estimate(whole, pricer), 1.0)
    assert not worth.one_device_fits
    assert "if it held" in worth_text(worth)


@pytest.mark.parametrize("loss", [mlp_loss, remat_loss])
def test_rematerialised_products_count_once(loss: Any) -> None:
    work = model_work(analysed(loss))
    assert (work.flops, work.causal_flops, work.dtype) == (FLOPS, 0.0, "float32")


def test_a_slow_link_is_said_to_be_why_an_axis_is_unused() -> None:
    step, args = training(mlp_loss, mlp_params(256, 256), mlp_batch(64, 256))
    plan = autopar.plan(step, *args, cluster="2x1:cpu,network=1Mb/s")
    worth = plan.worth
    assert worth
    (axis,) = worth.unused_axes
    # A ring of two sends each byte once.
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp_params(256, 256)))
    assert axis.sums_s == pytest.approx(8 * nbytes / 1e6, rel=0.05)
    told = " ".join(idle_texts(plan))
    assert "sums of gradients: compression, a larger batch, local steps or" in told
    tried = Compression(mode="auto")
    told = " ".join(idle_texts(msgspec.structs.replace(plan, compression=tried)))
    assert "sums of gradients: a larger batch, local steps or links of at" in told


def test_an_unused_axis_is_used_from_the_told_speed_on() -> None:
    step, args = training(mlp_loss, mlp_params(256, 256), mlp_batch(64, 256))
    plan = autopar.plan(step, *args, cluster="2x1:cpu,network=1Mb/s")
    assert plan.worth
    (axis,) = plan.worth.unused_axes
    rate = 8e-6 * axis.pays_bytes_per_s
    assert f"{count_text(1e6 * rate)}b/s" in " ".join(idle_texts(plan))
    # Other splits than that of the rows pay from slower links on.
    for factor, unused in ((0.01, 1), (1.5, 0)):
        link = f"2x1:cpu,network={factor * rate:.6f}Mb/s"
        found = autopar.plan(step, *args, cluster=link)
        assert found.worth
        assert len(found.worth.unused_axes) == unused
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp_params(256, 256)))
    saved_s = plan.worth.one_device_s / 2
    assert axis.pays_bytes_per_s == pytest.approx(nbytes / saved_s, rel=0.1)


def test_utilisation_and_rates_follow_from_the_step() -> None:
    plan = plan_analysis(analysed(), Cluster.parse("4:cpu"))
    worth, device = plan.worth, Cluster.parse("4:cpu").device
    assert worth
    peak = 4 * device.peak("float32")
    assert worth.mfu == pytest.approx(FLOPS / (peak * plan.predicted.step_s))
    assert worth.rows_per_s == pytest.approx(ROWS / plan.predicted.step_s)
    assert (worth.rows, worth.tokens, worth.tokens_per_s) == (ROWS, 0, 0.0)


def test_codecs_change_the_rates_as_they_change_the_step() -> None:
    link = "2x2:cpu,network=1Mb/s"
    step, args = training(mlp_loss, mlp_params(64, 64), mlp_batch(64, 64))
    plan = autopar.plan(step, *args, cluster=link, compression="int8")
    assert plan.worth
    assert plan.worth.rows_per_s == pytest.approx(64 / plan.predicted.step_s)
    ratio = plan.worth.one_device_s / plan.predicted.step_s
    assert plan.worth.speed_up == pytest.approx(ratio)


@pytest.mark.parametrize(("axis", "idle", "needed"), [(1, "x (2)", 4), (0, "y (4)", 2)])
def test_an_axis_that_splits_nothing_is_unused(
    axis: int, idle: str, needed: int
) -> None:
    worth = batch_over(analysed(), axis, (2, 4))
    assert [f"{a.name} ({a.size})" for a in worth.unused_axes] == [idle]
    assert worth.needed_devices == needed
    plan = plan_analysis(analysed(), Cluster.parse("4:cpu"))
    (first, *_) = idle_texts(msgspec.structs.replace(plan, worth=worth))
    assert first == f"axis {idle} is unused: {needed} devices would be as fast"
    assert unused_text(worth) == f"{idle} unused"
    other = worth.axes[axis]
    assert not other.is_unused
    # The update is done by all devices alike.
    assert 0 < other.repeated < 1
    # Work that is repeated takes as long without the axis, the rest size times as long.
    without = other.repeated + other.size * (1 - other.repeated)
    assert other.shortens == pytest.approx(1 - 1 / without)
    assert worth.axes[1 - axis].shortens == 0.0
    assert worth.scheme.startswith("nothing over x") is (axis == 1)
    assert f"data parallel over {other.name} ({other.size})" in worth.scheme


def test_parameters_that_belong_to_a_part_of_the_batch_are_experts() -> None:
    def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.einsum("bed,edf->bef", batch, w) ** 2)

    batch = jnp.ones((64, 4, 16))
    step, args = training(loss, jnp.ones((4, 16, 32)), batch)
    analysis = analyse(step, args)
    strategies = tuple(
        tuple((0,) if size == 4 else () for size, _ in node.factors)
        for node in analysis.contraction.nodes
    )
    assignment = Assignment(analysis, (4,), strategies, {})
    pricer = pricer_of((4,))
    worth = worth_of(estimate(assignment, pricer), 1.0)
    assert worth.scheme == "expert parallel over x (4)"


def test_usual_plans_are_called_by_their_names() -> None:
    made = training(mlp_loss, mlp_params(), mlp_batch(), optax.adam(1e-3))

    def larger(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([SCALE * n for n in x.shape], x.dtype)

    analysis = analyse(made[0], jax.tree.map(larger, made[1]))
    found = {
        e.name: e.candidate
        for e in expert_plans(analysis, Cluster.parse("4:cpu"), seconds=5.0)
        if e.mesh in {"data=4", "tensor=4"}
    }
    expected = {
        "data parallel": "data parallel over data (4)",
        "ZeRO-1": "ZeRO-1 over data (4)",
        "FSDP (ZeRO-3)": "FSDP (ZeRO-3) over data (4)",
        "tensor parallel": "Megatron tensor parallel over tensor (4)",
    }
    for name, scheme in expected.items():
        made = found[name]
        assert made is not None
        pricer = dataclasses.replace(made.pricer, mesh=made.mesh)
        named = dataclasses.replace(made.estimate, pricer=pricer)
        worth = worth_of(named, made.step_s)
        assert worth.scheme == scheme


def lookup_step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(table: jax.Array) -> jax.Array:
        rows = table[ids[:, :-1]]
        return jnp.mean(rows**2)

    value, grad = jax.value_and_grad(loss)(table)
    return table - grad, value


def test_tokens_are_those_that_are_looked_up() -> None:
    table = jax.ShapeDtypeStruct((100, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((6, 5), jnp.int32)
    graph = analyse(lookup_step, (table, ids)).graph
    assert (samples(graph), batch_tokens(graph)) == (6, 6 * 4)


def test_rows_are_those_of_the_largest_input() -> None:
    def step(w: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
        noise = key[0].astype(jnp.float32) * 0.0
        return w - jax.grad(lambda w: jnp.mean((x @ w + noise) ** 2))(w)

    shapes = [((16, 16), jnp.float32), ((2,), jnp.uint32), ((24, 16), jnp.float32)]
    args = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    graph = analyse(step, args).graph
    assert (samples(graph), batch_tokens(graph)) == (24, 0)


def test_plans_of_earlier_versions_know_nothing_and_are_not_edited() -> None:
    plan = plan_analysis(analysed(), Cluster.parse("4:cpu"))
    data = plan.to_json()
    del data["worth"]
    old = Plan.from_json(json.dumps(data))
    assert old.worth is None
    assert not old.changed_parts
    assert "worth" not in str(old)
    assert Plan.from_json(json.dumps(plan.to_json())) == plan


@pytest.mark.parametrize("shape", [(), (ROWS,), (ROWS, 2)])
def test_random_keys_in_the_batch_are_no_tokens(shape: tuple[int, ...]) -> None:
    """Typed keys have a dtype of JAX's own, which has no kind."""

    def step(state: jax.Array, batch: Any) -> jax.Array:
        keys = jnp.ravel(batch["key"])
        noise = jax.vmap(lambda k: jax.random.normal(k, state.shape))(keys)
        return state - noise.mean(0) - (batch["x"] @ state[:, None]).mean()

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), max(1, 2 * ROWS)))
    key = jax.ShapeDtypeStruct(shape, keys.dtype)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    state = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    found = analyse(step, (state, {"x": x, "key": key}))
    assert batch_tokens(found.graph) == 0
