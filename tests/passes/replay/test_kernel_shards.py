"""Tests that kernels on shards give the results of the whole kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import softmax
from jax.sharding import AxisType, Mesh, NamedSharding
from kernel_cases import row_sum, scaled, traced

from autopar_passes.graph.operators import Operator
from autopar_passes.layouts import Layout, partition_spec
from autopar_passes.program.equations import Equation
from autopar_passes.replay.primitives import kernel_on_shards
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)


def kernel(step: Any, *arrays: Any) -> tuple[Equation, Operator]:
    """The only kernel of a step."""
    found, graph = traced(step, *arrays)
    (op,) = [op for op in graph.operators if op.kernel is not None]
    return found.program.by_index()[op.equation], op


def on_shards(
    eqn: Equation,
    rule: FactorRule,
    arrays: list[Any],
    layouts: list[Layout],
    results: list[Layout],
) -> list[Any]:
    placed = [
        jax.device_put(x, NamedSharding(MESH, partition_spec(MESH, layout)))
        for x, layout in zip(arrays, layouts, strict=True)
    ]
    run = lambda *a: kernel_on_shards(eqn, rule, a, layouts, results, MESH)  # noqa: E731
    return jax.jit(run)(*placed)


@pytest.mark.parametrize(
    ("axes", "rows"), [((), 64), ((0,), 32), ((1,), 16), ((1, 0), 8)]
)
def test_rows_are_split_in_whole_blocks(axes: tuple[int, ...], rows: int) -> None:
    """64 rows in 8 blocks, over up to 8 devices; the vector is whole everywhere."""
    x = jax.random.normal(jax.random.key(0), (64, 16), jnp.float32)
    w = jax.random.normal(jax.random.key(1), (16,), jnp.float32)
    step = lambda x, w: scaled(x, w, interpret=True)  # noqa: E731
    eqn, op = kernel(step, x, w)

    (got,) = on_shards(eqn, op.rule, [x, w], [(axes, ()), ((),)], [(axes, ())])

    np.testing.assert_allclose(got, x * w, rtol=1e-6)
    assert got.addressable_shards[0].data.shape == (rows, 16)


def test_two_vmapped_dimensions_over_two_axes() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 8, 32))
    eqn, op = kernel(lambda x: softmax.softmax(x, interpret=True), x)
    layout: Layout = ((0,), (1,), ())

    (got,) = on_shards(eqn, op.rule, [x], [layout], [layout])

    np.testing.assert_allclose(got, jax.nn.softmax(x), rtol=1e-5)
    assert got.addressable_shards[0].data.shape == (2, 2, 32)


def test_what_a_kernel_adds_up_is_summed_over_its_shards() -> None:
    """The sum of rows in blocks of 8, over 2 x 4 devices with a block each."""
    x = jax.random.normal(jax.random.key(0), (64, 16), jnp.float32)
    eqn, _ = kernel(lambda x: row_sum(x, interpret=True), x)
    kinds = (FactorKind.PASS, FactorKind.BLOCKED, FactorKind.BLOCKED)
    rule = FactorRule((8, 8, 16), kinds, (((0, 1), (2,)),), (((2,),),), sums=((0,),))

    (got,) = on_shards(eqn, rule, [x], [((0, 1), ())], [((),)])

    np.testing.assert_allclose(got, x.sum(0), rtol=1e-5, atol=1e-5)
