"""Tests reduce-scatters in the form that TPUs keep: equal sums, in whole tiles."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from step_cases import random

from autopar_passes.sums.finish import cuts_tiles, in_front, scatter_sum

MESH = Mesh(
    np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2
)


def by_devices(function: object, dim: int, names: tuple[str, ...]) -> object:
    """A function of the shards of an array on a mesh of 2x4 devices."""
    run = functools.partial(function, names=names, dim=dim)  # type: ignore[arg-type]
    split: list[object] = [None] * 3
    split[dim] = names
    return jax.shard_map(
        lambda shard: run(shard[0, 0]),
        mesh=MESH,
        in_specs=PartitionSpec("x", "y"),
        out_specs=PartitionSpec(*split),
        check_vma=False,
    )


@pytest.mark.parametrize("names", [("y",), ("x", "y"), ("y", "x")])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_parts_of_a_sum_are_those_of_one_device(
    dim: int, names: tuple[str, ...]
) -> None:
    arrays = random(0, 2, 4, 8, 16, 24)
    # Over one axis, the devices of the other hold the same.
    arrays = arrays if len(names) == 2 else arrays.at[1].set(arrays[0])
    whole = arrays.sum((0, 1)) if len(names) == 2 else arrays[0].sum(0)

    out = jax.jit(by_devices(in_front, dim, names))(arrays)  # type: ignore[arg-type]

    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-5)


# What the compiler for v5e makes of a product of two or three dimensions and its sum
# over one axis of 8: the part of a device, the dimension that is cut, the bytes of an
# element, and whether an all-reduce runs in its place (libtpu 0.0.42).
FOUND = [
    ((128, 1024), 0, 2, False),
    ((1024, 128), 1, 2, True),
    ((4096, 128), 1, 2, True),
    ((1024, 256), 1, 2, False),
    ((1024, 384), 1, 2, True),
    ((1024, 512), 1, 2, False),
    ((1024, 640), 1, 2, True),
    ((1024, 128), 1, 4, False),
    ((1024, 256), 1, 4, False),
    ((8, 1024), 0, 2, False),
    ((12, 1024), 0, 2, True),
    ((100, 1024), 0, 2, True),
    ((128, 16, 64), 0, 2, True),
    ((1024, 2, 64), 1, 2, False),
    ((1024, 16, 8), 2, 2, True),
    ((384, 16, 64), 0, 2, True),
    ((256, 16, 64), 0, 2, False),
    ((1024, 32, 8), 2, 2, True),
    ((128, 8, 128), 0, 2, False),
    ((1024, 8, 16), 2, 2, False),
    ((256, 16, 128), 0, 2, False),
    ((16, 64, 128), 2, 2, True),
    ((16, 64, 256), 2, 2, False),
]


@pytest.mark.parametrize(("part", "dim", "item_bytes", "summed"), FOUND)
def test_parts_that_the_compiler_sums_whole(
    part: tuple[int, ...], dim: int, item_bytes: int, summed: bool
) -> None:
    assert cuts_tiles(part, dim, item_bytes) == summed


def test_vectors_are_left_alone() -> None:
    assert not cuts_tiles((100,), 0, 2)


@pytest.mark.parametrize(("columns", "dim"), [(128, 0), (256, 1)])
def test_what_is_written_for_tpus(columns: int, dim: int) -> None:
    """Parts of 128 columns come first, parts of 256 stay where they are."""
    shard = jax.ShapeDtypeStruct((2, 4, 8, 16, 4 * columns), "bfloat16")
    traced = jax.jit(by_devices(scatter_sum, 2, ("y",))).trace(shard)  # type: ignore[arg-type]

    text = traced.lower(lowering_platforms=("tpu",)).as_text()

    (said,) = re.findall(r"scatter_dimension = (\d+)", text)
    assert int(said) == (0 if dim == 0 else 2)
