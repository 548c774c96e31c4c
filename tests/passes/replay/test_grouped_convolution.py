"""Tests grouped convolutions by shards, which the compiler partitions wrongly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator
from autopar_passes.layouts import Layout, partition_spec
from autopar_passes.program.equations import Equation
from autopar_passes.program.trace import trace
from autopar_passes.replay.primitives import grouped_convolution
from autopar_passes.rules import shardy

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)
# Axes of each dimension: batch, height, width, channels.
WHOLE: Layout = ((), (), (), ())


def forward(groups: int, x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


def weight_gradient(groups: int) -> tuple[Equation, Operator, list[jax.Array]]:
    """The convolution of a weight's gradient, its operator, and its operands."""
    x, g = (
        jax.random.normal(jax.random.key(i), (8, 4, 4, 16), jnp.float32) for i in (0, 1)
    )
    w = jax.ShapeDtypeStruct((3, 3, 16 // groups, 16), jnp.float32)

    def step(x: Any, w: Any, g: Any) -> Any:
        return jax.vjp(lambda w: forward(groups, x, w), w)[1](g)

    traced = trace(step, (x, w, g))
    (eqn,) = [
        e
        for e in traced.program.body.equations
        if e.primitive == "conv_general_dilated"
    ]
    (op,) = [op for op in step_graph(traced).operators if op.equation == eqn.index]
    return eqn, op, [x, g]


@pytest.mark.parametrize(
    ("groups", "layouts"),
    [
        # A reduction of the batch over one axis, with replicas along the other.
        (2, (((0,), (), (), ()), ((0,), (), (), ()), WHOLE)),
        # Groups over one axis, their features over the other.
        (2, (((), (), (), (0,)), ((), (), (), (0, 1)), ((), (), (), (0, 1)))),
        # Depthwise: batch and groups at once.
        (16, (((0,), (), (), (1,)), ((0,), (), (), (1,)), ((), (), (), (1,)))),
        (16, (((1, 0), (), (), ()), ((1, 0), (), (), ()), WHOLE)),
    ],
)
def test_a_weight_gradient_is_what_it_is_on_one_device(
    groups: int, layouts: tuple[Layout, Layout, Layout]
) -> None:
    eqn, op, operands = weight_gradient(groups)
    want = eqn.source.primitive.bind(*operands, **eqn.params)

    def run(*args: jax.Array) -> jax.Array:
        return grouped_convolution(eqn.params, args, layouts, op.rule, MESH)

    shardings = tuple(NamedSharding(MESH, partition_spec(MESH, x)) for x in layouts)
    jitted = jax.jit(run, in_shardings=shardings[:2], out_shardings=shardings[2])

    assert shardy.is_grouped(eqn.params)
    np.testing.assert_allclose(jitted(*operands), want, rtol=1e-4, atol=1e-4)


def test_an_ordinary_convolution_is_not_grouped() -> None:
    eqn, _, _ = weight_gradient(1)

    assert not shardy.is_grouped(eqn.params)
