"""Arrays arrive as they were sent, whatever their layouts on both sides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.stages.transport import Links, on_device
from autopar.runtime.world import World


class Server:
    """Takes the place of the transfer server; a fetched array is moved here."""

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


@pytest.fixture
def links():
    return Links(World(tuple(jax.devices())), Server)


def lying(devices, axes, *spec):
    grid = np.array(jax.devices())[np.array(devices)]
    return NamedSharding(Mesh(grid, axes), PartitionSpec(*spec))


PAIR = lying([0, 1], ("x",), "x")
LAYOUTS = {
    "the same": (PAIR, lying([2, 3], ("y",), "y")),
    "more copies": (PAIR, lying([[2, 3], [4, 5]], ("a", "b"), "b")),
    "fewer copies": (lying([[2, 3], [4, 5]], ("a", "b"), "a"), PAIR),
    "other parts": (PAIR, lying([4, 5, 6, 7], ("y",), "y")),
    "another dimension": (PAIR, lying([2, 3], ("y",), None, "y")),
    "in another order": (lying([1, 0], ("x",), "x"), PAIR),
    "one device": (PAIR, on_device(jax.devices()[7])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_array_arrives_in_the_layout_that_is_wanted(links, name):
    source, target = LAYOUTS[name]
    array = np.arange(32.0).reshape(8, 4)
    way = links.route(array.shape, jnp.float32, source, target)
    links.offer(("a",), [jax.device_put(jnp.float32(array), source)], [way])
    (found,) = links.fetch(0, ("a",), [way])
    assert found.sharding == target
    np.testing.assert_array_equal(found, array)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, array[shard.index])


def test_each_part_is_sent_once(links):
    source, target = LAYOUTS["fewer copies"]
    way = links.route((8, 4), jnp.float32, source, target)
    links.offer(("a",), [jax.device_put(jnp.ones((8, 4)), source)], [way])
    (sent,) = links._server.offered.values()
    assert [x.shape for x in sent] == [(4, 4), (4, 4)]


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
def test_arrays_of_every_kind_arrive(links, array):
    source, target = LAYOUTS["the same"]
    way = links.route(array.shape, array.dtype, source, target)
    links.offer(("a",), [jax.device_put(array, source)], [way])
    (found,) = links.fetch(0, ("a",), [way])
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    bits = jax.random.key_data if array.dtype.name.startswith("key") else np.asarray
    np.testing.assert_array_equal(bits(found), bits(array))


def test_what_a_process_failed_to_make_has_the_shapes_that_others_wait_for(links):
    source, target = LAYOUTS["other parts"]
    way = links.route((8, 4), jnp.int4, source, target)
    links.give_up(("a",), [way])
    (found,) = links.fetch(0, ("a",), [way])
    assert (found.shape, found.dtype) == ((8, 4), jnp.int4)


def test_transfers_of_two_steps_are_not_mistaken_for_each_other(links):
    source, target = LAYOUTS["the same"]
    way = links.route((2,), jnp.float32, source, target)
    for value in (1.0, 2.0):
        assert links.begin(b"", first=False)
        links.offer(("a",), [jax.device_put(jnp.full(2, value), source)], [way])
    assert float(links.fetch(0, ("a",), [way])[0][0]) == 2.0
