"""Tests that a step which waits for a lost process stays behind in its thread."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from autopar.elastic.processes import link, relay
from autopar.elastic.processes import team as teams
from autopar.elastic.processes.network import Network
from autopar.elastic.processes.team import Team, WorldBroken


class Supervisor:
    """The supervisor's end of a team's connection, in this process."""

    ports: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def order(self, kind: str, **data: Any) -> None:
        """Sends the worker an order."""
        self._sent.put({"kind": kind, **data})

    def send(self, kind: str, **data: Any) -> None:
        """Ignores the worker's messages."""

    def receive(self) -> dict[str, Any]:
        """What the worker gets."""
        return self._sent.get()


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    found = Supervisor()
    monkeypatch.setattr(link, "Connection", lambda _: found)
    monkeypatch.setattr(Network, "connect", lambda *_, **__: None)
    return found


@pytest.fixture
def team(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(teams, "Offers", lambda *_: None)
    monkeypatch.setattr(Team, "_end_waits", lambda *_: None)
    found = Team(link.Address("127.0.0.1:1", "token", 0, 60.0), survive=0, rows=0)
    found._form = {"generation": 3, "rank": 0, "members": [{}, {}], "address": ""}
    supervisor.order("form", generation=3)
    assert found._link.order()["kind"] == "form"
    yield found
    found._link.leave()


def test_what_a_step_returns_and_raises(team: Team) -> None:
    with jax.debug_nans(True):
        assert team.run(lambda: jax.config.jax_debug_nans) is True
    with pytest.raises(ValueError, match="own"):
        team.run(lambda: (_ for _ in ()).throw(ValueError("own")))


def test_a_step_that_ends_after_the_world_is_to_be_left(
    team: Team, supervisor: Supervisor
) -> None:
    supervisor.order("abort", generation=3)
    assert team.run(lambda: 5) == 5


def test_a_step_that_waits_on(
    team: Team, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(teams.atexit, "register", lambda *x: at_exit.append(x))
    ended = threading.Event()
    left: list[int] = []

    def step() -> None:
        supervisor.order("abort", generation=3)
        ended.wait(60)
        left.append(1)

    with pytest.raises(WorldBroken):
        team.run(step)
    assert not left
    # The next world's steps do not wait for it.
    supervisor.order("form", generation=4)
    team._link.leave()
    team._link.order()
    assert team.run(lambda: 6) == 6
    # A process that ends waits for it: its thread would end the process otherwise.
    ((wait, *arguments),) = at_exit
    ended.set()
    wait(*arguments)
    assert left == [1]


def test_alone_in_a_world(team: Team) -> None:
    team._form = {"generation": 3, "rank": 0, "members": [{}]}
    assert team.run(threading.current_thread) is threading.current_thread()


def test_a_world_is_left_once_nobody_ends_its_waits(
    team: Team, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that meets the next world's connections, which are to the same processes."""
    started, ended, left = (threading.Event() for _ in range(3))

    def end_waits(*_: Any) -> None:
        started.set()
        ended.wait(60)

    def leave() -> None:
        team.leave()
        left.set()

    monkeypatch.setattr(Team, "_end_waits", end_waits)
    monkeypatch.setattr(teams.jax_processes, "leave_world", lambda: None)
    supervisor.order("abort", generation=3)
    assert started.wait(60)
    leaving = threading.Thread(target=leave)
    leaving.start()
    assert not left.wait(0.1)
    ended.set()
    leaving.join(60)
    assert left.is_set()
    assert not team._link.must_leave


def test_a_client_is_used_once_it_is_connected(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA ends a process that writes into a store before."""
    seen: list[Any] = []

    class Client:
        def connect(self) -> None:
            seen.append(team._client)
            raise WorldBroken("a process died while the world formed")

    made = Client()
    monkeypatch.setattr(teams.jax_processes, "leave_world", lambda: None)
    monkeypatch.setattr(teams.jax_processes, "coordination_client", lambda *_: made)
    form = {"rank": 0, "members": [{}, {}], "address": "127.0.0.1:1", "generation": 4}
    with pytest.raises(WorldBroken):
        team._join(form)
    assert seen == [None]


def test_a_relay_knows_connections_of_other_processes() -> None:
    """A local user could end a world by connecting to a worker's relay."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            own, _ = server.accept()
            with own:
                assert relay._is_own(own)
        line = (
            f"import socket; socket.create_connection(('127.0.0.1', {port})); input()"
        )
        command = [sys.executable, "-c", line]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            stranger, _ = server.accept()
            with stranger:
                assert not relay._is_own(stranger)
            child.communicate(b"\n")
