"""Tests that expert plans follow the rules after which they are named."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import step_forms as forms
from jax.sharding import PartitionSpec
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster
from autopar.cluster import LinkSpec, MeshShape
from autopar.cost.estimate import estimate
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import exchange_axes
from autopar.planner.candidate import Candidate
from autopar.planner.experts import Expert, expert_plans
from autopar.planner.hints import pin_restriction, pinned_layouts
from autopar.planner.problem import Within
from autopar.planner.recipes import (
    Recipe,
    expert_rules,
    least_bytes,
    recipes,
    restriction_of,
)
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import InputRole

CLUSTER = forms.cheap("2x4:cpu")


@functools.cache
def analysis() -> Analysis:
    params = mlp_params(width=32, hidden=64, layers=2)
    return analyse(*training(mlp_loss, params, mlp_batch(32, 32), optax.adam(1e-2)))


@functools.cache
def experts() -> dict[str, Expert]:
    return {e.name: e for e in expert_plans(analysis(), CLUSTER, seconds=5)}


def parts(name: str, role: InputRole, *, matrices: bool = False) -> list[int]:
    """Into how many parts an expert plan splits each input of a role."""
    candidate = experts()[name].candidate
    assert candidate is not None
    assignment = candidate.assignment
    out: list[int] = []
    for given in analysis().graph.inputs:
        shape = analysis().graph.values[given.value].shape
        if given.role is role and (len(shape) > 1 or not matrices):
            layout = assignment.home_layout(given.value)
            out.append(math.prod(assignment.sizes[a] for d in layout for a in d))
    assert out
    return out


def rows_split(name: str) -> set[int]:
    """Over how many devices the rows of layers' results are split."""
    candidate = experts()[name].candidate
    assert candidate is not None
    assignment = candidate.assignment
    found: set[int] = set()
    for node, strategy in zip(
        analysis().contraction.nodes, assignment.strategies, strict=True
    ):
        op = analysis().graph.operators[node.root]
        if node.kind == "contraction" and "transpose" not in op.module:
            rows = [k for k, (size, _) in enumerate(node.factors) if size == 32]
            found |= {
                math.prod(assignment.sizes[a] for a in strategy[k]) for k in rows[:1]
            }
    return found


def test_every_recipe_is_solved() -> None:
    assert set(experts()) == {r.name for r in recipes(2) if not r.sequence}
    for expert in experts().values():
        assert expert.candidate is not None, expert.reason
        assert expert.candidate.step_s > 0


def test_data_parallel_keeps_state_whole() -> None:
    assert set(parts("data parallel", InputRole.PARAMETER)) == {1}
    assert set(parts("data parallel", InputRole.OPTIMIZER_STATE)) == {1}
    assert set(parts("data parallel", InputRole.BATCH)) == {8}


def test_zero_1_splits_optimizer_state_only() -> None:
    assert set(parts("ZeRO-1", InputRole.PARAMETER)) == {1}
    assert set(parts("ZeRO-1", InputRole.OPTIMIZER_STATE, matrices=True)) == {8}


def test_fsdp_splits_parameters_and_batch() -> None:
    name = "FSDP (ZeRO-3)"
    assert set(parts(name, InputRole.PARAMETER, matrices=True)) == {8}
    assert set(parts(name, InputRole.OPTIMIZER_STATE, matrices=True)) == {8}
    assert set(parts(name, InputRole.BATCH)) == {8}


def test_tensor_parallel_never_splits_the_batch() -> None:
    candidate = experts()["tensor parallel"].candidate
    assert candidate is not None
    for given in analysis().graph.inputs:
        if given.role is InputRole.BATCH:
            layout = candidate.assignment.home_layout(given.value)
            assert layout[0] == ()
    assert max(parts("tensor parallel", InputRole.PARAMETER, matrices=True)) == 8


def test_data_x_tensor_gives_each_axis_its_job() -> None:
    candidate = experts()["data x tensor"].candidate
    assert candidate is not None
    for given in analysis().graph.inputs:
        layout = candidate.assignment.home_layout(given.value)
        used = {a for d in layout for a in d}
        if given.role is InputRole.BATCH:
            assert 1 not in layout[0]
        elif given.role is InputRole.PARAMETER:
            assert 0 not in used


def test_data_parallel_sums_gradients_only() -> None:
    """What it sends is the gradients once, by an all-reduce (and the loss)."""
    candidate = experts()["data parallel"].candidate
    assert candidate is not None
    graph = analysis().graph
    gradients = sum(
        graph.values[i.value].nbytes
        for i in graph.inputs
        if i.role is InputRole.PARAMETER
    )
    assert {c.step.kind for c in candidate.collectives} == {"all_reduce"}
    summed = sum(c.nbytes * c.step.fraction for c in candidate.collectives)
    axes = {c.step.axes for c in candidate.collectives}
    times = 1 if axes == {(0, 1)} else 2
    assert gradients <= summed <= times * (gradients + 1024)


@pytest.mark.parametrize("layers", [(), (3,)], ids=["alone", "scanned"])
def test_each_axis_in_turn_splits_experts(layers: tuple[int, ...]) -> None:
    def layer(x: Any, params: Any) -> Any:
        x = jnp.tanh(jnp.einsum("ebd,edf->ebf", x, params["up"]))
        return jnp.einsum("ebf,efd->ebd", x, params["down"]), None

    def loss(params: Any, batch: Any) -> Any:
        run = layer if not layers else lambda x, p: jax.lax.scan(layer, x, p)
        return jnp.mean(run(batch["x"], params)[0] ** 2)

    shape = jax.ShapeDtypeStruct
    params = {
        "up": shape((*layers, 8, 32, 64), "float32"),
        "down": shape((*layers, 8, 64, 32), "float32"),
    }
    batch = {"x": shape((8, 128, 32), "float32")}
    step = analyse(*training(loss, params, batch, optax.sgd(1e-2)))
    pricer = Pricer(CLUSTER, candidate_meshes(CLUSTER)[-1])
    rules = list(expert_rules(step, len(pricer.sizes)))
    assert len(rules) == 2
    for axis, (_, rule) in enumerate(rules):
        found = solve_mesh(step, pricer, rule).assignment
        for given in step.graph.inputs:
            if given.role is InputRole.PARAMETER:
                layout = found.home_layout(given.value)
                assert axis in layout[len(layers)]
                assert {a for own in layout for a in own} == {0, 1}
    assert not list(expert_rules(analysis(), 2))


def test_an_impossible_recipe_has_a_reason() -> None:
    """Data parallelism keeps all state on every device; here it does not fit."""
    graph = analysis().graph
    state = sum(
        graph.values[i.value].nbytes
        for i in graph.inputs
        if i.role is not InputRole.BATCH
    )
    small = forms.with_memory(CLUSTER, int(0.9 * state))
    found = {e.name: e for e in expert_plans(analysis(), small, seconds=5)}
    assert found["data parallel"].candidate is None
    assert "no plan fits" in found["data parallel"].reason
    assert found["FSDP (ZeRO-3)"].candidate is not None


def test_one_axis_has_no_mixed_recipes() -> None:
    names = {e.name for e in expert_plans(analysis(), Cluster.parse("2:cpu"))}
    assert names == {r.name for r in recipes(1) if not r.sequence}


def test_state_may_be_split_within_some_axes_alone() -> None:
    """ZeRO-1 within a host: the outer axis splits the batch and no state."""
    pricer = Pricer(CLUSTER, candidate_meshes(CLUSTER)[-1])
    rule = Recipe("ZeRO-1 within", (0, 1), shard_optimizer=True, within=(1,))
    limit = restriction_of(analysis(), rule, pricer)
    found = solve_mesh(analysis(), pricer, limit).assignment
    axes: dict[InputRole, set[int]] = {}
    for given in analysis().graph.inputs:
        layout = found.home_layout(given.value)
        axes.setdefault(given.role, set()).update(a for d in layout for a in d)
    assert axes[InputRole.OPTIMIZER_STATE] == {1}
    assert axes[InputRole.PARAMETER] == set()


def test_no_plan_of_a_rule_holds_less_state_than_is_said() -> None:
    pricer = Pricer(CLUSTER, candidate_meshes(CLUSTER)[-1])
    for rule in recipes(len(pricer.mesh.axes)):
        limit = restriction_of(analysis(), rule, pricer)
        found = solve_mesh(analysis(), pricer, limit)
        held = found.cost.parameter_bytes + found.cost.optimizer_bytes
        assert 0 < least_bytes(analysis(), limit, pricer) <= held * (1 + 1e-9)


def test_pins_count_in_what_a_rule_must_hold() -> None:
    """Data parallelism keeps state whole, but for what is pinned to be split."""
    mesh = candidate_meshes(CLUSTER)[-1]
    pricer = Pricer(CLUSTER, mesh)
    spec = PartitionSpec(None, mesh.names[-1])
    pins = pinned_layouts(analysis(), {"*/up": spec, "*/down": spec}, mesh)
    rule = restriction_of(analysis(), next(iter(recipes(2))), pricer)
    pinned = Within(pin_restriction(analysis(), pins), rule)
    found = solve_mesh(analysis(), pricer, pinned)
    held = found.cost.parameter_bytes + found.cost.optimizer_bytes
    least = least_bytes(analysis(), pinned, pricer)
    assert least == pytest.approx(held)
    assert least < 0.5 * least_bytes(analysis(), rule, pricer)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_recipes_use_every_axis_once(count: int, context: bool) -> None:
    for recipe in recipes(count, context=context):
        used = (*recipe.data, *recipe.tensor, *recipe.context)
        assert sorted(used) == list(range(count))


@functools.cache
def around() -> tuple[Analysis, Candidate]:
    """A step whose attention sends keys and values around rings of four devices."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["embedding"][batch["tokens"]].astype(jnp.bfloat16)
        q, k, v = ((x @ params[n].astype(x.dtype)).reshape(2, 64, 2, 16) for n in "qkv")
        y = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params = {n: jnp.zeros((32, 32)) for n in "qkv"} | {
        "embedding": jnp.zeros((128, 32))
    }
    tokens = {"tokens": jnp.zeros((2, 64), jnp.int32)}
    step = analyse(*training(loss, params, tokens, optax.sgd(1e-2)))
    found = {e.name: e for e in expert_plans(step, Cluster.parse("4:h100"))}
    candidate = found["FSDP + context parallel"].candidate
    assert candidate is not None
    return step, candidate


@pytest.mark.parametrize("bandwidth", [1e3, 1e15])
def test_a_ring_hides_no_more_than_it_sends_and_than_work_lasts(
    bandwidth: float,
) -> None:
    _, candidate = around()
    link = LinkSpec(latency_s=0.0, bandwidth_bytes_per_s=bandwidth)
    axes = (dataclasses.replace(axis, link=link) for axis in candidate.mesh.axes)
    pricer = dataclasses.replace(candidate.pricer, mesh=MeshShape(axes=tuple(axes)))
    ring = dataclasses.replace(candidate.assignment, gathered=frozenset())
    found = estimate(ring, pricer)
    sent_s = found.cost.hideable_s + found.cost.hideable_latency_s

    assert found.messages.beside.any()
    assert 0 < found.cost.cover_s <= min(sent_s, found.cost.work_s) * (1 + 1e-9)


def test_context_parallel_plans_split_the_sequence_of_attention() -> None:
    step, candidate = around()
    kernels = [op for op in step.graph.operators if op.rule.exchanges]
    assert len(kernels) == 2
    for op in kernels:
        for exchange in op.rule.exchanges:
            axes = exchange_axes(candidate.assignment, op, exchange)
            assert math.prod(candidate.mesh.sizes[a] for a in axes) == 4
    assert all("context" not in name for name in experts())
