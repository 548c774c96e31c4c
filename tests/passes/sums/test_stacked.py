"""Tests partial values as stacked arrays: lifting, linear operators, and the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from step_cases import random

from autopar_passes.layouts import Layout, constrain, partition_spec
from autopar_passes.program.equations import Equation
from autopar_passes.program.flatten import flatten
from autopar_passes.sums.stacked import (
    ADDITIONS,
    ADDITIVE,
    CONTRACTIONS,
    UNARY,
    Stacked,
    contribute,
    group_size,
    lift,
    linear,
    stack,
    sum_partials,
    total,
)

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)
WHOLE: Layout = ((), ())
A, B = random(0, 8, 4), random(1, 8, 4)


def equation(function: Callable[..., Any], *args: Any) -> Equation:
    (eqn,) = flatten(jax.make_jaxpr(function)(*args)).body.equations
    return eqn


def partial(axes: tuple[int, ...] = (0,)) -> Stacked:
    """Parts of A, all different, whose sum is A."""
    n = group_size(MESH, axes)
    noise = random(2, n - 1, *A.shape)
    parts = jnp.concatenate([noise, (A - noise.sum(0))[None]])
    return stack(parts, axes, WHOLE, MESH)


@pytest.mark.parametrize(("axes", "size"), [((), 1), ((0,), 2), ((1,), 4), ((0, 1), 8)])
def test_devices_of_a_group(axes: tuple[int, ...], size: int) -> None:
    assert group_size(MESH, axes) == size


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ((), ()),
        (((), ()), ()),
        (((0,), ()), ("x",)),
        (((), (1,)), (None, "y")),
        (((1, 0), ()), (("y", "x"),)),
        (((0,), (), (1,), ()), ("x", None, "y")),
    ],
)
def test_a_layout_as_jax_states_it(layout: Layout, spec: tuple[Any, ...]) -> None:
    assert partition_spec(MESH, layout) == jax.sharding.PartitionSpec(*spec)


def test_what_has_no_layout_is_left_alone() -> None:
    keys = jax.random.split(jax.random.key(0), 2)

    assert constrain(A, MESH, ()) is A
    assert constrain(keys, MESH, ((0,),)) is keys


@pytest.mark.parametrize("axes", [(1,), (0, 1)])
def test_the_sum_of_a_lifted_value_is_the_value(axes: tuple[int, ...]) -> None:
    lifted = lift(A, axes, WHOLE, MESH)

    assert lifted.array.shape == (group_size(MESH, axes), *A.shape)
    np.testing.assert_array_equal(lifted.array[0], A)
    assert not np.any(lifted.array[1:])
    np.testing.assert_array_equal(total(lifted), A)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_sum_keeps_its_type(dtype: Any) -> None:
    assert sum_partials(jnp.ones((3, 2), dtype)).dtype == dtype


@pytest.mark.parametrize(
    "function",
    [
        jnp.add,
        jnp.subtract,
        lambda x, y: jax.lax.concatenate([x, y], 1),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_sum_of_partial_and_whole_values(
    function: Callable[..., Any], whole: bool
) -> None:
    eqn = equation(function, A, B)
    other = B if whole else lift(B, (0,), WHOLE, MESH)

    (out,) = linear(eqn, [partial(), other], [None, WHOLE], (0,), MESH)

    np.testing.assert_allclose(sum_partials(out), function(A, B), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        jnp.negative,
        jnp.transpose,
        lambda x: x.reshape(4, 8),
        lambda x: jax.lax.rev(x, (0,)),
        lambda x: x[1:3],
        lambda x: jnp.sum(x, 0),
        lambda x: x * 3.0,
        lambda x: x / 4.0,
        lambda x: jnp.expand_dims(x, 1),
    ],
)
def test_a_linear_operator_runs_on_each_part(function: Callable[..., Any]) -> None:
    eqn = equation(function, A)
    scalars = [getattr(a, "value", None) for a in eqn.inputs[1:]]

    (out,) = linear(
        eqn, [partial((1,)), *scalars], [None] * len(eqn.inputs), (1,), MESH
    )

    assert out.shape[0] == 4
    np.testing.assert_allclose(sum_partials(out), function(A), rtol=1e-5, atol=1e-5)


def test_a_choice_is_the_same_for_every_part() -> None:
    choose = A > 0
    eqn = equation(lambda p, x, y: jax.lax.select(p, x, y), choose, A, B)

    (out,) = linear(eqn, [choose, B, partial()], [None, WHOLE, None], (0,), MESH)

    want = jax.lax.select_n(choose, B, A)
    np.testing.assert_allclose(sum_partials(out), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_a_contraction_contributes_from_each_shard(axes: tuple[int, ...]) -> None:
    eqn = equation(lambda x, y: jnp.einsum("bi,bj->ij", x, y), A, B)
    rows: Layout = (axes, ())

    parts = jax.jit(
        lambda x, y: contribute(eqn, [x, y], [rows, rows], WHOLE, axes, MESH)
    )(A, B)

    count = group_size(MESH, axes)
    assert parts.shape == (count, 4, 4)
    of_device = zip(jnp.split(A, count), jnp.split(B, count), strict=True)
    for part, (x, y) in zip(parts, of_device, strict=True):
        np.testing.assert_allclose(part, x.T @ y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sum_partials(parts), A.T @ B, rtol=1e-5, atol=1e-5)


def test_kinds_of_operators_do_not_overlap() -> None:
    assert ADDITIONS <= ADDITIVE
    assert not ADDITIVE & (UNARY | CONTRACTIONS)
