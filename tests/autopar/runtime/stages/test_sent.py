"""Tests that values arrive unchanged on other devices, however they are copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.runtime.stages import stage as sent_module
from autopar.runtime.stages.pipeline import StageCopy
from autopar.runtime.stages.run import Transfers
from autopar.runtime.stages.stage import Sent, same_parts


def stage_mesh(first, sizes=(2, 2), names=("a", "b")):
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[first : first + count]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def way(old, new, first=4, sizes=(2, 2)):
    source = NamedSharding(stage_mesh(0), P(*old))
    return source, NamedSharding(stage_mesh(first, sizes), P(*new))


def landed(array, source, target):
    out = Sent(1, (0,), (source,), (target,)).land_arrays(
        [jax.device_put(array, source)]
    )
    assert len(out) == 1
    return out[0]


WAYS = [
    (("a", "b"), ("a", "b"), True),
    ((("a", "b"),), (("a", "b"),), True),
    ((None, "b"), (None, "b"), True),
    ((), (), True),
    (("a",), ("b",), False),
    (("a", "b"), ("b", "a"), False),
    (("a",), (), False),
]


@pytest.mark.parametrize(("old", "new", "alike"), WAYS)
def test_what_lands_is_what_was_sent(old, new, alike):
    source, target = way(old, new)
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    found = landed(array, source, target)
    assert same_parts(array.shape, source, target) is alike
    assert found.sharding == target
    assert found.committed
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, array[shard.index])


def test_equal_parts_are_copied_without_device_put(monkeypatch):
    source, target = way(("a",), ("a",))
    array = jax.device_put(np.ones((4, 4), np.float32), source)
    sent = Sent(1, (0, 1), (source, source), (target, source))

    def refuse(*_):
        raise AssertionError("device_put was called")

    monkeypatch.setattr(sent_module.jax, "device_put", refuse)
    moved, kept = sent.land_arrays([array, array])
    assert moved.sharding == target
    assert kept is array


def test_a_value_that_lies_elsewhere_than_planned_is_moved_all_the_same():
    source, target = way(("a",), ("a",))
    lies = NamedSharding(source.mesh, P("b"))
    array = jax.device_put(np.arange(16, dtype=np.float32), lies)
    (found,) = Sent(1, (0,), (source,), (target,)).land_arrays([array])
    assert found.sharding == target
    np.testing.assert_array_equal(found, np.arange(16))


def test_keys_land_as_keys():
    source, target = way((), ())
    keys = jax.random.split(jax.random.key(3), 4)
    found = landed(keys, source, target)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    assert found.sharding.is_equivalent_to(target, found.ndim)


def test_a_consumed_value_is_an_error():
    source, target = way(("a",), ("a",))
    array = jax.device_put(jnp.ones(4), source)
    array.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        Sent(1, (0,), (source,), (target,)).land_arrays([array])


def test_copies_are_explicit_transfers():
    source, target = way(("a",), ("a",))
    array = jax.device_put(jnp.ones(4), source)
    sent = Sent(1, (0,), (source,), (target,))
    with jax.transfer_guard("disallow"):
        assert sent.land_arrays([array])[0].sharding == target
    with (
        jax.transfer_guard("disallow_explicit"),
        pytest.raises(Exception, match="Disallowed device-to-device"),
    ):
        sent.land_arrays([array])


def test_stages_of_other_sizes_are_no_equal_parts():
    source, target = way(("a",), ("a",), first=4, sizes=(2, 1))
    assert not same_parts((4,), source, target)
    np.testing.assert_array_equal(landed(np.arange(4.0), source, target), np.arange(4))


@pytest.mark.parametrize("alone", [True, False])
def test_inputs_that_other_processes_fetch_are_copies(alone):
    """The call may free an input before another process has fetched it."""
    source, target = way((), ())
    given = jax.device_put(np.ones(4, np.float32), source)
    sent = Sent(1, (7,), (source,), (target,))
    handed = []

    class Step(Transfers):
        def __init__(self):
            pass

        def makes(self, stage):
            return True

        def alone(self, stage, other):
            return alone

        def send(self, tag, stage, sent, arrays, place):
            handed.extend(arrays)

    copied = StageCopy(0, sent, lambda *arrays: list(arrays))
    Step().copy(("input", 0), copied, [{7: given}, {}], [7])
    (found,) = handed
    given.delete()
    assert found.is_deleted() is alone
