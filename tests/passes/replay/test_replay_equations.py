"""Tests that replayed steps on simulated devices give the results of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from step_cases import STEPS, case, random

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.layouts import Layout
from autopar_passes.program.trace import TracedStep, trace
from autopar_passes.replay.run import replay
from autopar_passes.replay.values import LayoutRoute
from autopar_passes.rules.factor_rule import Dims, FactorKind

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)
SIZES = (2, 4)


def layout_of(op: Operator, dims: Dims, axes: Mapping[int, int]) -> Layout:
    """The layout of an array if some factors are split over mesh axes."""
    return tuple(
        (axes[dim[0]],) if len(dim) == 1 and dim[0] in axes else () for dim in dims
    )


@dataclasses.dataclass(frozen=True)
class FactorPlan:
    """A plan that splits factors of some operators.

    Attributes:
      graph: the graph.
      axes: operator -> factor -> mesh axis.
      floats: values that each reader computes itself.
      fresh: whether readers start anew.
    """

    graph: OperatorGraph
    axes: Mapping[int, Mapping[int, int]]
    floats: frozenset[int] = frozenset()
    fresh: bool = False

    def operand(self, op: Operator, slot: int) -> Layout | None:
        found = self.axes.get(op.index)
        return None if found is None else layout_of(op, op.rule.operands[slot], found)

    def results(self, op: Operator, slot: int) -> tuple[Layout, ...]:
        found = self.axes.get(op.index)
        if found is None:
            return ()
        return (layout_of(op, op.rule.results[slot], found),)

    def floating(self, value: int) -> bool:
        return value in self.floats

    def route(self, value: int, layout: Layout, backward: bool) -> LayoutRoute:
        return LayoutRoute((layout,), self.fresh)

    def gathers_keys(self, op: Operator) -> bool:
        del op
        return False

    def is_backward(self, op: Operator) -> bool:
        return False

    def output(self, position: int) -> Layout | None:
        value = self.graph.outputs[position]
        return None if value is None else ((),) * len(self.graph.values[value].shape)

    def partial_layout(self, value: int) -> None:
        return None

    def due(self, value: int) -> None:
        return None

    def sums(self, value: int, *, handed: bool = False) -> tuple[()]:
        return ()


def splits(op: Operator, axis: int) -> dict[int, int]:
    """Splits the first factor that the size of the axis divides."""
    for factor in sorted(op.rule.free):
        dims = [d for array in (*op.rule.operands, *op.rule.results) for d in array]
        alone = all(d == (factor,) for d in dims if factor in d)
        parallel = op.rule.kinds[factor] is not FactorKind.BLOCKED
        if alone and parallel and op.rule.sizes[factor] % SIZES[axis] == 0:
            return {factor: axis}
    return {}


def planned(traced: TracedStep, graph: OperatorGraph) -> FactorPlan:
    """Yields plans that split each operator in turn over one of two axes."""
    axes = {
        op.index: splits(op, op.index % 2)
        for op in graph.operators
        if op.kind not in ("input", "return", "conv_general_dilated")
    }
    return FactorPlan(graph, axes)


def run(traced: TracedStep, plan: FactorPlan, args: Any, **options: Any) -> list[Any]:
    step = replay(traced.program, plan.graph, plan, MESH)
    flat = jax.tree.leaves(args)
    return jax.jit(lambda *xs: step(*xs, **options))(*flat)


def assert_close(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


A, B = random(0, 8, 4), random(1, 4, 8)
IDS = jnp.array([7, 0, 3, 1])
EQUATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda x, y: x @ y, (A, B)),
    "batched product": (
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        (random(0, 4, 2, 8), random(1, 4, 8, 2)),
    ),
    "sum": (lambda x: jnp.sum(x, axis=0), (A,)),
    "maximum": (lambda x: jnp.max(x, axis=1), (A,)),
    "elementwise": (lambda x: jnp.exp(x) * 2.0 + x, (A,)),
    "transpose and reshape": (lambda x: x.T.reshape(2, 2, 8), (A,)),
    "gather": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (A, IDS)),
    "scatter": (lambda x, i, u: x.at[i].add(u), (A, IDS, A[:4])),
    "sort": (lambda x: jnp.sort(x, axis=1), (A,)),
    "concatenate": (lambda x: jnp.concatenate([x, x * 2.0], axis=1), (A,)),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((x, y)), (A, B)),
    "cumulative sum": (lambda x: jnp.cumsum(x, axis=0), (A,)),
}


@pytest.mark.parametrize("name", sorted(EQUATIONS))
def test_an_equation_in_shards(name: str) -> None:
    """Its factors are split over one axis of the mesh, then over the other."""
    function, args = EQUATIONS[name]
    traced = trace(function, args)
    graph = step_graph(traced)

    got = run(traced, planned(traced, graph), args)

    assert_close(got, jax.tree.leaves(function(*args)))


def test_a_step_in_shards() -> None:
    step, args = STEPS["scan"]
    found = case("scan")

    got = run(found.traced, planned(found.traced, found.graph), args)

    assert_close(got, jax.tree.leaves(step(*args)))


def chain(x: jax.Array) -> jax.Array:
    """A step with a broadcast value that two operators read."""
    table = jnp.broadcast_to(jnp.arange(4.0), (8, 4))
    return (x + table) * (x - table)


def floating_values(graph: OperatorGraph) -> frozenset[int]:
    makers = [op for op in graph.operators if op.kind == "broadcast_in_dim"]
    return frozenset(v for op in makers for v in op.outputs)


def test_each_reader_makes_a_floating_value() -> None:
    traced = trace(chain, (A,))
    graph = step_graph(traced)
    plan = dataclasses.replace(planned(traced, graph), floats=floating_values(graph))
    assert plan.floats

    step = replay(traced.program, graph, plan, MESH)

    assert_close(jax.jit(step)(A), [chain(A)])
    made = [
        eqn
        for eqn in jax.make_jaxpr(step)(A).eqns
        if eqn.primitive.name == "broadcast_in_dim"
    ]
    assert len(made) == 2  # one for each of the two layouts that are read


def constraints(step: Callable[..., Any], *args: Any) -> list[str]:
    eqns = jax.make_jaxpr(step)(*args).eqns
    wanted = ("sharding_constraint", "optimization_barrier")
    return [e.primitive.name for e in eqns if e.primitive.name in wanted]


@pytest.mark.parametrize("fresh", [False, True])
def test_readers_share_a_resharded_form(fresh: bool) -> None:
    """Two readers of one layout state it once; a barrier starts anew, once."""

    def twice(x: jax.Array) -> Any:
        return jnp.sin(x), jnp.cos(x)

    traced = trace(twice, (A,))
    graph = step_graph(traced)
    axes = {
        op.index: {op.rule.operands[0][0][0]: 0}
        for op in graph.operators
        if op.kind in ("sin", "cos")
    }
    plan = FactorPlan(graph, axes, fresh=fresh)
    stated = constraints(replay(traced.program, graph, plan, MESH), A)

    # Of the operand once, of each result, and of each output.
    assert stated.count("sharding_constraint") == 1 + 2 + 2
    assert stated.count("optimization_barrier") == 3 * int(fresh)  # also of outputs


def test_what_is_made_can_be_replaced() -> None:
    """Each value outside of loops is shown once; what comes back is used."""
    traced = trace(lambda x: jnp.sin(x) + 1.0, (A,))
    graph = step_graph(traced)
    seen: list[int] = []

    def made(value: int, array: Any) -> Any:
        seen.append(value)
        return array * 2.0

    got = run(traced, FactorPlan(graph, {}), (A,), made=made)

    sin, add = [op for op in graph.operators if op.kind in ("sin", "add")]
    assert seen == [sin.outputs[0], add.outputs[0]]
    assert_close(got, [2.0 * (2.0 * jnp.sin(A) + 1.0)])


def test_constants_of_the_step_are_inputs_of_the_replay() -> None:
    table = np.arange(4.0, dtype=np.float32)
    traced = trace(lambda x: x + jnp.asarray(table), (A,))
    graph = step_graph(traced)

    got = run(traced, planned(traced, graph), (A,))

    assert_close(got, [A + table])


def test_outputs_that_are_scalars_of_the_program() -> None:
    traced = trace(lambda x: (x, 3.0), (A,))
    graph = step_graph(traced)
    assert graph.outputs[1] is None

    same, number = run(traced, FactorPlan(graph, {}), (A,))

    assert_close([same], [A])
    assert number == 3.0
