"""Tests which sums of a look-up's gradient a program states."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp

from autopar import Cluster
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import traffic
from autopar.layouts.assignment import Assignment
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import candidate_of
from autopar.planner.problem import formulate
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status

SIZES = (2, 4)
WORDS, WIDTH, ROWS = 64, 32, 16


def step(table: jax.Array, batch: jax.Array) -> jax.Array:
    """A tied embedding: a look-up, and a product with the transposed table."""

    def loss(table: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(table[batch]) @ table.T) ** 2)

    return table - jax.grad(loss)(table)


@functools.cache
def analysis() -> Analysis:
    table = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return analyse(step, (table, batch))


@functools.cache
def pricer() -> Pricer:
    cluster = Cluster.parse("2x4:h100")
    (mesh,) = (m for m in candidate_meshes(cluster) if m.sizes == SIZES)
    return Pricer(cluster, mesh, combining=False)


@functools.cache
def plans() -> list[Assignment]:
    """Plans with random strategies."""
    found, draw = analysis(), random.Random(11)
    formulation = formulate(found, pricer())
    counts = [len(c) for c in formulation.problem.node_costs]
    out: list[Assignment] = []
    for _ in range(100):
        choices = tuple(draw.randrange(n) for n in counts)
        solution = Solution(
            choices=choices, cost=0.0, bound=0.0, status=Status.FEASIBLE, seconds=0.0
        )
        out.append(candidate_of(found, formulation, solution).assignment)
    return out


def test_scatters_into_zeros_are_written_down() -> None:
    """A lookup's gradient is summed collective by collective, as products are."""
    graph = analysis().graph
    (scatter,) = (op for op in graph.operators if op.kind == "scatter-add")
    written = 0
    for assignment in plans():
        sums = assignment.sums(scatter.outputs[0])
        steps = [
            c.step
            for c in traffic(assignment)
            if c.value == scatter.outputs[0] and c.operator == scatter.index
        ]
        if not sums:
            continue
        written += 1
        kinds = [s.kind for s in steps if s.kind in ("reduce_scatter", "all_reduce")]
        assert len(sums) == len(kinds)
    assert written


def test_a_scatter_into_other_values_is_left_to_the_compiler() -> None:
    """Each device would add its rows to a value of its own."""

    def add(table: jax.Array, batch: jax.Array) -> jax.Array:
        return table.at[batch].add(1.0)

    table = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
    found = analyse(add, (table, jax.ShapeDtypeStruct((ROWS,), jnp.int32)))
    (scatter,) = (op for op in found.graph.operators if op.kind == "scatter-add")
    node = found.contraction.node_of[scatter.class_index]
    strategies: list[Strategy] = [
        tuple(() for _ in n.factors) for n in found.contraction.nodes
    ]
    reduced = found.contraction.nodes[node].factors_reduced(scatter)
    strategies[node] = tuple(
        (0, 1) if k == reduced[0] else () for k in range(len(strategies[node]))
    )
    assignment = Assignment(found, SIZES, tuple(strategies), {})

    assert assignment.partial(scatter) == (0, 1)
    assert assignment.sums(scatter.outputs[0]) == ()
