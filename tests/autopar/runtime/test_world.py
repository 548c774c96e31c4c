"""Tests worlds: their devices, and processes that agree over a channel."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import memory_channel
import numpy as np
import pytest
import small_step

import autopar
from autopar import PlanError
from autopar.runtime import agreement, arguments
from autopar.runtime import world as world_module
from autopar.runtime.world import JaxChannel, World
from autopar_passes import jax_compat
from autopar_passes.program.calls import NamedRoles, StepCall
from autopar_passes.program.trace import open_arguments

PROCESSES, LOCAL = 2, 4


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


DEVICES = tuple(FakeDevice(10 + k, k // LOCAL) for k in range(PROCESSES * LOCAL))


def everywhere(run: Callable[[World], Any]) -> list[Any]:
    """What each of two processes returns or raises."""
    return memory_channel.everywhere(run, DEVICES, PROCESSES)


class TestThreads:
    """Collectives of CPU devices need two threads for each device of a process."""

    @pytest.mark.parametrize(
        ("platform", "devices", "threads", "warns"),
        [
            ("cpu", 2, 3, True),
            ("cpu", 2, 4, False),
            ("cpu", 1, 1, False),
            ("gpu", 2, 3, False),
        ],
    )
    def test_too_few_threads_are_a_warning(
        self,
        monkeypatch: pytest.MonkeyPatch,
        platform: str,
        devices: int,
        threads: int,
        warns: bool,
    ) -> None:
        monkeypatch.setenv("NPROC", str(threads))
        mine = [types.SimpleNamespace(platform=platform)] * devices
        asks = pytest.warns(UserWarning, match="NPROC=4 before JAX starts")
        with asks if warns else contextlib.nullcontext():
            world_module.warn_of_few_threads(mine)

    def test_a_world_of_several_processes_looks_at_its_own_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = jax.devices()[:2]
        monkeypatch.setenv("NPROC", "3")
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "local_devices", lambda: mine)
        with pytest.warns(UserWarning, match="has 2 CPU devices and 3 threads"):
            World.current()


class TestDevices:
    def test_current_is_all_of_jax(self) -> None:
        world = World.current()
        assert world.devices == tuple(jax.devices())
        assert (world.process_index, world.process_count) == (0, 1)
        assert world.channel.broadcast(b"x") == b"x"
        assert world.channel.gather(b"x") == [b"x"]

    def test_take_by_id_and_by_device(self) -> None:
        world = World(DEVICES[:4])
        assert world.take([12, DEVICES[0]]) == (DEVICES[2], DEVICES[0])
        assert world.at([3, 1]) == (DEVICES[3], DEVICES[1])

    @pytest.mark.parametrize("chosen", [[14], [DEVICES[4]], [None], ["x"]])
    def test_take_what_is_not_there(self, chosen: Any) -> None:
        with pytest.raises(PlanError, match=r"not among .* \[10, 11, 12, 13\]"):
            World(DEVICES[:4]).take(chosen)

    def test_devices_in_a_list_are_as_good(self) -> None:
        """As jax.devices() has them; a world is a value, and can be a key."""
        assert {World(list(DEVICES[:4])): 1} == {World(DEVICES[:4]): 1}

    def test_take_twice(self) -> None:
        with pytest.raises(PlanError, match="twice"):
            World(DEVICES[:4]).take([10, DEVICES[0]])

    @pytest.mark.parametrize("positions", [[4], [-1]])
    def test_no_such_position(self, positions: list[int]) -> None:
        with pytest.raises(PlanError, match="not among the 4 of this world"):
            World(DEVICES[:4]).at(positions)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ((), "at least one"),
            ((DEVICES[:1] * 2,), "must be different"),
            ((DEVICES, 2, 2), "process_index 2"),
            ((DEVICES, 0, 2), "need a channel"),
        ],
    )
    def test_impossible_worlds(self, fields: tuple[Any, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            World(*(fields or ((),)))

    def test_each_process_runs_an_equal_part(self) -> None:
        world = World(
            DEVICES, 0, 2, memory_channel.MemoryChannel(memory_channel.Memory(2), 0)
        )
        world.check_mesh(DEVICES)
        world.check_mesh((*DEVICES[2:4], *DEVICES[6:8]))
        for uneven in (DEVICES[:4], DEVICES[:6], DEVICES[3:]):
            with pytest.raises(PlanError, match="unevenly on the 2 processes"):
                world.check_mesh(uneven)

    def test_one_process_runs_no_other_devices(self) -> None:
        World(DEVICES).check_mesh(DEVICES[:4])
        with pytest.raises(PlanError, match="process 0: 4, process 1: 4"):
            World(DEVICES).check_mesh(DEVICES)


def call(args: tuple[Any, ...]) -> StepCall:
    return open_arguments(small_step.step, args)


class TestBatches:
    """Of a batch each process holds its rows, of the rest everything."""

    def test_global_shapes(self) -> None:
        def run(world: World) -> list[tuple[int, ...]]:
            found = arguments.BatchArguments(small_step.step, 4, {})
            args = (small_step.state(), small_step.batch(12))
            return [x.shape for x in found.structs(call(args), world).arrays]

        assert everywhere(run) == [[(16, 16), (24, 16)]] * 2

    def test_the_dim_is_that_in_which_the_stated_shape_differs(self) -> None:
        """By a struct; a call of other shapes has its rows in the same dim."""

        def step(w: Any, x: Any) -> Any:
            return w - (x**2).sum() * w

        def run(world: World) -> list[tuple[int, ...]]:
            found = arguments.BatchArguments(step, 4, {})

            def shape(x: Any) -> tuple[int, ...]:
                made = found.structs(open_arguments(step, (np.ones(3), x)), world)
                return made.arrays[1].shape

            return [
                shape(x)
                for x in (
                    np.ones((6, 8, 2), np.float32),
                    jax.ShapeDtypeStruct((6, 16, 2), np.float32),
                    np.ones((6, 8, 2), np.float32),
                    np.ones((5, 7, 2), np.float32),
                )
            ]

        assert everywhere(run) == [[(12, 8, 2), (6, 16, 2), (6, 16, 2), (5, 14, 2)]] * 2

    def test_rows_of_a_process_beside_arrays_that_are_whole(self) -> None:
        """The rows fit if the global shapes are stated, also of a smaller batch."""

        def step(w: Any, x: Any, y: Any) -> Any:
            return w - ((x - y) ** 2).sum() * w

        def run(world: World) -> Any:
            found = arguments.BatchArguments(step, 4, {})

            def shapes(*rest: Any) -> list[tuple[int, ...]]:
                roles = NamedRoles.of(whole="x")
                made = open_arguments(step, (np.ones(3), *rest), roles=roles)
                return [x.shape for x in found.structs(made, world).arrays[1:]]

            x, y = np.ones((8, 2), np.float32), np.ones((4, 2), np.float32)
            with pytest.raises(autopar.TraceError, match="whole_argnames='x'"):
                shapes(x, y)
            shapes(*[jax.ShapeDtypeStruct((8, 2), np.float32)] * 2)
            return shapes(x, y), shapes(x[:6], y[:3])

        assert everywhere(run) == [([(8, 2)] * 2, [(6, 2)] * 2)] * 2

    def test_unequal_rows(self) -> None:
        def run(world: World) -> Any:
            found = arguments.BatchArguments(small_step.step, 4, {})
            args = (small_step.state(), small_step.batch(12 - world.process_index))
            return found.structs(call(args), world)

        for error in everywhere(run):
            assert isinstance(error, PlanError)
            assert "'batch' is [12, 16] on process 0, [11, 16] on process 1" in str(
                error
            )
            assert "each process passes as many rows" in str(error)


def test_messages_of_any_length_pass_through_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a coordination service: a gather takes rows of one length."""
    messages = b"", b"a", b"the longest"
    passed: list[bytes] = []

    def gather(_: JaxChannel, row: bytes) -> list[bytes]:
        passed.append(row)
        if len(passed) % 2:
            return [len(message).to_bytes(8, "little") for message in messages]
        return [message.ljust(len(row), b"\0") for message in messages]

    monkeypatch.setattr(JaxChannel, "gather", gather)
    monkeypatch.setattr(jax_compat, "coordination", lambda: None)
    for message in messages:
        found = JaxChannel().exchange(message, "a test")
        assert found == dict(enumerate(messages))

    assert {len(row) for row in passed[1::2]} == {len(b"the longest")}


def test_two_worlds_in_one_process() -> None:
    """Two steps train side by side, each on devices of its own."""
    devices = jax.devices()
    halves = [World(tuple(devices[:4])), World(tuple(devices[4:]))]
    steps = [
        autopar.parallelize(small_step.step, cluster="4:cpu", world=half)
        for half in halves
    ]
    states: list[Any] = [
        s.init(small_step.state, batch=small_step.structs()[1]) for s in steps
    ]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        for k, step in enumerate(steps):
            states[k], (loss,) = small_step.trained(step, states[k], 1)
            losses[k].append(loss)

    for state, half, found in zip(states, halves, losses, strict=True):
        assert state.sharding.device_set <= set(half.devices)
        np.testing.assert_allclose(found, small_step.plain_losses(3), rtol=1e-5)
    with pytest.raises(PlanError, match="not among the devices of this world"):
        steps[1].replan("4:cpu", states[1], devices=[0, 1, 2, 3])


def test_the_default_cluster_is_the_world() -> None:
    world = World(tuple(jax.devices()[2:5]))
    step = autopar.parallelize(small_step.step, world=world)
    assert step.cluster.num_devices == 3
    assert step.world is world


def test_nobody_else_asks_jax() -> None:
    """Processes and devices are read in one module of the runtime."""
    folder = pathlib.Path(agreement.__file__).parent
    asks = re.compile(
        r"jax\.(process_count|process_index|devices|local_devices|device_count)\("
        r"|multihost_utils"
    )
    found = {p.name for p in folder.rglob("*.py") if asks.search(p.read_text())}
    assert found == {"world.py"}
