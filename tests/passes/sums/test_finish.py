"""Tests sums that are stated as collectives: results, and bytes sent."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from step_cases import random

from autopar_passes.layouts import Layout
from autopar_passes.sums.finish import Sum, behind, run_and_sum

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)
LEFT, RIGHT = random(0, 8, 4, 16), random(1, 8, 4, 8)
BOTH: Layout = ((0,), (1,), ())
# The result of 16 x 8 by the collectives of its sum over both axes.
SUMS = {
    "scattered in two dimensions": (
        Sum((0,), 0, ((0,), ())),
        Sum((1,), 1, ((0,), (1,))),
    ),
    "scattered behind an axis": (Sum((0,), 0, ((0,), ())), Sum((1,), 0, ((0, 1), ()))),
    "scattered over the second": (
        Sum((1,), 0, ((1,), ())),
        Sum((0,), None, ((1,), ())),
    ),
    "scattered over the first": (
        Sum((0,), 1, ((), (0,))),
        Sum((1,), None, ((), (0,))),
    ),
    "whole": (Sum((0, 1), None, ((), ())),),
}


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jax.lax.dot_general(left, right, (((0, 1), (0, 1)), ((), ())))


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_is_that_of_one_device(name: str) -> None:
    sums = SUMS[name]

    out = jax.jit(lambda a, b: run_and_sum(product, (a, b), (BOTH, BOTH), sums, MESH))(
        LEFT, RIGHT
    )

    np.testing.assert_allclose(out, product(LEFT, RIGHT), rtol=1e-5, atol=1e-5)
    assert (
        jnp.shape(out.addressable_shards[0].data)
        == {
            "scattered in two dimensions": (8, 2),
            "scattered behind an axis": (2, 8),
            "scattered over the second": (4, 8),
            "scattered over the first": (16, 4),
            "whole": (16, 8),
        }[name]
    )


@pytest.mark.parametrize("name", SUMS)
def test_rows_scattered_into_zeros_add_up(name: str) -> None:
    """Each device adds its own rows to zeros, as the gradient of an embedding does."""
    rows = jax.random.randint(jax.random.key(2), (8, 4), 0, 16)
    sums, zeros = SUMS[name], jnp.zeros((16, 8))

    def scatter(zeros: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return zeros.at[rows].add(values)

    split: Layout = ((0,), (1,))
    out = jax.jit(
        lambda *operands: run_and_sum(
            scatter, operands, (((), ()), split, BOTH), sums, MESH
        )
    )(zeros, rows, RIGHT)

    np.testing.assert_allclose(out, scatter(zeros, rows, RIGHT), rtol=1e-5, atol=1e-5)


def stated(
    sums: tuple[Sum, ...], platform: str, mesh: Mesh | AbstractMesh
) -> list[str]:
    """The collectives of a sum, and the slices of them that are kept, in order."""

    def summed(left: jax.Array, right: jax.Array) -> jax.Array:
        return run_and_sum(product, (left, right), (BOTH, BOTH), sums, mesh)

    traced = jax.jit(summed).trace(LEFT, RIGHT)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    kinds = r"stablehlo\.(all_reduce|reduce_scatter|dynamic_slice)"
    return re.findall(kinds, text)


@pytest.mark.parametrize("mesh", [MESH, MESH.abstract_mesh], ids=["devices", "none"])
@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
@pytest.mark.parametrize("name", SUMS)
def test_each_collective_is_stated(
    name: str, platform: str, mesh: Mesh | AbstractMesh
) -> None:
    """A scatter is a sum and a slice for CPUs, whose compiler joins no scatters."""
    scatter = (
        ["all_reduce", "dynamic_slice"] if platform == "cpu" else ["reduce_scatter"]
    )
    kinds = [
        k for s in SUMS[name] for k in (["all_reduce"] if s.dim is None else scatter)
    ]
    assert stated(SUMS[name], platform, mesh) == kinds


def test_the_layouts_behind_a_sum() -> None:
    sums = SUMS["scattered in two dimensions"]
    way: list[Layout] = [((), ()), ((0,), ()), ((0,), (1,)), ((0,), ())]

    # The last of the sum's layouts counts, also where a later one is the first again.
    assert behind(way, sums) == (((0,), (1,)), ((0,), ()))
