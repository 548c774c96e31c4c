"""Tests FLOPs of kernels whose loops and branches depend on the grid point."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from property_tests import examples

from autopar_passes.rules.flops import POINTS, Count, count_kernel_flops

ROWS, COLUMNS = 8, 128
ONCE = float(ROWS * COLUMNS)
MOST = 5

Scalar = Any


@dataclasses.dataclass(frozen=True)
class Expression:
    """A function of the grid point, as a kernel computes it and in Python."""

    text: str
    kernel: Callable[[list[Scalar]], Scalar]
    python: Callable[[list[int]], int]


def leaf(position: int) -> Expression:
    return Expression(f"g{position}", lambda g: g[position], lambda g: g[position])


def constant(value: int) -> Expression:
    return Expression(str(value), lambda _: jnp.int32(value), lambda _: value)


BINARY: dict[str, tuple[Callable[..., Scalar], Callable[[int, int], int]]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "max": (jnp.maximum, max),
    "min": (jnp.minimum, min),
    "or": (lambda a, b: lax.select(a < b, a, b + 1), lambda a, b: (b + 1, a)[a < b]),
    "equal": (lambda a, b: (a == b).astype(jnp.int32), lambda a, b: int(a == b)),
    "rest": (
        lambda a, b: 2 + lax.rem(a - b, jnp.int32(3)),
        lambda a, b: 2 + int(math.fmod(a - b, 3)),
    ),
    "parts": (
        lambda a, b: 3 + lax.div(a - b, jnp.int32(2)),
        lambda a, b: 3 + int((a - b) / 2),
    ),
}  # fmt: skip


def joined(name: str, a: Expression, b: Expression) -> Expression:
    kernel, python = BINARY[name]
    return Expression(
        f"{name}({a.text}, {b.text})",
        lambda g: kernel(a.kernel(g), b.kernel(g)),
        lambda g: python(a.python(g), b.python(g)),
    )


EXPRESSIONS = st.recursive(
    st.integers(0, 2).map(leaf) | st.integers(0, 4).map(constant),
    lambda inner: st.builds(joined, st.sampled_from(sorted(BINARY)), inner, inner),
    max_leaves=5,
)


def counted(body: Callable[[list[Scalar], Any], Any], grid: tuple[int, int]) -> Count:
    """Counts a kernel over a grid; the kernel knows its point and the first size."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        place = [pl.program_id(0), pl.program_id(1), jnp.int32(pl.num_programs(0))]
        o_ref[...] = body(place, x_ref[...])

    block = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    shape = jax.ShapeDtypeStruct((grid[0] * ROWS, grid[1] * COLUMNS), jnp.float32)
    call = pl.pallas_call(
        kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=shape
    )
    (eqn,) = jax.make_jaxpr(call)(shape).eqns
    return count_kernel_flops(eqn.params, [None])


def points(grid: tuple[int, int]) -> list[list[int]]:
    return [[i, j, grid[0]] for i, j in itertools.product(*map(range, grid))]


@settings(max_examples=examples(25), deadline=None)
@given(EXPRESSIONS)
def test_loops_run_as_often_as_their_points_say(trips: Expression) -> None:
    def body(place: list[Scalar], x: Any) -> Any:
        end = jnp.minimum(trips.kernel(place), MOST)
        return lax.fori_loop(0, end, lambda _, y: y + 1.0, x)

    grid = (3, 4)
    found = counted(body, grid)
    runs = sum(max(0, min(MOST, trips.python(p))) for p in points(grid))
    assert found == Count(vector=runs * ONCE)


@settings(max_examples=examples(30), deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
def test_branches_are_those_that_points_take(a: Expression, b: Expression) -> None:
    def body(place: list[Scalar], x: Any) -> Any:
        taken = a.kernel(place) < b.kernel(place)
        return lax.cond(taken, lambda y: y + 1.0 + y, lambda y: -y, x)

    grid = (3, 4)
    found = counted(body, grid)
    runs = sum(2 if a.python(p) < b.python(p) else 1 for p in points(grid))
    assert found == Count(vector=runs * ONCE)


@pytest.mark.parametrize("size", [POINTS, 3 * POINTS, 3 * POINTS + 5])
def test_points_of_a_long_dimension_stand_for_their_neighbours(size: int) -> None:
    """A triangle, as under a causal mask: within a part of a point."""

    def body(place: list[Scalar], x: Any) -> Any:
        return lax.fori_loop(0, place[0], lambda _, y: y + 1.0, x)

    found = counted(body, (size, 1))
    assert found.exact
    assert found.vector == pytest.approx(size * (size - 1) / 2 * ONCE, rel=0.02)


def test_where_data_decide_the_longest_branch_counts_and_it_is_said() -> None:
    def body(_: list[Scalar], x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda y: y + 1.0 + y, lambda y: -y, x)

    found = counted(body, (2, 2))
    assert found == Count(vector=2 * 4 * ONCE, exact=False)


def test_products_are_counted_apart_with_their_type() -> None:
    def body(place: list[Scalar], x: Any) -> Any:
        half = x.astype(jnp.bfloat16)
        made = jnp.dot(half, half.T, preferred_element_type=jnp.float32)
        return x + made.sum()

    found = counted(body, (2, 1))
    assert found.matrix == 2 * 2.0 * ROWS * ROWS * COLUMNS
    assert found.dtype == "bfloat16"
    assert found.exact


def test_counts_add_and_scale() -> None:
    one, other = Count(1.0, 2.0, True, ""), Count(3.0, 4.0, False, "float32")
    assert one + other == Count(4.0, 6.0, False, "float32")
    assert other * 2.5 == Count(7.5, 10.0, False, "float32")
