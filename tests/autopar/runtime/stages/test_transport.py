"""Tests that arrays arrive unchanged, for all layouts on both sides."""

import queue
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError, StageError
from autopar.runtime.stages import transport
from autopar.runtime.stages.transport import (
    Links,
    LostError,
    ProgressWatch,
    on_device,
    wait_watched,
)
from autopar.runtime.world import World


class Servers:
    """Replaces the transfer servers: a fetched array is copied in this process."""

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
    """A channel on which all processes send the same data."""

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
    """The links of two processes with four devices each, simulated in this process."""
    devices = tuple(jax.devices())
    return [
        Links(World(devices, k, 2, Gathered(2)), lambda: servers, lambda d: d.id // 4)
        for k in range(2)
    ]


def moved(links, array, target, tag=("a",)):
    """The array at its target, assembled from the blocks of each process."""
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
    """A store of the coordination service, empty at first."""

    def __init__(self):
        self.values = {}

    def key_value_dir_get(self, folder):
        found = self.values.items()
        return [(k, v) for k, v in found if k.startswith(f"{folder}/")]


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


class Watched:
    """Process 0 watches processes 1 and 2, with a clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.store = Store()
        monkeypatch.setattr(
            transport, "time", types.SimpleNamespace(monotonic=lambda: self.now)
        )
        self.watch = ProgressWatch(self.store, 0, 3, silence_s=7.0)

    def at(self, now, **counts):
        """The lost processes at a given time, after these new counters."""
        self.now = now
        for name, count in counts.items():
            self.store.values[f"autopar/beats/{name[1:]}"] = count
        self.watch.look()
        self.watch._looked = now
        return self.watch.lost_processes(0.0)


@pytest.fixture
def watched(monkeypatch):
    made = Watched(monkeypatch)
    yield made
    made.now = 0.0
    made.watch.close()


def test_a_process_is_lost_whose_counter_stands_still(watched):
    assert watched.at(101.0, p1=1, p2=1) == ()
    assert watched.at(106.0, p1=2) == ()
    assert watched.at(108.0) == ()  # 7 s are not too long
    assert watched.at(108.5) == (2,)
    assert watched.at(113.5) == (1, 2)
    assert watched.at(114.0, p1=3) == (2,)


def test_silence_counts_from_when_a_process_began_to_wait(watched):
    watched.at(101.0, p1=1, p2=1)
    watched.at(106.0, p1=2)
    watched.at(109.0)
    assert watched.watch.lost_processes(102.0) == ()
    assert watched.watch.lost_processes(101.5) == (2,)


def test_counters_of_other_numbers_with_the_same_digits_are_not_mistaken(watched):
    watched.at(101.0, p1=1, p2=1)
    assert watched.at(108.5, p10=7, p2=2) == (1,)


def test_a_lost_service_does_not_hide_the_error_of_a_wait(watched, monkeypatch):
    def gone(folder):
        raise jax.errors.JaxRuntimeError("the service has ended")

    monkeypatch.setattr(watched.store, "key_value_dir_get", gone)
    with pytest.raises(ZeroDivisionError):
        wait_watched(watched.watch, lambda: 1 / 0)


def test_the_environment_sets_how_long_a_process_may_be_silent(links, monkeypatch):
    monkeypatch.setenv("AUTOPAR_STAGES_SILENCE", "60")
    assert transport.silence_s() == 60.0
    patient = Links(links[0].world, lambda: links[0]._server)

    def gone():
        raise LostError((1,))

    with pytest.raises(StageError, match="has waited 60 s for process 1 while moving"):
        patient.wait_for(gone, "moving")


@pytest.mark.parametrize("text", ["soon", "0.5", "-3", "inf", "nan", ""])
def test_a_wrong_time_of_silence_is_refused(monkeypatch, text):
    monkeypatch.setenv("AUTOPAR_STAGES_SILENCE", text)
    with pytest.raises(PlanError, match=r"AUTOPAR_STAGES_SILENCE=.* such as 60"):
        transport.silence_s()


def test_all_are_lost_where_the_service_does_not_answer(watched):
    watched.at(101.0, p1=1, p2=1)
    watched.now = 108.0
    assert watched.watch.lost_processes(0.0) == ()
    watched.now = 108.5
    assert watched.watch.lost_processes(0.0) == (1, 2)
    assert watched.watch.lost_processes(104.0) == ()


def test_a_process_that_says_that_it_failed_is_lost_at_once(watched):
    watched.store.values["autopar/beats/2/failed"] = "ValueError: 3"
    assert watched.at(100.0) == (2,)
    assert watched.watch.said == {2: "ValueError: 3"}


def test_a_wait_for_a_lost_process_ends(watched):
    """Its thread is joined when the watch is closed."""
    watched.store.values["autopar/beats/1/failed"] = "ZeroDivisionError"
    watched.watch.look()
    goes_on = threading.Event()
    with pytest.raises(LostError) as found:
        wait_watched(watched.watch, goes_on.wait)
    assert found.value.processes == (1,)
    *_, waiting = watched.watch._threads
    assert waiting.is_alive()
    watched.now = 0.0
    threading.Timer(0.05, goes_on.set).start()
    watched.watch.close()
    assert not waiting.is_alive()


def test_work_is_done_in_the_meantime(watched):
    assert wait_watched(None, lambda: 3) == 3
    assert wait_watched(watched.watch, lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        wait_watched(watched.watch, lambda: 1 / 0)


def test_a_watch_counts_and_says_that_it_fails(monkeypatch):
    """Until it is closed, or its process has left the service."""
    beats, client = queue.Queue(), Store()
    client.key_value_increment = lambda key, by: beats.put((key, by))
    client.key_value_set = client.values.__setitem__
    found = types.SimpleNamespace(client=client)
    monkeypatch.setattr(transport, "_BEAT_S", 0.01)
    monkeypatch.setattr(transport.jax_compat, "coordination", lambda: found)
    watch = ProgressWatch(client, 1, 2)
    looked = watch._looked
    assert [beats.get(timeout=20) for _ in range(3)] == [("autopar/beats/1", 1)] * 3
    assert watch._looked > looked
    watch.fail("no more")
    assert client.values == {"autopar/beats/1/failed": "no more"}
    (beat,) = watch._threads
    found.client = None
    beat.join(timeout=20)
    assert not beat.is_alive()
    watch.close()


def test_a_watch_is_closed_at_the_end_of_the_program(monkeypatch):
    """It waits for its thread, which no longer counts."""
    hooks = []
    exits = types.SimpleNamespace(register=hooks.append, unregister=hooks.remove)
    monkeypatch.setattr(transport, "atexit", exits)
    watch = ProgressWatch(Store(), 0, 2)
    (beat,) = watch._threads
    assert hooks == [watch.close]
    assert beat.is_alive()
    watch.close()
    assert not beat.is_alive()
    assert not hooks


@pytest.fixture
def lost(links, monkeypatch):
    """Whether the process was told to end alone, and its links."""
    left = []
    monkeypatch.setattr(transport.agreement, "leave_at_end", lambda: left.append(1))
    return left, links[0]


def test_a_process_that_was_lost_once_is_lost_in_every_step(lost):
    left, link = lost

    def gone():
        raise LostError((1,))

    with pytest.raises(StageError, match="has waited 7 s for process 1 while moving"):
        link.wait_for(gone, "moving")
    with pytest.raises(StageError, match="process 1 while moving"):
        link.begin(b"", first=False)
    assert left == [1]


def test_what_a_lost_process_said_is_in_the_error(lost):
    def gone():
        raise LostError((1,), "ValueError: 3")

    with pytest.raises(StageError, match=r"process 1 has failed .*: ValueError: 3"):
        lost[1].wait_for(gone)


def test_a_task_that_a_process_waits_for_is_named(lost):
    _, link = lost
    ready = types.SimpleNamespace(is_deleted=lambda: False, is_ready=lambda: True)
    late = types.SimpleNamespace(is_deleted=lambda: False, is_ready=lambda: False)
    given = types.SimpleNamespace(is_deleted=lambda: True, is_ready=lambda: False)
    link._ask(("rows", 0), 1, [ready])
    assert link._awaited_tasks() == ""
    link._ask(("forward", 2, 1, 0, 3), 1, [ready, late])
    text = ", for forward of stage 2 and microbatch 3 of process 1"
    assert link._awaited_tasks() == text
    assert list(link._asked) == [(("forward", 2, 1, 0, 3), 1)]
    link._ask(("sum",), 1, [given])
    link._ask(("last",), 1, [given])
    assert len(link._asked) == 2
    assert transport.task_text(("update", 0, 0, 0, -1)) == "for update of stage 0"


def test_an_error_without_release_ends_all_processes(lost):
    left, link = lost
    said = []
    link._watch = types.SimpleNamespace(fail=said.append)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), link.together(None):
            raise ZeroDivisionError("once")
    assert said == ["ZeroDivisionError: once"]
    assert left == [1, 1]
    with pytest.raises(StageError, match="process 0 failed before while running a"):
        link.agree(True, "asking")


def test_a_connection_that_breaks_is_a_lost_process(lost):
    left, link = lost

    def broken(data):
        raise jax.errors.JaxRuntimeError("reset")

    link.world.channel.gather = broken
    with pytest.raises(StageError, match="has lost another process while asking"):
        link.agree(True, "asking")
    with pytest.raises(StageError, match="while asking"):
        link.wait_for(list)
    assert left == [1]


class Said:
    """A channel on which the other process sends what a test sets."""

    def __init__(self, *said):
        self.said = list(said)

    def gather(self, data):
        return [data, self.said.pop(0)]

    def exchange(self, data, what):
        return {0: data, 1: data}


def test_a_step_has_a_number_that_no_process_has_used(lost):
    _, link = lost
    numbers = [(5).to_bytes(8, "little"), (2).to_bytes(8, "little")]
    channel = Said(numbers[0] + b"a", numbers[1] + b"b")
    object.__setattr__(link.world, "channel", channel)
    assert link.begin(b"a", first=False)
    assert link.number == 6
    assert not link.begin(b"a", first=False)
    assert link.number == 7
    assert link.begin(b"a", first=True)
    assert link.number == 8


def test_all_processes_must_agree(lost):
    _, link = lost
    object.__setattr__(link.world, "channel", Said(b"\1", b"\0", b"\1"))
    assert [link.agree(x, "asking") for x in (True, True, False)] == [
        True,
        False,
        False,
    ]


def test_an_error_is_raised_once_the_others_are_released(lost):
    _, link = lost
    released = []
    object.__setattr__(link.world, "channel", Said(b"\0", b"\0"))
    link.world.channel.tell = lambda data: None
    with link.together(lambda: released.append(1)):
        pass
    assert not released
    with (
        pytest.raises(ZeroDivisionError),
        link.together(lambda: released.append(1)),
    ):
        raise ZeroDivisionError
    assert released == [1]
    with transport.meeting(None, None, "alone"):
        pass


@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_a_number_of_one_process_is_on_all(links, origin, fails):
    first = jax.devices()[4 * origin]
    source = on_device(first)
    array = None if fails else jax.device_put(jnp.float32(3), source)
    struct = jax.ShapeDtypeStruct((), jnp.float32)
    assert [d.id for d in links[0].devices] == [0, 4]
    order = links if origin == 0 else links[::-1]
    found = [link.everywhere(("loss",), struct, source, array) for link in order]
    assert (found[0] is None) == fails
    # The other process goes on, with zeros.
    assert float(found[1]) == (0.0 if fails else 3.0)
