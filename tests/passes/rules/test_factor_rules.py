"""Tests hand-written sharding rules: their factors, and the registry."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.program.equations import Value
from autopar_passes.rules import factor_rule
from autopar_passes.rules.factor_rule import (
    FactorKind,
    FactorRule,
    elementwise_rule,
    register_rule,
    registered_rule,
    replicated_rule,
    separate_rule,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
checked = settings(max_examples=examples(60), deadline=None, derandomize=True)


def sizes_of(rule: FactorRule, dims: Any) -> tuple[int, ...]:
    return tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)


@given(st.lists(shapes, max_size=3), st.lists(shapes, max_size=2))
@checked
def test_a_replicated_rule_shards_nothing(operands: Any, results: Any) -> None:
    rule = replicated_rule(operands, results)

    assert [sizes_of(rule, dims) for dims in rule.operands] == operands
    assert [sizes_of(rule, dims) for dims in rule.results] == results
    assert rule.free == rule.reduced_factors == frozenset()
    assert set(rule.kinds) <= {FactorKind.BLOCKED}


@given(st.lists(shapes, max_size=3), st.lists(shapes, max_size=2))
@checked
def test_separate_dimensions_share_no_factor(operands: Any, results: Any) -> None:
    rule = separate_rule(operands, results, FactorKind.PASS)
    used = [f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim]

    assert used == list(range(len(rule.sizes)))
    assert rule.free == frozenset(used)


@given(shapes, st.lists(st.booleans(), min_size=1, max_size=3), st.integers(1, 2))
@checked
def test_an_elementwise_rule_has_the_factors_of_its_result(
    shape: tuple[int, ...], whole: list[bool], results: int
) -> None:
    rule = elementwise_rule([shape if w else () for w in whole], [shape] * results)

    assert sizes_of(rule, rule.results[0]) == shape
    for dims, w in zip(rule.operands, whole, strict=True):
        assert dims == (rule.results[0] if w else ())
    assert rule.results == (rule.results[0],) * results
    assert rule.free == frozenset(range(sum(size > 1 for size in shape)))


def test_factors_of_an_array() -> None:
    rule = FactorRule(
        sizes=(2, 3, 1, 4),
        kinds=(
            FactorKind.PASS,
            FactorKind.REDUCE,
            FactorKind.PASS,
            FactorKind.BLOCKED,
        ),
        operands=(((0, 1), (2,), (3,)),),
        results=(((0,), (2,), (3,)),),
        reduction="sum",
    )

    assert rule.factors_of(rule.operands[0]) == {0, 1, 2, 3}
    assert rule.factors_of(rule.results[0]) == {0, 2, 3}
    assert rule.free == {0, 1}
    assert rule.reduced_factors == {1}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor_rule, "_REGISTRY", {})


@pytest.mark.usefixtures("own_registry")
def test_a_registered_rule_sees_shapes_and_parameters() -> None:
    seen: list[Any] = []

    @register_rule("thing")
    def rule(operands: Any, results: Any, params: Any) -> FactorRule:
        seen.append(([o.shape for o in operands], results[0].dtype, params))
        return elementwise_rule([o.shape for o in operands], [r.shape for r in results])

    value = Value((2, 3), jnp.dtype("float32"))
    got = registered_rule("thing", [value], [value], {"axis": 1})

    assert seen == [([(2, 3)], jnp.float32, {"axis": 1})]
    assert got == elementwise_rule([(2, 3)], [(2, 3)])
    assert rule([value], [value], {"axis": 1}) == got


@pytest.mark.usefixtures("own_registry")
def test_the_last_rule_that_is_registered_wins() -> None:
    value = Value((2,), jnp.dtype("float32"))
    for blocked in (False, True):
        make = replicated_rule if blocked else elementwise_rule
        register_rule("thing")(lambda o, r, p, make=make: make([(2,)], [(2,)]))

    assert registered_rule("thing", [value], [value], {}) == replicated_rule(
        [(2,)], [(2,)]
    )


@pytest.mark.usefixtures("own_registry")
def test_nothing_is_registered() -> None:
    assert registered_rule("thing", [], [], {}) is None


@given(st.lists(shapes, min_size=1, max_size=3))
@checked
def test_a_barrier_is_an_identity_of_each_value(operands: Any) -> None:
    values = [Value(shape, jnp.dtype("float32")) for shape in operands]
    rule = registered_rule("optimization_barrier", values, values, {})

    assert rule is not None
    assert rule.operands == rule.results
    assert [sizes_of(rule, dims) for dims in rule.results] == operands
    assert set(rule.kinds) <= {FactorKind.PASS}
