"""Tests which devices replicas have, and which replicas the processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import memory_channel
import pytest

from autopar.errors import PlanError
from autopar.runtime.local.devices import divide_devices, own_replicas
from autopar.runtime.world import LoneChannel, PartChannel, World


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


def devices(processes: int, each: int) -> tuple[FakeDevice, ...]:
    return tuple(FakeDevice(k, k // each) for k in range(processes * each))


@pytest.mark.parametrize(
    ("processes", "each", "replicas", "own"),
    [
        (2, 4, 2, [[0], [1]]),
        (2, 4, 4, [[0, 1], [2, 3]]),
        (4, 2, 2, [[0], [0], [1], [1]]),
        (4, 2, 1, [[0]] * 4),
        (1, 8, 4, [[0, 1, 2, 3]]),
    ],
)
def test_processes_have_replicas_or_parts_of_one(
    processes: int, each: int, replicas: int, own: list[list[int]]
) -> None:
    given = devices(processes, each)

    def run(world: World) -> list[int]:
        size = len(given) // replicas
        groups = divide_devices(world, replicas, size)
        assert [d for group in groups for d in group] == list(given)
        return own_replicas(world, groups)

    if processes == 1:
        assert [run(World(given))] == own
    else:
        assert memory_channel.everywhere(run, given, processes) == own


@pytest.mark.parametrize(("processes", "each", "replicas"), [(3, 2, 2), (2, 3, 3)])
def test_replicas_that_share_a_process_with_a_part_of_another_are_refused(
    processes: int, each: int, replicas: int
) -> None:
    given = devices(processes, each)

    def run(world: World) -> Any:
        with pytest.raises(PlanError, match="choose replicas= as a multiple or a div"):
            divide_devices(world, replicas, len(given) // replicas)

    memory_channel.everywhere(run, given, processes)


def test_too_few_devices() -> None:
    with pytest.raises(PlanError, match=r"need 8; this world has 4"):
        divide_devices(World(devices(1, 4)), 2, 4)


class TestParts:
    """A part of a world has its own numbers of processes, and the plans of all."""

    def test_of_several_processes(self) -> None:
        given = devices(4, 2)

        def run(world: World) -> World:
            half = given[:4] if world.process_index < 2 else given[4:]
            return world.part(half, "half")

        parts = memory_channel.everywhere(run, given, 4)
        assert [(p.process_index, p.process_count) for p in parts] == [
            (0, 2),
            (1, 2),
            (0, 2),
            (1, 2),
        ]
        assert [p.channel.members for p in parts] == [(0, 1)] * 2 + [(2, 3)] * 2
        assert all(isinstance(p.channel, PartChannel) for p in parts)
        assert [p.planning.process_index for p in parts] == [0, 1, 2, 3]

    def test_of_one_process(self) -> None:
        given = devices(2, 2)

        def run(world: World) -> World:
            first = 2 * world.process_index
            return world.part(given[first : first + 2], "replica")

        for number, part in enumerate(memory_channel.everywhere(run, given, 2)):
            assert isinstance(part.channel, LoneChannel)
            assert (part.process_count, part.planning.process_index) == (1, number)

    def test_in_a_world_of_one_process(self) -> None:
        part = World(devices(1, 4)).part(devices(1, 4)[:2], "replica")
        assert part.planning is part

    def test_of_other_processes(self) -> None:
        def run(world: World) -> None:
            with pytest.raises(PlanError, match="has none of its devices"):
                world.part(devices(2, 2)[2 - 2 * world.process_index :][:2], "half")

        memory_channel.everywhere(run, devices(2, 2), 2)
