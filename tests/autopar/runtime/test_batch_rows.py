"""Tests the exchange of rows on devices that stand for those of several processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime import batch_rows
from autopar.runtime.batch_rows import Part

P = PartitionSpec
PROCESSES, LOCAL = 4, 2
DEVICES = np.array(jax.devices()[: PROCESSES * LOCAL])
DTYPES: list[Any] = ["float32", "int32", "bool", "int8", "uint8", "bfloat16", "float16"]


def exchanged(
    wholes: list[np.ndarray], dims: list[int], group: int
) -> tuple[list[jax.Array], int]:
    """The arrays that the groups get, and the number of all-gathers."""
    mesh = batch_rows.group_mesh(tuple(map(tuple, DEVICES.reshape(-1, LOCAL))), group)
    by_process = [
        [np.split(x, PROCESSES, d)[k] for x, d in zip(wholes, dims, strict=True)]
        for k in range(PROCESSES)
    ]
    parts = tuple(
        Part(x.shape, d, x.dtype) for x, d in zip(by_process[0], dims, strict=True)
    )
    assert all(part.packs for part in parts)
    packed = [batch_rows.pack(own, parts) for own in by_process]
    lies = NamedSharding(mesh, P(("group", "member")))
    buffers = [
        jax.device_put(np.stack(rows), lies) for rows in zip(*packed, strict=True)
    ]
    run: Any = batch_rows.exchange(mesh, parts)
    count = run.lower(*buffers).as_text().count("stablehlo.all_gather")
    return run(*buffers), count


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_groups_get_all_their_rows_by_a_gather_for_each_size(
    group: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    wholes: list[np.ndarray] = []
    dims: list[int] = []
    for _ in range(int(draw.integers(1, 6))):
        dtype = jnp.dtype(draw.choice(DTYPES))
        shape = [int(n) for n in draw.integers(1, 4, int(draw.integers(1, 4)))]
        dims.append(int(draw.integers(len(shape))))
        shape[dims[-1]] *= PROCESSES
        wholes.append(draw.integers(0, 100, shape).astype(dtype))
    arrays, count = exchanged(wholes, dims, group)
    assert count == len({x.dtype.itemsize for x in wholes})
    for whole, array, dim in zip(wholes, arrays, dims, strict=True):
        np.testing.assert_array_equal(np.asarray(array), whole)
        assert array.dtype == whole.dtype
        shard = array.addressable_shards[0].data
        assert shard.shape[dim] == whole.shape[dim] * group // PROCESSES


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("x", "y")], ids=str)
def test_shards_are_cut_from_what_a_group_has(spec: PartitionSpec) -> None:
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    group = 2 if tuple(spec)[:1] == ("x",) else 4
    (array,), _ = exchanged([whole], [0], group)
    wanted = NamedSharding(Mesh(DEVICES.reshape(2, 4), ("x", "y")), spec)
    placed = batch_rows.cut(array, wanted)
    assert placed.sharding == wanted
    want = jax.device_put(whole, wanted)
    for found, right in zip(
        placed.addressable_shards, want.addressable_shards, strict=True
    ):
        assert found.device == right.device
        np.testing.assert_array_equal(np.asarray(found.data), np.asarray(right.data))


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (P(("x", "y", "z")), 1),
        (P(("x", "y")), 1),
        (P("x"), 2),
        (P(None, "x"), 4),
        (P(), 4),
        (P("z"), 4),
        # The rows of processes 0 and 1 are needed by 0 and 2. A group of four has
        # twice the rows that each needs.
        (P("y"), 4),
        (P(("y", "x")), 0),
    ],
    ids=str,
)
def test_the_least_group_that_has_all_rows(spec: PartitionSpec, size: int) -> None:
    """Axes x and y are between processes, z is within each process."""
    mesh = Mesh(DEVICES.reshape(2, 2, 2), ("x", "y", "z"))
    found = batch_rows.group_size((16, 16), 0, NamedSharding(mesh, spec), PROCESSES)
    assert found == size


def test_elements_of_some_bits_or_of_two_parts_are_not_packed() -> None:
    assert not Part((4,), 0, jnp.dtype("int4")).packs
    assert not Part((4,), 0, jnp.dtype("complex64")).packs
    assert Part((4,), 0, jnp.dtype("float8_e4m3fn")).packs
