"""FLOPs against closed formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.program.trace import trace


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(step: Callable[..., Any], *args: Any) -> float:
    return step_graph(trace(step, args)).flops


def test_matrix_product() -> None:
    assert flops(lambda a, b: a @ b, struct(4, 5), struct(5, 6)) == 2 * 4 * 5 * 6


def test_batched_product() -> None:
    got = flops(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), struct(3, 4, 5), struct(3, 5, 6)
    )

    assert got == 2 * 3 * 4 * 5 * 6


def test_a_scatter_adds_the_rows_that_it_is_given() -> None:
    ids = jax.ShapeDtypeStruct((7,), jnp.int32)

    got = flops(lambda x, i, u: x.at[i].add(u), struct(1000, 5), ids, struct(7, 5))

    # Beside it are the comparison and the shift of negative indices.
    assert 7 * 5 <= got < 7 * 5 + 10 * 7


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2), (1, 8)])
def test_convolution(stride: int, groups: int) -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    got = flops(step, struct(2, 8, 8, 8), struct(3, 3, 8 // groups, 16))

    side = 8 // stride
    assert got == 2 * (2 * side * side * 16) * (3 * 3 * 8 // groups)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_gradient_of_a_convolution_costs_what_it_costs(groups: int) -> None:
    """With unit stride and an even window each gradient has the forward's products."""

    def conv(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    x, w = struct(2, 6, 6, 8), struct(3, 3, 8 // groups, 16)
    forward = flops(conv, x, w)

    traced = trace(lambda x, w, g: jax.vjp(lambda w: conv(x, w), w)[1](g),
                   (x, w, struct(2, 4, 4, 16)))  # fmt: skip
    weight = sum(
        op.flops
        for op in step_graph(traced).operators
        if op.kind == "conv_general_dilated"
    )

    assert weight == forward


def test_elementwise_is_one_an_element() -> None:
    assert flops(lambda a, b: a * b, struct(3, 4), struct(3, 4)) == 12


def test_moving_data_is_free() -> None:
    assert flops(lambda a: a.reshape(12).reshape(4, 3).T, struct(3, 4)) == 0


def test_a_scan_counts_its_trips() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]

    assert flops(step, struct(4, 4), struct(2, 4)) == 7 * 2 * 2 * 4 * 4


def test_scans_multiply() -> None:
    def step(w: Any, x: Any) -> Any:
        def inner(x: Any, _: Any) -> Any:
            return jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0], None

        return jax.lax.scan(inner, x, length=5)[0]

    assert flops(step, struct(4, 4), struct(2, 4)) == 3 * 5 * 2 * 2 * 4 * 4


def test_the_step_of_a_dense_model_costs_six_flops_a_weight_and_example() -> None:
    """Forward, gradient of weights, gradient of activations: 2 FLOPs each."""
    width, batch, layers = 16, 8, 3

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x @ w
        return jnp.sum(x)

    traced = trace(
        jax.value_and_grad(loss),
        ([struct(width, width)] * layers, struct(batch, width)),
    )
    graph = step_graph(traced)
    products = sum(op.flops for op in graph.operators if op.kind == "dot_general")

    weights = layers * width**2
    # The gradient of the batch itself is not taken: one product fewer.
    assert products == 6 * weights * batch - 2 * width**2 * batch


def test_a_ragged_product_counts_each_row_once() -> None:
    """However many groups there are: a row meets the matrix of its own alone."""
    groups = jax.ShapeDtypeStruct((4,), jnp.int32)

    def loss(w: Any, x: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    args = (struct(4, 5, 6), struct(8, 5), groups)
    assert flops(loss, *args) == 2 * 8 * 5 * 6

    def turned(x: Any, g: Any, sizes: Any) -> Any:
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=(0,),
            rhs_group_dimensions=(),
        )
        return jax.lax.ragged_dot_general(x, g, sizes, numbers)

    assert flops(turned, struct(8, 5), struct(8, 6), groups) == 2 * 8 * 5 * 6
