"""Worlds: which devices there are, and processes that agree over a channel."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import queue
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import small_step

import autopar
from autopar import PlanError
from autopar.runtime import agreement, arguments
from autopar.runtime.world import World
from autopar_passes.program.calls import Call
from autopar_passes.program.trace import opened

PROCESSES, LOCAL = 2, 4


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


class Memory:
    """What the channels of the processes of one world share."""

    def __init__(self, count: int) -> None:
        self.sent: list[bytes] = [b""] * count
        self.barrier = threading.Barrier(count, timeout=10)

    def exchange(self, process: int, data: bytes) -> list[bytes]:
        self.sent[process] = data
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found


@dataclasses.dataclass(frozen=True)
class MemoryChannel:
    """Threads of one process as the processes of a world."""

    memory: Memory
    process: int

    def broadcast(self, data: bytes) -> bytes:
        return self.memory.exchange(self.process, data)[0]

    def gather(self, data: bytes) -> list[bytes]:
        return self.memory.exchange(self.process, data)


DEVICES = tuple(FakeDevice(10 + k, k // LOCAL) for k in range(PROCESSES * LOCAL))


def everywhere(run: Callable[[World], Any]) -> list[Any]:
    """What each of two processes returns or raises."""
    memory = Memory(PROCESSES)

    def one(process: int) -> Any:
        channel = MemoryChannel(memory, process)
        try:
            return run(World(DEVICES, process, PROCESSES, channel))
        except PlanError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(one, range(PROCESSES)))


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
        world = World(DEVICES, 0, 2, MemoryChannel(Memory(2), 0))
        world.check_mesh(DEVICES)
        world.check_mesh((*DEVICES[2:4], *DEVICES[6:8]))
        for uneven in (DEVICES[:4], DEVICES[:6], DEVICES[3:]):
            with pytest.raises(PlanError, match="unevenly on the 2 processes"):
                world.check_mesh(uneven)

    def test_one_process_runs_no_other_devices(self) -> None:
        World(DEVICES).check_mesh(DEVICES[:4])
        with pytest.raises(PlanError, match="process 0: 4, process 1: 4"):
            World(DEVICES).check_mesh(DEVICES)


class TestAgreement:
    def test_the_first_process_plans(self) -> None:
        plan, asked = small_step.plan("4:cpu"), queue.Queue[int]()

        def run(world: World) -> autopar.Plan:
            def make() -> autopar.Plan:
                asked.put(world.process_index)
                return plan

            return agreement.agree(world, make)

        assert everywhere(run) == [plan, plan]
        assert list(asked.queue) == [0]

    def test_what_the_first_process_raises(self) -> None:
        def run(world: World) -> autopar.Plan:
            def make() -> autopar.Plan:
                raise PlanError("no plan fits")

            return agreement.agree(world, make)

        first, second = everywhere(run)
        assert str(first) == "no plan fits"
        assert str(second) == "process 0: no plan fits"

    def test_the_same_plan_but_for_its_times(self) -> None:
        plan = small_step.plan("4:cpu")
        other = slower(plan, seconds=9.0)

        def run(world: World) -> None:
            mine = (plan, other)[world.process_index]
            agreement.check_same(world, mine, "abc")

        assert everywhere(run) == [None, None]
        assert agreement.content_digest(plan) == agreement.content_digest(other)

    @pytest.mark.parametrize("differ", ["plan", "step"])
    def test_different_plans_or_steps(self, differ: str) -> None:
        plans = small_step.plan("4:cpu"), small_step.plan("8:cpu")

        def run(world: World) -> None:
            k = world.process_index
            plan = plans[k if differ == "plan" else 0]
            agreement.check_same(world, plan, f"step {k if differ == 'step' else 0}")

        for error in everywhere(run):
            assert isinstance(error, PlanError)
            assert "different plans or trace different steps" in str(error)

    def test_numbers_of_the_first_process(self) -> None:
        given = np.array([[1 / 3, 2.0], [3.0, np.inf]])

        def run(world: World) -> Any:
            k = world.process_index
            array = agreement.shared_array(world, given + k)
            return array, agreement.shared_number(world, 0.1 + k)

        for array, number in everywhere(run):
            np.testing.assert_array_equal(array, given)
            assert number == 0.1

    def test_values_that_must_be_equal(self) -> None:
        def run(differ: bool) -> Callable[[World], None]:
            def check(world: World) -> None:
                key = jax.random.key(world.process_index if differ else 0)
                agreement.check_equal(world, [np.float32(0.5), key, [1.0, 2.0][0]])

            return check

        assert everywhere(run(differ=False)) == [None, None]
        for error in everywhere(run(differ=True)):
            assert "different values on the processes" in str(error)

    def test_alone_nothing_is_sent(self) -> None:
        world = World(DEVICES[:1])
        agreement.check_rows(world, [(3,)])
        agreement.check_equal(world, [object()])
        agreement.check_same(world, small_step.plan("4:cpu"), "abc")


def call(args: tuple[Any, ...]) -> Call:
    return opened(small_step.step, args)


class TestBatches:
    """Of a batch each process holds its rows, of the rest everything."""

    def test_global_shapes(self) -> None:
        def run(world: World) -> list[tuple[int, ...]]:
            found = arguments.BatchArguments(small_step.step, 4)
            args = (small_step.state(), small_step.batch(12))
            return [x.shape for x in found.structs(call(args), world).arrays]

        assert everywhere(run) == [[(16, 16), (24, 16)]] * 2

    def test_unequal_rows(self) -> None:
        def run(world: World) -> Any:
            found = arguments.BatchArguments(small_step.step, 4)
            args = (small_step.state(), small_step.batch(12 - world.process_index))
            return found.structs(call(args), world)

        for error in everywhere(run):
            assert isinstance(error, PlanError)
            assert "each process passes as many rows" in str(error)


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


def slower(plan: autopar.Plan, *, seconds: float) -> autopar.Plan:
    """The plan, had it taken longer to find."""
    solver = msgspec.structs.replace(plan.solver, seconds=seconds)
    return msgspec.structs.replace(plan, solver=solver)
