"""Tests workers at the places of a scheduler: which workers leave, and who replaces
them.
"""

from __future__ import annotations

import pathlib
from typing import Any

from autopar.backends.slots import PlacedLauncher, Slots
from autopar.elastic.processes.launching import Placing, Reports


def places_of(slots: Slots, workers: int) -> list[str | None]:
    found = [slots.place(worker) for worker in range(workers)]
    return [None if node is None else node.name for node in found]


def test_each_place_has_as_many_as_it_should() -> None:
    slots = Slots({"a": 1, "b": 2}, None)
    assert places_of(slots, 4) == ["a", "b", "b", None]
    assert slots.place(0) == slots.place(0)
    slots.on_end(1)
    assert places_of(slots, 5) == ["a", "b", "b", None, None]


def test_who_has_no_place_any_more_leaves_and_another_may_come() -> None:
    slots = Slots({"a": 2, "b": 1}, None)
    places_of(slots, 3)
    assert slots.move({"a": 1, "c": 1}) == [1, 2]
    found = slots.place(3)
    assert found is not None
    assert found.name == "c"
    assert slots.place(4) is None
    slots.on_end(1)
    assert slots.place(4) is None


def test_places_outlive_the_supervisor(tmp_path: pathlib.Path) -> None:
    slots = Slots({"a": 1, "b": 1}, tmp_path / "places.json")
    places_of(slots, 2)
    again = Slots({"b": 1}, tmp_path / "places.json")
    assert again.move({"b": 1}) == [0]
    again.forget()
    assert Slots({"a": 1}, tmp_path / "places.json").place(7) is not None


class Base:
    """A launcher that starts nothing."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.reports: Reports | None = None

    def begin(self, run: str, reports: Reports) -> None:
        self.reports = reports

    def start(self, worker: int, environment: Any) -> int | None:
        self.started.append(worker)
        return 100 + worker

    def watch(self, worker: int, pid: int | None) -> bool:
        return worker == 0

    def signal(self, worker: int, number: int) -> None: ...

    def close(self) -> None: ...


class Told:
    def __init__(self) -> None:
        self.ends: list[tuple[int, int | None]] = []
        self.joins = 0
        self.leaves: list[tuple[int, bool]] = []

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        self.ends.append((worker, code))

    def on_join(self, machines: int) -> None:
        self.joins += machines

    def on_leave(self, worker: int, *, spare: bool) -> None:
        self.leaves.append((worker, spare))


def placed(places: dict[str, int]) -> tuple[PlacedLauncher, Base, Told]:
    base, told = Base(), Told()
    made = PlacedLauncher(base, Slots(places, None))
    made.begin("run", told)
    return made, base, told


def test_a_worker_without_a_place_ends_at_once() -> None:
    made, base, told = placed({"a": 1})
    assert isinstance(made, Placing)
    assert (made.start(0, {}), made.start(1, {})) == (100, None)
    assert (base.started, told.ends) == ([0], [(1, None)])
    made.on_end(0, 0)
    assert made.start(2, {}) == 102


def test_nodes_that_join_are_left_to_the_scheduler() -> None:
    made, base, told = placed({"a": 1})
    assert base.reports is not None
    base.reports.on_join(3)
    assert told.joins == 0
    assert list(made.move({"b": 1})) == []
    assert (made.watch(0, 1), made.watch(1, 2)) == (True, False)
