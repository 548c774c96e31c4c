"""Small state is split at the end where that is faster, and only then."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster
from autopar.cost.pricer import Pricer
from autopar.layouts.strategies import Strategy
from autopar.planner import problem
from autopar.planner.candidate import Candidate
from autopar.planner.problem import Restriction, small_state
from autopar.planner.search import candidate_meshes, search
from autopar.planner.small_state import with_small_state_split
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.nodes import Node
from autopar_solver import Status

CLUSTER = Cluster.parse("4x4:v5e")
SECONDS = 60.0


@functools.cache
def step() -> Analysis:
    """Few rows and wide kernels, so that bytes count, and to split state pays."""
    params = jax.eval_shape(lambda: mlp_params(width=2048, hidden=8192, layers=2))
    batch = jax.eval_shape(lambda: mlp_batch(8192, 2048))
    return analyse(*training(mlp_loss, params, batch))


@pytest.fixture
def all_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts all state as small, so that the search keeps all of it whole."""
    monkeypatch.setattr(problem, "FEW_NODES", 0)
    monkeypatch.setattr(problem, "SMALL_OF_DEVICE", 1.0)
    monkeypatch.setattr(problem, "SMALL_OF_STATE", 1.0)


def planned(restriction: Restriction | None = None) -> Candidate:
    """The plan of the first mesh."""
    pricer = Pricer(CLUSTER, candidate_meshes(CLUSTER)[0])
    return solve_mesh(step(), pricer, restriction, SECONDS)


def proved(found: Candidate) -> Candidate:
    """A plan that its search proved to be the best of those with whole state."""
    return dataclasses.replace(found, lower_s=found.step_s)


def split_state(found: Candidate) -> list[int]:
    strategies = found.assignment.strategies
    nodes = step().contraction.nodes
    return [n.index for n in nodes if n.state and any(strategies[n.index])]


@pytest.mark.usefixtures("all_is_small")
def test_splits_what_the_search_kept_whole() -> None:
    known = proved(planned())

    found = with_small_state_split(step(), known, None, SECONDS)

    assert not split_state(known)
    assert split_state(found)
    assert found.step_s < 0.9 * known.step_s
    assert found.peak_memory_bytes <= CLUSTER.memory_bytes


def masked() -> Analysis:
    """Layers in a loop that all read a mask, which costs nothing to make whole."""

    def loss(params: Any, batch: Any) -> jax.Array:
        mask = jnp.tril(jnp.ones((16, 16))) > 0
        mask = jnp.broadcast_to(mask, (len(batch["x"]), 16, 16))

        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            weights = jnp.where(mask, jnp.einsum("btd,bsd->bts", x @ p["up"], x), 0.0)
            return x + weights @ x + p["bias"], None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params)[0] ** 2)

    params = {"up": jnp.ones((4, 512, 512)), "bias": jnp.ones((4, 512))}
    batch = {"x": jnp.ones((64, 16, 512))}
    return analyse(*training(loss, params, batch, optax.adam(1e-3)))


@pytest.mark.usefixtures("all_is_small")
def test_free_arrays_are_split_as_the_search_does() -> None:
    analysis, cluster = masked(), Cluster.parse("8:cpu")
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    known = proved(solve_mesh(analysis, pricer, None, SECONDS))

    found = with_small_state_split(analysis, known, None, SECONDS)

    assert found is not known
    masks = [
        op.outputs[0]
        for op in analysis.graph.operators
        if op.kind == "enter" and analysis.graph.values[op.outputs[0]].dtype == bool
    ]
    assert masks
    assert all(any(found.assignment.home_layout(v)) for v in masks)


def test_is_as_fast_as_a_search_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned()
    with monkeypatch.context() as patch:
        patch.setattr(problem, "FEW_NODES", 0)
        patch.setattr(problem, "SMALL_OF_DEVICE", 1.0)
        patch.setattr(problem, "SMALL_OF_STATE", 1.0)
        found = with_small_state_split(step(), proved(planned()), None, SECONDS)

    assert found.step_s <= 1.01 * free.step_s
    # No plan of the mesh is faster than the bound, the one of the free search neither.
    assert found.bound_s <= free.step_s


@pytest.mark.usefixtures("all_is_small")
def test_a_plan_that_is_not_proved_is_left_alone() -> None:
    known = dataclasses.replace(planned(), lower_s=0.0)

    assert known.report.status is not Status.OPTIMAL
    assert with_small_state_split(step(), known, None, SECONDS) is known


@pytest.mark.usefixtures("all_is_small")
def test_keeps_to_a_restriction() -> None:
    def whole(node: Node, strategy: Strategy) -> bool:
        return not node.state or not any(strategy)

    known = proved(planned(whole))

    assert not split_state(with_small_state_split(step(), known, whole, SECONDS))


def test_a_program_without_small_state_is_left_alone() -> None:
    known = proved(planned())

    assert not small_state(step().graph, step().contraction, 16e9)
    assert with_small_state_split(step(), known, None, SECONDS) is known


@pytest.mark.usefixtures("all_is_small")
def test_a_search_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = candidate_meshes(CLUSTER)[:1]
    monkeypatch.setattr(Candidate, "report", property(_optimal))

    found = search(step(), CLUSTER, meshes=mesh, seconds=SECONDS)

    assert split_state(found.best)
    # Codecs are chosen for every plan that was tried, and compared with the best's.
    assert [c for _, c in found.tried] == [found.best]


def _optimal(found: Candidate) -> object:
    return dataclasses.replace(found.solution, status=Status.OPTIMAL)
