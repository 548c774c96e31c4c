"""Tests that layouts have the same meaning in JAX: which device has which part."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from autopar_passes.layouts import Layout, constrain, partition_spec

SIZES = (2, 2, 2)


def mesh() -> Any:
    return jax.sharding.Mesh(
        np.array(jax.devices()[:8]).reshape(SIZES), ("a", "b", "c")
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts in which each axis splits one dimension or none, in any order."""
    rank = draw(st.integers(1, 3))
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(range(3))):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(axis)
    return tuple(map(tuple, dims))


def part_of(layout: Layout, place: tuple[int, ...], size: int) -> tuple[slice, ...]:
    """The part of an array that a device of the mesh has, by definition."""
    out: list[slice] = []
    for axes in layout:
        # The first axis is the major one: its neighbours are farthest apart.
        number = 0
        for axis in axes:
            number = number * SIZES[axis] + place[axis]
        width = size // math.prod(SIZES[a] for a in axes)
        out.append(slice(number * width, (number + 1) * width))
    return tuple(out)


@given(layouts())
def test_each_device_holds_its_part(layout: Layout) -> None:
    sharding = NamedSharding(mesh(), partition_spec(mesh(), layout))
    held = sharding.devices_indices_map((8,) * len(layout))
    for place in itertools.product(*map(range, SIZES)):
        found = held[mesh().devices[place]]
        spans = [range(*x.indices(8)) for x in found]
        wanted = [range(*x.indices(8)) for x in part_of(layout, place, 8)]
        assert spans == wanted


@given(layouts())
def test_a_spec_ends_with_the_last_dimension_that_is_split(layout: Layout) -> None:
    spec = partition_spec(mesh(), layout)
    assert not spec or spec[-1] is not None
    assert len(spec) == max((d + 1 for d, axes in enumerate(layout) if axes), default=0)


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (((), ()), PartitionSpec()),
        (((0,), ()), PartitionSpec("a")),
        (((), (2, 0)), PartitionSpec(None, ("c", "a"))),
    ],
)
def test_specs(layout: Layout, spec: PartitionSpec) -> None:
    assert partition_spec(mesh(), layout) == spec


def test_a_program_states_the_layout() -> None:
    @jax.jit
    def step(x: Any) -> Any:
        return constrain(x * 2, mesh(), ((1, 0), ()))

    made = step(jnp.ones((8, 3)))
    assert made.sharding.spec == PartitionSpec(("b", "a"))
    assert {s.data.shape for s in made.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize(
    "array", [jnp.float32(1), jax.random.split(jax.random.key(0), 8)]
)
def test_scalars_and_keys_stay_as_they_are(array: Any) -> None:
    layout = ((0,),) * array.ndim
    assert constrain(array, mesh(), layout) is array
