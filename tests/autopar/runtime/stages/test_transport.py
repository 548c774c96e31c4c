"""Arrays arrive as they were sent, whatever their layouts on both sides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.stages.routes import on_device
from autopar.runtime.stages.transport import (
    Links,
    LostError,
    ProgressWatch,
    wait_watched,
)
from autopar.runtime.world import World


class Servers:
    """Takes the place of the transfer servers; a fetched array is moved here."""

    def __init__(self):
        self.offered = {}

    def address(self):
        return "here"

    def connect(self, address):
        return self

    def await_pull(self, number, arrays):
        assert number not in self.offered
        self.offered[number] = arrays

    def pull(self, number, structs):
        arrays = self.offered.pop(number)
        assert [(x.shape, x.dtype) for x in arrays] == [
            (s.shape, s.dtype) for s in structs
        ]
        return jax.device_put(arrays, [s.sharding for s in structs])


class Gathered:
    """A channel on which all processes say the same."""

    def __init__(self, count):
        self.count = count

    def gather(self, data):
        return [data] * self.count

    def exchange(self, data, what):
        return dict.fromkeys(range(self.count), data)


@pytest.fixture
def servers():
    return Servers()


@pytest.fixture
def links(servers):
    """Of two processes with four devices each, which are simulated in this one."""
    devices = tuple(jax.devices())
    return [
        Links(World(devices, k, 2, Gathered(2)), lambda: servers, lambda d: d.id // 4)
        for k in range(2)
    ]


def moved(links, array, target, tag=("a",)):
    """The array where it is wanted, of the blocks that each process has."""
    way = links[0].route(array.shape, array.dtype, array.sharding, target)
    for link in links:
        link.offer(tag, [array], [way])
    blocks = {}
    for link in links:
        pulled = link.fetch(tag, [way])
        arrived = {process: iter(pieces) for process, pieces in pulled.items()}
        blocks |= way.blocks_landed(link.index, arrived, array)
    return way.array(blocks)


def lying(devices, axes, *spec):
    grid = np.array(jax.devices())[np.array(devices)]
    return NamedSharding(Mesh(grid, axes), PartitionSpec(*spec))


PAIR = lying([0, 1], ("x",), "x")
LAYOUTS = {
    "the same": (PAIR, lying([4, 5], ("y",), "y")),
    "more copies": (PAIR, lying([[2, 3], [4, 5]], ("a", "b"), "b")),
    "fewer copies": (lying([[2, 3], [4, 5]], ("a", "b"), "a"), PAIR),
    "other parts": (PAIR, lying([4, 5, 6, 7], ("y",), "y")),
    "another dimension": (PAIR, lying([4, 5], ("y",), None, "y")),
    "in another order": (lying([5, 4], ("x",), "x"), PAIR),
    "one device": (PAIR, on_device(jax.devices()[7])),
    "of both to both": (
        lying([[0, 1], [4, 5]], ("a", "b"), "b", "a"),
        lying([[2, 6], [7, 3]], ("a", "b"), "a", "b"),
    ),
    "of both to one": (lying([3, 4], ("a",), None, "a"), lying([5, 6], ("a",), "a")),
    "of uneven parts": (lying([0, 1, 2, 4], ("a",), "a"), lying([3, 5], ("a",), "a")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_array_arrives_in_the_layout_that_is_wanted(links, name):
    source, target = LAYOUTS[name]
    array = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    found = moved(links, jax.device_put(array, source), target)
    assert found.sharding == target
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, array[shard.index])


def test_a_process_gets_each_piece_once_and_only_what_it_lacks(links, servers):
    array = jax.device_put(jnp.ones((8, 4)), lying([[0, 1], [4, 5]], ("a", "b"), "b"))
    target = lying([[2, 3], [6, 7]], ("a", "b"), "a")
    way = links[0].route(array.shape, array.dtype, array.sharding, target)
    for link in links:
        link.offer(("a",), [array], [way])
    assert not servers.offered
    ones = jax.device_put(jnp.ones((8, 4)), PAIR)
    for target in (lying([4, 5, 6, 7], ("a",)), lying([3, 4], ("a",))):
        way = links[0].route(ones.shape, ones.dtype, PAIR, target)
        links[0].offer((target,), [ones], [way])
        (sent,) = servers.offered.values()
        assert [x.shape for x in sent] == [(4, 4), (4, 4)]
        servers.offered.clear()


@pytest.mark.parametrize(
    "array",
    [
        jax.random.split(jax.random.key(3), 4),
        jnp.arange(-4, 4, dtype=jnp.int4),
        jnp.zeros((0, 3)),
        jnp.array([True, False]),
        jnp.bfloat16(3) * jnp.ones(2, jnp.bfloat16),
    ],
    ids=["keys", "int4", "empty", "bool", "bfloat16"],
)
@pytest.mark.parametrize("name", ["the same", "of both to one"])
def test_arrays_of_every_kind_arrive(links, array, name):
    source, target = (
        NamedSharding(x.mesh, PartitionSpec(x.mesh.axis_names)) for x in LAYOUTS[name]
    )
    found = moved(links, jax.device_put(array, source), target)
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    bits = jax.random.key_data if array.dtype.name.startswith("key") else np.asarray
    np.testing.assert_array_equal(bits(found), bits(array))


def test_what_a_process_failed_to_make_has_the_shapes_that_others_wait_for(links):
    source, target = LAYOUTS["other parts"]
    way = links[0].route((8, 4), jnp.int4, source, target)
    links[0].offer(("a",), None, [way])
    (found,) = links[1].land_pieces([way], links[1].fetch(("a",), [way]))
    assert (found.shape, found.dtype) == ((8, 4), jnp.int4)


def test_transfers_of_two_steps_are_not_mistaken_for_each_other(links):
    source, target = LAYOUTS["the same"]
    for value in (1.0, 2.0):
        assert all(link.begin(b"", first=False) for link in links)
        array = jax.device_put(jnp.full(2, value), source)
        way = links[0].route((2,), jnp.float32, source, target)
        links[0].offer(("a",), [array], [way])
    (found,) = links[1].land_pieces([way], links[1].fetch(("a",), [way]))
    assert float(found[0]) == 2.0


class Store:
    """A store of the coordination service, in which nothing is at first."""

    def __init__(self):
        self.values = {}

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("not there")
        return self.values[key]


def test_a_process_that_says_why_it_fails_and_ends_at_once_is_heard():
    """Though its connection breaks before this process looks at what it said."""
    store = Store()
    watch = ProgressWatch(store, 0, 2)

    def gather():
        store.values["autopar/beats/1/failed"] = "ZeroDivisionError"
        raise jax.errors.JaxRuntimeError("connection reset")

    try:
        with pytest.raises(LostError) as found:
            wait_watched(watch, gather)
    finally:
        watch.close()
    assert (found.value.processes, found.value.said) == ((1,), "ZeroDivisionError")
