"""Tests that added all-reduces are priced once if the compiler merges them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar import Cluster
from autopar.cost.combining import SUMS
from autopar.cost.traffic import Collective, _alike, compiled_traffic, traffic
from autopar.layouts.layout import ReshardStep
from autopar.planner.candidate import candidate_of
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.problem import Formulation, formulate
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status

# Weights are large, so that it is activations that move.
WIDTH, ROWS = 1024, 64
HEADS = ("key", "query", "value")


def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Three products of one input, as before attention, after another product."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        y = jnp.tanh(x @ params["first"])
        key, query, value = (jnp.sin(y @ params[name]) for name in HEADS)
        return jnp.mean((key * query * value) ** 2)

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)


@functools.cache
def analysis() -> Analysis:
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return analyse(step, (dict.fromkeys(("first", *HEADS), weight), batch))


def bound(cluster: str, split: Sequence[str]) -> BoundPlan:
    """A plan that splits only the columns of some products."""
    pins = {
        "params/first": P(),
        **{f"params/{n}": P(None, "data") if n in split else P() for n in HEADS},
        "x": P(),
    }
    machine = Cluster.parse(cluster)
    options = PlanOptions(axis_names=("data",), max_axes=1, pins=pins)
    return bind_plan(analysis(), plan_analysis(analysis(), machine, options), machine)


def summed(found: BoundPlan) -> list[Collective]:
    """The sums of arrays as large as the input."""
    return [
        c
        for c in found.collectives
        if c.step.kind in SUMS and c.nbytes == 4 * ROWS * WIDTH
    ]


def test_what_three_products_leave_for_their_input_is_summed_once_on_gpus() -> None:
    assert len(summed(bound("4:h100", HEADS))) == 1


def test_xla_for_cpus_sums_each() -> None:
    assert len(summed(bound("4:cpu", HEADS))) == 3


def test_a_sum_runs_when_the_last_addition_is_done() -> None:
    found = bound("4:h100", HEADS)
    (only,) = summed(found)
    graph = found.analysis.graph

    assert graph.operators[only.ready].kind == "add_any"
    assert graph.operators[only.ready].outputs == (only.value,)
    assert graph.operators[only.operator].kind == "dot_general"


def test_predicted_bytes() -> None:
    """A reduce-scatter of four devices sends 3/4 of an array, an all-reduce twice."""
    found = bound("4:h100", HEADS)
    (only,) = summed(found)
    times = 2 if only.step.kind == "all_reduce" else 1
    assert only.sent_bytes(found.pricer) == times * 0.75 * 4 * ROWS * WIDTH


def test_on_any_plan_only_sums_become_fewer() -> None:
    found, draw = analysis(), random.Random(7)
    pricer = bound("4:h100", HEADS).pricer
    formulation = formulate(found, pricer)
    fewer = 0
    for _ in range(40):
        solution = random_solution(formulation, draw)
        assignment = candidate_of(found, formulation, solution).assignment
        plain, left = traffic(assignment), compiled_traffic(assignment, pricer)
        moved = [c for c in plain if c.step.kind not in SUMS]
        assert [c for c in left if c.step.kind not in SUMS] == moved
        values = {c.value for c in plain}
        for pair in found.reassociations:
            one, other = (sums_of(found, plain, v) for v in pair.summed)
            if one != other and {*pair.summed} <= values:
                assert {*pair.summed} <= {c.value for c in left}
        gone = values - {c.value for c in left}
        made = {c.value for c in left} - values
        # Each that is made stands for two or more.
        assert len(gone) >= 2 * len(made)
        assert bool(gone) == bool(made)
        fewer += bool(made)
    assert fewer


def sums_of(found: Analysis, plain: Sequence[Collective], value: int) -> list[str]:
    """The collectives that complete a value, as text."""
    maker = found.contraction.producer[value].index
    return [
        f"{c.step.kind} {c.step.axes} {c.size}"
        for c in plain
        if c.value == value and c.operator == maker
    ]


def random_solution(formulation: Formulation, draw: random.Random) -> Solution:
    """Random choices of a problem without copies of values."""
    counts = [len(c) for c in formulation.problem.node_costs]
    choices = tuple(draw.randrange(n) for n in counts)
    return Solution(
        choices=choices, cost=0.0, bound=0.0, status=Status.FEASIBLE, seconds=0.0
    )


def test_only_the_last_sums_that_are_equal_count() -> None:
    def sums(*sizes: int) -> list[Collective]:
        step = ReshardStep("all_reduce", (0,), 0.5, ())
        return [Collective(step, size, 1.0, 0, 0, None) for size in sizes]

    assert _alike(sums(1, 2, 3), sums(9, 2, 3)) == 2
    assert _alike(sums(2, 4, 3), sums(2, 5, 3)) == 1
    assert _alike(sums(3), sums(2, 3)) == 1
    assert _alike(sums(3), []) == 0
    other = ReshardStep("all_gather", (0,), 0.5, ())
    gather = Collective(other, 3, 1.0, 0, 0, None)
    assert _alike([gather, *sums(3)], sums(3)) == 0
