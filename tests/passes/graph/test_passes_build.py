"""Tests the operator graph: rules, trip counts, and what cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar_passes import jax_compat
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.emit import UNKNOWN_TRIPS
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.program.trace import trace
from autopar_passes.rules import factor_rule
from autopar_passes.rules.factor_rule import (
    INNER,
    FactorKind,
    FactorRule,
    elementwise_rule,
)


def graph_of(step: Callable[..., Any], *args: Any) -> OperatorGraph:
    return step_graph(trace(step, args))


def only(graph: OperatorGraph, kind: str) -> Operator:
    (op,) = [op for op in graph.operators if op.kind == kind]
    return op


def kinds(rule: FactorRule, dims: tuple[tuple[int, ...], ...]) -> list[FactorKind]:
    return [rule.kinds[f] for d in dims for f in d]


PASS, REDUCE, BLOCKED = FactorKind.PASS, FactorKind.REDUCE, FactorKind.BLOCKED


def test_a_product_reduces_its_contracted_factor() -> None:
    rule = only(
        graph_of(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4))), "dot_general"
    ).rule

    (left, right), (result,) = rule.operands, rule.results
    assert left[1] == right[0]
    assert (left[0], right[1]) == (result[0], result[1])
    assert kinds(rule, left) == [PASS, REDUCE]
    assert rule.reduction == "sum"


@pytest.mark.parametrize(
    ("reduce", "kind"), [(jnp.sum, "sum"), (jnp.max, "max"), (jnp.min, "min")]
)
def test_reductions_say_how_they_combine(reduce: Callable[..., Any], kind: str) -> None:
    rule = only(
        graph_of(lambda x: reduce(x, 0), jnp.ones((4, 3))), f"reduce_{kind}"
    ).rule

    assert rule.reduction == kind
    assert kinds(rule, rule.operands[0]) == [REDUCE, PASS]


def test_the_position_of_a_maximum_is_not_partial() -> None:
    rule = only(graph_of(lambda x: jnp.argmax(x, 1), jnp.ones((4, 8))), "argmax").rule

    assert kinds(rule, rule.operands[0]) == [PASS, BLOCKED]


@pytest.mark.parametrize(
    "function", [jnp.sort, jnp.cumsum, lambda x, axis: jnp.flip(x, axis)]
)
def test_order_along_a_dimension_keeps_it_whole(function: Callable[..., Any]) -> None:
    graph = graph_of(lambda x: function(x, axis=1), jnp.ones((4, 8)))
    op = next(op for op in graph.operators if op.kind in ("sort", "cumsum", "rev"))

    assert kinds(op.rule, op.rule.operands[0]) == [PASS, BLOCKED]


def test_top_k_keeps_its_last_dimension_whole() -> None:
    graph = graph_of(lambda x: jax.lax.top_k(x, 2)[0], jnp.ones((4, 8)))
    rule = only(graph, "top_k").rule

    assert kinds(rule, rule.operands[0]) == [PASS, BLOCKED]
    assert graph.unsupported == ()


def test_a_reshape_has_compound_dimensions() -> None:
    rule = only(
        graph_of(lambda x: x.reshape(4, 6), jnp.ones((4, 2, 3))), "reshape"
    ).rule

    assert [len(d) for d in rule.results[0]] == [1, 2]
    assert rule.results[0][1] == rule.operands[0][1] + rule.operands[0][2]


def test_padding_keeps_what_it_pads_whole() -> None:
    """XLA's partitioner fails on a pad of one element to several shards."""
    rule = only(
        graph_of(lambda x: jnp.pad(x, ((0, 0), (0, 7))), jnp.ones((4, 1))), "pad"
    ).rule

    assert kinds(rule, rule.results[0]) == [PASS, BLOCKED]


def test_a_filling_gather_reduces_inside() -> None:
    table, rows = jnp.ones((8, 4)), jnp.arange(6)

    filled = only(graph_of(lambda t, i: jnp.take(t, i, axis=0), table, rows), "gather")
    clipped = only(
        graph_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table, rows),
        "gather",
    )

    assert filled.rule.reduction == INNER
    assert clipped.rule.reduction == "sum"


def test_windows_of_convolutions_stay_whole() -> None:
    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(
            lambda w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            w,
        )[1](g)

    graph = graph_of(
        step, jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8, 8, 8))
    )
    rule = only(graph, "conv_general_dilated").rule

    assert kinds(rule, rule.operands[0]) == [REDUCE, BLOCKED, BLOCKED, PASS]
    assert kinds(rule, rule.results[0]) == [BLOCKED, BLOCKED, PASS, PASS]


def test_a_host_callback_is_replicated_and_reported() -> None:
    def step(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: v, out, x)

    graph = graph_of(step, jnp.ones((4, 8)))

    assert graph.unsupported == ("pure_callback",)
    rule = only(graph, "pure_callback").rule
    assert set(rule.kinds) == {BLOCKED}


def _custom(name: str) -> Primitive:
    """An element-wise primitive that lowers to a call unknown to the compiler."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, jax.ffi.ffi_lowering("nobody_knows"))
    return primitive


def test_an_unknown_primitive_is_replicated_until_a_rule_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factor_rule, "_REGISTRY", dict(factor_rule._REGISTRY))
    unknown = _custom("nobody_knows")

    before = graph_of(lambda x: unknown.bind(x), jnp.ones((4, 8)))

    @factor_rule.register_rule("nobody_knows")
    def _(operands: Any, results: Any, params: Any) -> FactorRule:
        assert params == {}
        return elementwise_rule([o.shape for o in operands], [r.shape for r in results])

    after = graph_of(lambda x: unknown.bind(x), jnp.ones((4, 8)))

    assert before.unsupported == ("nobody_knows",)
    assert set(only(before, "nobody_knows").rule.kinds) == {BLOCKED}
    assert after.unsupported == ()
    assert set(only(after, "nobody_knows").rule.kinds) == {PASS}


@pytest.mark.parametrize(
    ("start", "stop", "trips"), [(0, 7, 7.0), (2, 7, 5.0), (7, 2, 0.0)]
)
def test_the_trips_of_a_counting_while_are_read(
    start: int, stop: int, trips: float
) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda c: c[0] < stop, lambda c: (c[0] + 1, jnp.sin(c[1])), (start, x)
        )[1]

    graph = graph_of(step, jnp.ones(3))

    assert only(graph, "sin").trips == trips
    assert graph.assumed_trips == ()


def test_unknown_trips_are_assumed_and_reported() -> None:
    graph = graph_of(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 1.0, jnp.sin, x), jnp.ones(3)
    )

    assert only(graph, "sin").trips == UNKNOWN_TRIPS
    (line,) = graph.assumed_trips
    assert "test_passes_build.py" in line


def test_a_loop_runs_as_often_as_it_expects() -> None:
    """The number goes with the loop. The name of a scope does not count."""

    def step(x: jax.Array) -> Any:
        with jax_compat.expecting_runs(0.25):
            x = jax.lax.while_loop(lambda c: c.sum() < 1.0, jnp.sin, x)
        with jax.named_scope(jax_compat.EXPECTED_RUNS):
            return jax.lax.while_loop(lambda c: c.sum() < 1.0, jnp.cos, x)

    graph = graph_of(step, jnp.ones(3))

    assert only(graph, "sin").trips == 0.25
    assert only(graph, "cos").trips == UNKNOWN_TRIPS
    assert len(graph.assumed_trips) == 1


def test_boundary_operators_of_a_scan() -> None:
    def step(w: jax.Array, x: jax.Array, rows: jax.Array) -> Any:
        return jax.lax.scan(lambda c, r: (jnp.sin(c @ w), c + r), x, rows)

    graph = graph_of(step, jnp.ones((4, 4)), jnp.ones((2, 4)), jnp.ones((5, 2, 4)))

    assert only(graph, "enter").trips == 1.0
    carry = only(graph, "carry")
    assert (carry.trips, carry.input_trips) == (1.0, (1.0, 5.0))
    assert len(carry.outputs) == 2
    sliced, stacked = only(graph, "slice_step"), only(graph, "stack_step")
    assert kinds(sliced.rule, sliced.rule.operands[0]) == [BLOCKED, PASS, PASS]
    assert kinds(stacked.rule, stacked.rule.results[0]) == [BLOCKED, PASS, PASS]
    assert only(graph, "dot_general").trips == 5.0


def test_both_branches_of_a_cond_meet() -> None:
    graph = graph_of(
        lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), True, jnp.ones((4, 8))
    )

    merge = only(graph, "merge")
    assert len(merge.inputs) == 2
    assert set(merge.rule.kinds) == {PASS}
