"""Tests which arrays are moved, copied or kept on the meshes of plans and callers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import Cluster
from autopar.runtime import placement, state_mover
from autopar.runtime.state_mover import slowest_bytes_per_s

P = PartitionSpec
DEVICES = np.array(jax.devices()[:8])
PLANNED = Mesh(DEVICES.reshape(2, 4), ("data", "tensor"))
SPECS = [
    P(*dims)
    for dims in itertools.product(
        (None, "data", "tensor", ("data", "tensor"), ("tensor", "data")), repeat=2
    )
    if len(names := [n for d in dims if d for n in np.atleast_1d(d)]) == len(set(names))
]


def laid(spec: PartitionSpec, mesh: Mesh = PLANNED) -> jax.Array:
    whole = jnp.arange(128.0).reshape(16, 8)
    return jax.device_put(whole, NamedSharding(mesh, spec))


def shards(array: jax.Array) -> dict[Any, bytes]:
    return {s.device: np.asarray(s.data).tobytes() for s in array.addressable_shards}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_an_array_is_given_back_where_it_lies(
    spec: PartitionSpec, turned: bool
) -> None:
    """On a mesh of three axes, one of one device, with its devices in any order."""
    grid = PLANNED.devices.T if turned else PLANNED.devices
    home = Mesh(grid[:, None], ("x", "one", "y"))
    array = laid(spec)
    (found,) = placement.given_back([array], home)

    assert found.sharding.mesh == home
    assert shards(found) == shards(array)
    np.testing.assert_array_equal(found, array)


def test_what_the_callers_mesh_cannot_say_stays_if_it_is_state() -> None:
    """Axes of the caller that each span half of an axis of the plan, out of order."""
    order = [0, 3, 5, 6, 1, 2, 4, 7]
    home = Mesh(DEVICES[order].reshape(2, 4), ("x", "y"))
    array = laid(P("tensor"))
    state, other = placement.given_back([array, array], home, [0])

    assert state is array
    assert other.sharding == NamedSharding(home, P())
    assert placement.given_back([array], home)[0] is array
    assert placement.given_back([array], None)[0] is array
    np.testing.assert_array_equal(other, array)


def test_an_array_of_other_devices_is_copied_to_the_caller() -> None:
    few = Mesh(DEVICES[:4], ("x",))
    array = laid(P("data"))
    (found,) = placement.given_back([array], few, [])

    assert found.sharding == NamedSharding(few, P())
    assert placement.given_back([found], few, [])[0] is found


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 8), P(("data", "tensor"))),
        ((6, 8), P(None, ("data", "tensor"))),
        ((0, 8), P(None, ("data", "tensor"))),
        ((4, 4), P()),
        ((), P()),
    ],
)
def test_state_is_created_in_even_parts(shape: Any, spec: PartitionSpec) -> None:
    found = placement.even_sharding(shape, PLANNED)
    assert found.is_equivalent_to(NamedSharding(PLANNED, spec), len(shape))


def test_an_array_that_is_consumed_twice_is_copied_once() -> None:
    array = laid(P("data"))
    given = [array, array, laid(P()), array]
    placed = list(given)
    placement.separate(given, placed, [0, 1, 2])

    assert [a is b for a, b in zip(given, placed, strict=True)] == [
        True, False, True, True,
    ]  # fmt: skip
    np.testing.assert_array_equal(placed[1], array)


def test_consumed_arrays_are_deleted_and_results_stay() -> None:
    old = [laid(P("data")) for _ in range(4)]
    moved = laid(P())
    placed = [old[0], laid(P("data")), moved, old[3]]
    placement.consume(old, placed, [0, 1, 2, 3], [placed[3]])

    # The caller keeps what had to be moved, and what is returned.
    assert [x.is_deleted() for x in placed] == [True, True, True, False]
    assert [x.is_deleted() for x in old] == [True, True, False, False]


def test_leaves_of_several_sets_of_devices_are_created_apart() -> None:
    halves = [Mesh(DEVICES[:4], ("x",)), Mesh(DEVICES[4:], ("x",))]
    shardings = {
        "a": NamedSharding(halves[0], P("x")),
        "b": NamedSharding(halves[1], P()),
        "c": NamedSharding(halves[0], P()),
    }

    def make(start: Any) -> Any:
        return {"a": start + jnp.arange(8.0), "b": 2 * start, "c": 3 * start}

    found = placement.create(make, (jnp.float32(1.0),), shardings)

    assert {k: x.sharding for k, x in found.items()} == shardings
    np.testing.assert_array_equal(found["a"], 1.0 + np.arange(8.0))
    assert (float(found["b"]), float(found["c"])) == (2.0, 3.0)


def test_shapes_of_parts_of_a_batch() -> None:
    rows = np.zeros((4, 6, 2))
    assert placement.global_shape(rows, 1) == (4, 6, 2)
    assert placement.global_shape(rows, 3) == (12, 6, 2)
    assert placement.global_shape(rows, 3, 1) == (4, 18, 2)
    assert placement.global_shape(np.float32(1.0), 3) == ()
    assert placement.global_shape(jax.random.key(0), 3) == ()
    assert placement.global_shape(jax.random.PRNGKey(0), 3) == (2,)
    assert placement.global_shape(np.zeros(2, np.int32), 3) == (6,)
    assert placement.rows_dim((4, 6), (4, 18)) == 1
    assert placement.rows_dim((4, 6), (8, 6)) == 0


def test_bytes_on_this_process_count_every_copy() -> None:
    assert placement.local_bytes(laid(P("data", "tensor"))) == 512
    assert placement.local_bytes(laid(P("data"))) == 4 * 512
    assert placement.local_bytes(laid(P())) == 8 * 512


def test_a_weak_type_is_made_strong() -> None:
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    found = placement.place(weak, NamedSharding(PLANNED, P()))
    assert (found.weak_type, found.dtype, float(found)) == (False, weak.dtype, 2.0)
    again = placement.place(found, NamedSharding(PLANNED, P()))
    assert again is found


def test_arrays_are_freed_as_soon_as_the_next_would_be_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An array of exactly the room that is left still fits."""
    monkeypatch.setattr(state_mover, "IN_FLIGHT_BYTES", 2048)
    old = [laid(P("data", "tensor")) for _ in range(5)]
    held = state_mover._Consumed([*old, old[4]])
    deleted: list[int] = []
    for array in old:
        held.make_room(array)
        held.add(array, jnp.zeros(4))
        deleted.append(sum(x.is_deleted() for x in old))
    held.make_room(np.zeros(10**6))
    held.free()

    assert deleted == [0, 0, 0, 4, 4]
    assert held.count == 4
    assert not old[4].is_deleted()  # it stands twice in the state


def test_the_slowest_link_that_joins_devices() -> None:
    cluster = Cluster.parse("2x4:h100,network=80Gb/s")
    slow = cluster.levels[0].link.bandwidth_bytes_per_s
    assert slowest_bytes_per_s(cluster) == slow
    alone = Cluster.parse("1x4:h100,network=80Gb/s")
    assert slowest_bytes_per_s(alone) == alone.levels[1].link.bandwidth_bytes_per_s
    assert slowest_bytes_per_s(Cluster.parse("1:h100")) == float("inf")
    mixed = Cluster.parse("1x2:cpu+1x2:cpu,efficiency=0.4")
    assert mixed.between is not None
    links = [p.levels[1].link for p in mixed.groups]
    rates = [x.bandwidth_bytes_per_s for x in (*links, mixed.between)]
    assert slowest_bytes_per_s(mixed) == min(rates)
