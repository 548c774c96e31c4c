"""Tests that sums of activations share messages if none needs another."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from planner_steps import training

from autopar import Cluster
from autopar.cost.combining import Combiner
from autopar.cost.traffic import messages, rounds
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.reports.explain import bind_plan
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse

# A width that 8 devices cannot split: the sums run over the batch.
LAYERS, WIDTH, ROWS = 3, 12, 1 << 16


def by_trying(
    reads: Sequence[Sequence[int]], sums: Sequence[tuple[int, float]], most: int
) -> int:
    """The combiner's algorithm: reachability between sums, one message at a time."""
    reached: list[set[int]] = []
    for k, inputs in enumerate(reads):
        reached.append({k}.union(*(reached[i] for i in inputs)))
    sizes = dict(sums)
    left = [op for op, nbytes in sums if nbytes <= 10.0]
    number = len(sums) - len(left)
    while left:
        message: list[int] = []
        held = 0.0
        for op in left:
            full = len(message) == most or held + sizes[op] > 10.0
            if full or reached[op].intersection(message):
                break
            message.append(op)
            held += sizes[op]
        left = left[len(message) :]
        number += 1
    return number


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, float]]]:
    """The operands of each operator, and the operators whose results are sums."""
    count = draw(st.integers(1, 9))
    reads = [
        sorted(draw(st.sets(st.integers(0, k - 1), max_size=2))) if k else []
        for k in range(count)
    ]
    chosen = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
    return reads, [(op, draw(st.sampled_from((1.0, 4.0, 10.0, 20.0)))) for op in chosen]


@settings(deadline=None)
@given(programs(), st.integers(1, 4))
def test_rounds_are_those_of_the_combiner(
    program: tuple[list[list[int]], list[tuple[int, float]]], most: int
) -> None:
    reads, sums = program
    operators: list[Any] = [
        types.SimpleNamespace(inputs=tuple(inputs), outputs=(k,))
        for k, inputs in enumerate(reads)
    ]
    combiner = Combiner(frozenset({"all_reduce"}), 10.0, most)

    found = rounds(operators, [(op, op, size) for op, size in sums], combiner)

    assert found == by_trying(reads, sums, most)


def normalised(params: Any, batch: Any) -> Any:
    """Layers that normalise by a mean and a mean square over the batch."""
    x = batch["x"]
    for weight in params["weights"]:
        x = x @ weight
        mean, square = x.mean(0), (x**2).mean(0)
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3))
    return (x**2).mean()


@pytest.mark.parametrize("split", [True, False])
def test_the_compiler_joins_the_sums_of_a_normalisation(split: bool) -> None:
    """With a batch that is split; where it is whole there are no such sums."""
    params = {"weights": [jnp.eye(WIDTH)] * LAYERS}
    batch = {"x": jnp.ones((ROWS, WIDTH))}
    analysis = analyse(*training(normalised, params, batch))
    cluster = Cluster.parse("8:cpu")
    pins = {"params/*": P(), "batch/*": P("data") if split else P()}
    plan = plan_analysis(
        analysis, cluster, PlanOptions(axis_names=("data",), max_axes=1, pins=pins)
    )
    bound = bind_plan(analysis, plan, cluster)

    program = planned_step(analysis, plan, device_mesh(plan)).lower().compile()

    compiled = len(re.findall(r" all-reduce(?:-start)?\(", program.as_text()))
    found = messages(bound.pricer, bound.collectives, bound.assignment)
    assert found.get("all_reduce", 0.0) == compiled
    if split:
        # One of each layer forwards and one backwards, and one at the end.
        assert compiled <= 2 * LAYERS + 1
        alone = messages(bound.pricer, bound.collectives)
        assert alone["all_reduce"] > compiled


def test_updates_are_gathered_in_one_message_behind_split_moments() -> None:
    """As in ZeRO-1: what each device updates of a parameter goes to all others."""
    params = {f"w{k}": jnp.ones((64, 64)) for k in range(LAYERS)}

    def loss(params: Any, batch: Any) -> jax.Array:
        y = batch["x"]
        for w in params.values():
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    batch = {"x": jnp.ones((ROWS, 64))}
    step, args = training(loss, params, batch, optax.adam(1e-3))
    analysis, cluster = analyse(step, args), Cluster.parse("8:h100")
    pins = {"params/*": P(), "state/0/?u/*": P("data"), "batch/*": P("data")}
    options = PlanOptions(axis_names=("data",), max_axes=1, pins=pins)
    bound = bind_plan(analysis, plan_analysis(analysis, cluster, options), cluster)
    gathers = [c for c in bound.collectives if c.step.kind == "all_gather"]

    assert len(gathers) == LAYERS
    assert messages(bound.pricer, bound.collectives)["all_gather"] == pytest.approx(1)
