"""Tests FLOPs of single equations against XLA's count and against formulas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from property_tests import examples

from autopar_passes.program.equations import Value
from autopar_passes.rules import flops as rules
from autopar_passes.rules.flops import equation_flops, register_flops

F32 = jnp.dtype("float32")


def value(*shape: int) -> Value:
    return Value(shape, F32)


def xla_flops(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    """The FLOPs that XLA counts before its optimizations; nothing is compiled."""
    structs = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    return jax.jit(function).lower(*structs).cost_analysis()["flops"]


def own_flops(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    structs = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    jaxpr = jax.make_jaxpr(function)(*structs)
    return sum(
        equation_flops(
            eqn.primitive.name,
            [Value(v.aval.shape, v.aval.dtype) for v in eqn.invars],
            [Value(v.aval.shape, v.aval.dtype) for v in eqn.outvars],
            eqn.params,
        )
        for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize(
    ("einsum", "shapes"),
    [
        ("ij,jk->ik", ((3, 5), (5, 7))),
        ("bij,bjk->bik", ((2, 3, 5), (2, 5, 7))),
        ("ij,ij->", ((3, 5), (3, 5))),
        ("i,j->ij", ((3,), (5,))),
        ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
    ],
)
def test_products_are_what_xla_counts(
    einsum: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    product = functools.partial(jnp.einsum, einsum)

    assert own_flops(product, *shapes) == xla_flops(product, *shapes)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_what_xla_counts(
    stride: int, kernel: int, groups: int
) -> None:
    """Without padding: XLA leaves out the taps that lie in it."""

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    shapes = ((2, 7, 7, 4), (kernel, kernel, 4 // groups, 6))

    assert own_flops(convolve, *shapes) == xla_flops(convolve, *shapes)


@pytest.mark.parametrize(
    "function", [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum]
)
def test_arithmetic_is_what_xla_counts(function: Callable[..., Any]) -> None:
    assert own_flops(function, (4, 5), (4, 5)) == xla_flops(function, (4, 5), (4, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.T,
        lambda x: x.reshape(10, 2),
        lambda x: x[1:3],
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.broadcast_to(x, (3, 4, 5)),
        lambda x: jax.lax.rev(x, (0,)),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: jax.lax.optimization_barrier(x),
    ],
)
def test_what_moves_data_computes_nothing(function: Callable[..., Any]) -> None:
    assert own_flops(function, (4, 5)) == 0.0


dims = st.lists(st.integers(1, 6), min_size=1, max_size=2)


@given(dims, dims, dims, dims)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_a_product_costs_two_flops_a_term(
    batch: list[int], rows: list[int], depth: list[int], columns: list[int]
) -> None:
    b, r, d = len(batch), len(rows), len(depth)
    left, right = value(*batch, *rows, *depth), value(*batch, *depth, *columns)
    numbers = (
        (tuple(range(b + r, b + r + d)), tuple(range(b, b + d))),
        (tuple(range(b)), tuple(range(b))),
    )

    got = equation_flops(
        "dot_general",
        [left, right],
        [value(*batch, *rows, *columns)],
        {"dimension_numbers": numbers},
    )

    assert got == 2 * math.prod((*batch, *rows, *depth, *columns))


@pytest.mark.parametrize("length", [1, 2, 8, 1024])
def test_a_sort_compares(length: int) -> None:
    array = value(3, length)

    got = equation_flops("sort", [array], [array], {"dimension": 1})

    assert got == 3 * length * max(1.0, math.log2(max(2, length)))


def test_the_largest_array_counts_where_no_formula_is_known() -> None:
    assert equation_flops("neg", [value(2, 3)], [value(2, 3)], {}) == 6
    assert equation_flops("reduce_max", [value(2, 3)], [value(2)], {}) == 6
    assert equation_flops("unheard_of", [], [], {}) == 0
    assert equation_flops("tanh", [value(4)], [value(4)], {}) == 4 * 5


def test_a_formula_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_REGISTRY", dict(rules._REGISTRY))

    @register_flops("my_call")
    def _(operands: Any, results: Any, params: Any) -> float:
        return float(operands[0].size * params["times"])

    assert equation_flops("my_call", [value(2, 3)], [], {"times": 7}) == 42
