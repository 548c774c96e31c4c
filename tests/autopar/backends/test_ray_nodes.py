"""Tests which node the Ray launcher chooses for the next worker."""

from __future__ import annotations

from typing import Any

from autopar.backends.slots import LiveNode, Places, live_nodes


def nodes(*names: str, room: int = 1) -> list[LiveNode]:
    return [LiveNode(name=name, address="10.0.0.1", room=room) for name in names]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def names(places: Places, *workers: int) -> list[str | None]:
    found = [places.place(worker) for worker in workers]
    return [None if node is None else node.name for node in found]


def listed(
    name: str, alive: bool, address: str = "10.0.0.1", **resources: float
) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": alive,
        "NodeManagerAddress": address,
        "Resources": resources,
    }


def test_dead_nodes_and_those_without_cpus_take_none() -> None:
    found = live_nodes(
        [
            listed("head", True, memory=1e9),
            listed("dead", False, CPU=4.0),
            listed("small", True, CPU=1.5),
            listed("large", True, CPU=4.0),
            listed("far", True, "10.0.0.2", CPU=4.0),
        ],
        {"CPU": 2.0},
        address="10.0.0.1",
    )
    assert found == ([LiveNode(name="large", address="10.0.0.1", room=2)], 1)


def test_a_node_that_is_drained_takes_none() -> None:
    both = [listed("a", True, CPU=1.0), listed("b", True, CPU=1.0)]
    found = live_nodes(both, {"CPU": 1.0}, None, {"a"})
    assert found == ([LiveNode(name="b", address="10.0.0.1", room=1)], 0)


def test_workers_of_a_drained_node_leave_once() -> None:
    places = Places()
    places.update(nodes("a", "b", room=2))
    of = dict(enumerate(names(places, 0, 1, 2)))
    first = of[0]
    assert first is not None
    places.update([x for x in nodes("a", "b", room=2) if x.name != first])
    leaving = places.drain({first})
    assert [worker for worker, _ in leaving] == [w for w in of if of[w] == first]
    assert [spare for _, spare in leaving] == [True, False]
    assert places.drain({first}) == []


def test_a_node_has_room_by_its_scarcest_resource() -> None:
    listed_nodes = [listed("a", True, CPU=8.0, GPU=4.0), listed("b", True, CPU=8.0)]
    found = live_nodes(listed_nodes, {"CPU": 1.0, "GPU": 2.0}, None)
    assert found == ([LiveNode(name="a", address="10.0.0.1", room=2)], 0)


def test_workers_spread_over_nodes_until_there_is_no_room() -> None:
    places = Places()
    assert places.update(nodes("a", "b", room=2)) == 2
    assert sorted(names(places, 0, 1)) == ["a", "b"]
    assert sorted(names(places, 2, 3)) == ["a", "b"]
    assert names(places, 4) == [None]


def test_only_new_nodes_are_told() -> None:
    places = Places()
    places.update(nodes("a", "b"))
    assert places.update(nodes("a")) == 0
    assert places.update(nodes("a", "b", "c")) == 1


def test_a_node_that_lost_a_worker_is_left_alone_for_a_while() -> None:
    clock = Clock()
    places = Places(clock)
    places.update(nodes("a"))
    assert names(places, 0) == ["a"]
    assert not places.on_end(0, lost=True)
    assert names(places, 1) == [None]
    clock.now += 31
    assert names(places, 2) == ["a"]


def test_a_node_that_had_no_worker_is_a_spare_once() -> None:
    places = Places()
    places.update(nodes("a", "b"))
    assert names(places, 0) == ["a"]
    assert places.on_end(0, lost=True)
    assert names(places, 1) == ["b"]
    assert not places.on_end(1, lost=True)


def test_a_script_that_ended_needs_no_spare() -> None:
    places = Places()
    places.update(nodes("a", "b"))
    assert names(places, 0) == ["a"]
    assert not places.on_end(0, lost=False)
    assert names(places, 1) == ["a"]
