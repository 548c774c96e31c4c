"""Tests threads that each communicate with the same thread of other processes."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import memory_channel

from autopar.runtime.agreement import exchange_data
from autopar.runtime.world import World, current_lane, in_lane

TURNS = 12


def talk(world: World, name: str, found: list[Any]) -> None:
    """Exchanges some numbers, at times that differ between processes."""
    draw = random.Random(f"{name} {world.process_index}")
    for k in range(TURNS):
        time.sleep(draw.uniform(0, 0.01))
        said = f"{name} {k} {world.process_index}".encode()
        found.append(exchange_data(world, "talking", said))


def test_a_lane_has_an_order_of_its_own() -> None:
    def run(world: World) -> list[list[Any]]:
        found: list[list[Any]] = [[], [], []]

        def beside(name: str, mine: list[Any]) -> None:
            with in_lane(name):
                talk(world, name, mine)

        others = [
            threading.Thread(target=beside, args=(name, mine))
            for name, mine in zip(("one", "two"), found[1:], strict=True)
        ]
        for thread in others:
            thread.start()
        talk(world, "steps", found[0])
        for thread in others:
            thread.join()
        return found

    for found in memory_channel.everywhere(run, range(3), 3):
        for name, mine in zip(("steps", "one", "two"), found, strict=True):
            assert mine == [
                [f"{name} {k} {process}".encode() for process in range(3)]
                for k in range(TURNS)
            ]


def test_a_lane_ends_where_it_was_begun() -> None:
    assert current_lane() == ""
    with in_lane("a"):
        with in_lane("b"):
            assert current_lane() == "b"
        assert current_lane() == "a"
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(current_lane()))
        thread.start()
        thread.join()
        assert seen == [""]
    assert current_lane() == ""
