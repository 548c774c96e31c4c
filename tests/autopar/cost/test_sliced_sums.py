"""Sums of which a slice is read behind a transposition, as XLA's GPU compiler has them.

The rules are those of ``all_reduce_splitter.cc`` and ``reduce_scatter_creator.cc``.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.cost.pricer import Pricer
from autopar.cost.reassociation import scattered_sums, split_sums
from autopar.cost.traffic import Collective, traffic
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import candidate_of
from autopar.planner.problem import formulate
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis, analyse
from autopar_solver import Solution, Status

SIZES = (2, 4)
WORDS, WIDTH, ROWS = 64, 32, 16


def step(table: jax.Array, batch: jax.Array) -> jax.Array:
    """A tied embedding: a lookup, and a product with the transposed table."""

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
    for _ in range(300):
        choices = tuple(draw.randrange(n) for n in counts)
        solution = Solution(
            choices=choices, cost=0.0, bound=0.0, status=Status.FEASIBLE, seconds=0.0
        )
        chosen = candidate_of(found, formulation, solution).assignment
        out += [chosen, whole(chosen)]
    return out


def whole(chosen: Assignment) -> Assignment:
    """A plan that sums the product for the table whole, over all devices."""
    found = chosen.analysis
    (product,) = (v for v, f in found.summed_shapes.items() if len(f.values) > 1)
    maker = found.contraction.producer[product]
    node = found.contraction.node(maker)
    (rows,) = node.factors_reduced(maker)
    strategies = list(chosen.strategies)
    strategies[node.index] = tuple(
        (0, 1) if k == rows else () for k in range(len(node.factors))
    )
    strategies[found.contraction.homes[product].node] = ((), ())
    return Assignment(found, SIZES, tuple(strategies), chosen.copies)


def sums_of(found: Sequence[Collective], value: int) -> list[tuple[str, Axes, float]]:
    """Kind, axes and bytes of what makes a value."""
    return [
        (c.step.kind, c.step.axes, c.sent_bytes(pricer()))
        for c in found
        if c.value == value
    ]


def changed(
    before: Sequence[Collective], after: Sequence[Collective]
) -> list[tuple[list[tuple[str, Axes, float]], list[tuple[str, Axes, float]], float]]:
    """What was changed, before and after, with the bytes of the array."""
    out: list[
        tuple[list[tuple[str, Axes, float]], list[tuple[str, Axes, float]], float]
    ] = []
    for value in dict.fromkeys(c.value for c in before):
        one, other = sums_of(before, value), sums_of(after, value)
        if one != other:
            out.append((one, other, analysis().graph.values[value].nbytes))
    return out


def test_a_sum_over_all_devices_is_split_where_another_goes_over_a_part() -> None:
    found = 0
    for assignment in plans():
        before = traffic(assignment)
        after, late = split_sums(assignment, before)
        rows = changed(before, after)
        assert len(rows) == len(late)
        for one, other, nbytes in rows:
            found += 1
            assert one == [("all_reduce", (0, 1), pytest.approx(2 * 7 / 8 * nbytes))]
            # Four neighbours keep a slice each, which goes to the other host and back.
            assert other == [
                ("reduce_scatter", (1,), pytest.approx(3 / 4 * nbytes)),
                ("all_reduce", (0,), pytest.approx(nbytes / 4)),
            ]
            others = [c.step for c in before if c.step.kind == "all_reduce"]
            alone = [
                c.step
                for c in before
                if c.step.kind == "reduce_scatter"
                and len(sums_of(before, c.value)) == 1
            ]
            assert {s.axes for s in (*others, *alone)} & {(0,), (1,)}
    assert found


def test_a_sum_becomes_a_reduce_scatter_over_the_devices_of_its_slice() -> None:
    seen: set[Axes] = set()
    for assignment in plans():
        before = traffic(assignment)
        for one, other, nbytes in changed(before, scattered_sums(assignment, before)):
            ((kind, axes, sent),) = one
            devices = math.prod(SIZES[a] for a in axes)
            assert (kind, sent) == (
                "all_reduce",
                pytest.approx(2 * (devices - 1) / devices * nbytes),
            )
            assert other == [("reduce_scatter", axes, pytest.approx(sent / 2))]
            seen.add(axes)
    assert seen


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
