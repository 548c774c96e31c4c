"""Tests moves that free each array as soon as it has been moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime import state_mover
from autopar.runtime.state_mover import DevicePut, StateLayout, layout_of, move

EIGHT = Mesh(np.array(jax.devices()[:8]), ("a",))
TWO = Mesh(np.array(jax.devices()[2:4]), ("b",))


def state() -> dict[str, jax.Array]:
    rows = NamedSharding(EIGHT, PartitionSpec("a"))
    made = {x: jnp.arange(64.0).reshape(16, 4) + k for k, x in enumerate("pqr")}
    return {x: jax.device_put(array, rows) for x, array in made.items()}


def columns(given: dict[str, Any]) -> StateLayout:
    plain = layout_of(given)
    leaves = {
        path: dataclasses.replace(leaf, spec=((), ("b",)))
        for path, leaf in plain.leaves.items()
    }
    return StateLayout(leaves=leaves, meshes=((("b", 2),),))


def test_old_arrays_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than two arrays of 256 bytes are held twice at a time."""
    monkeypatch.setattr(state_mover, "IN_FLIGHT_BYTES", 512)
    given, held = state(), list[int]()

    class Counting(DevicePut):
        def carry(self, *words: Any) -> Any:
            held.append(sum(not x.is_deleted() for x in given.values()))
            return super().carry(*words)

    moved = move(given, None, columns(given), Counting((TWO,)), consume=True)
    assert held == [3, 3, 1]
    assert all(x.is_deleted() for x in given.values())
    for k, array in enumerate(moved.values()):
        np.testing.assert_array_equal(array, np.arange(64).reshape(16, 4) + k)


def test_what_stands_there_twice_is_moved_twice() -> None:
    given = state()
    given["q"] = given["p"]
    moved = move(given, None, columns(given), DevicePut((TWO,)), consume=True)
    np.testing.assert_array_equal(moved["q"], moved["p"])


def test_what_stays_in_its_place_is_not_freed() -> None:
    given = {"p": jax.device_put(jnp.ones((4, 2)), jax.devices()[2])}
    one = Mesh(np.array(jax.devices()[2:4]), ("b",))
    plain = StateLayout(leaves=layout_of(given).leaves, meshes=((("b", 2),),))
    moved = move(given, None, plain, DevicePut((one,)), consume=True)
    np.testing.assert_array_equal(moved["p"], np.ones((4, 2)))


def test_a_failure_before_anything_is_freed_costs_nothing() -> None:
    given = state()

    class Broken(DevicePut):
        def carry(self, *words: Any) -> Any:
            raise OSError("the link is down")

    with pytest.raises(OSError, match="the link is down"):
        move(given, None, columns(given), Broken((TWO,)), consume=True)
    assert not any(x.is_deleted() for x in given.values())


def test_a_failure_half_way_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_mover, "IN_FLIGHT_BYTES", 1)
    given = state()

    class Breaking(DevicePut):
        def carry(self, array: Any, *words: Any) -> Any:
            if array is given["r"]:
                raise OSError("the link is down")
            return super().carry(array, *words)

    text = "moving 'r' failed after 2 arrays .* the link is down Restore a checkpoint"
    with pytest.raises(RuntimeError, match=text):
        move(given, None, columns(given), Breaking((TWO,)), consume=True)


@pytest.mark.parametrize("spec", [("a",), (None, "a"), (), (("a", "b"),), ("b", "a")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "key"])
def test_blocks_of_every_layout(spec: tuple[Any, ...], dtype: str) -> None:
    array: Any = jax.random.key(0)
    if dtype == "key":
        array = jax.random.split(array, (8, 8))
    else:
        array = jnp.arange(64).reshape(8, 8).astype(dtype)
    given = jax.device_put(array, NamedSharding(EIGHT, PartitionSpec("a")))
    grid = Mesh(np.array(jax.devices()[1:5]).reshape(2, 2), ("a", "b"))
    wanted = NamedSharding(grid, PartitionSpec(*spec))
    assert state_mover.is_movable(given, wanted)
    moved = state_mover.move_array(given, wanted)
    assert moved.sharding.is_equivalent_to(wanted, 2)
    assert moved.dtype == array.dtype
    assert bool(jnp.all(jax.device_put(moved, jax.devices()[0]) == array))
