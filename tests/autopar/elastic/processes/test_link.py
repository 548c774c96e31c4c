"""Tests a worker's connection to supervisors that end and restart."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autopar.elastic.processes import link as links
from autopar.elastic.processes.link import Address, Link
from autopar.elastic.processes.members import Connection, Message
from autopar.elastic.processes.network import Network

# The threads of a link call supervisors until the process ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
NETWORK = Network()


class Supervisor:
    """Records who connects, and the first message."""

    def __init__(self, port: int = 0) -> None:
        self._made: list[Connection] = []
        self.calls: queue.SimpleQueue[tuple[Connection, Message]] = queue.SimpleQueue()
        self._listener = NETWORK.listen(self._receive, port)
        self.address = NETWORK.address(self._listener.port)

    def _receive(self, end: Any) -> None:
        connection = Connection(end)
        self._made.append(connection)
        first = connection.receive()
        if first is not None:
            self.calls.put((connection, first))

    def next_call(self) -> Connection:
        connection, first = self.calls.get(timeout=20)
        assert first["kind"] == "hello"
        return connection

    def close(self) -> None:
        self._listener.close()
        for connection in self._made:
            connection.close()
            connection._lines.close()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, Supervisor]]:
    monkeypatch.setattr(links, "_RETRY_S", 0.01)
    found = Supervisor(), Supervisor()
    yield found
    for supervisor in found:
        supervisor.close()


def make(*supervisors: Supervisor, moved: Callable[[], None] = lambda: None) -> Link:
    address = ",".join(x.address for x in supervisors)
    told = Address(address, "token", 0, 60.0)
    assert Address.parse(str(told)) == told
    return Link(told, NETWORK, lambda: None, lambda _: None, moved)


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_worker_may_start_before_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "_RETRY_S", 0.01)
    before = Supervisor()
    before.close()
    made: list[Link] = []
    joining = threading.Thread(target=lambda: made.append(make(before)), daemon=True)
    joining.start()
    time.sleep(0.1)
    assert joining.is_alive()
    supervisor = Supervisor(int(before.address.rsplit(":", 1)[1]))
    supervisor.next_call().send("welcome")
    joining.join(20)
    assert made[0].supervisor == before.address
    supervisor.close()


def test_a_worker_gives_up_if_no_supervisor_starts() -> None:
    gone = Supervisor()
    gone.close()
    told = Address(gone.address, "token", 0, 0.0)
    with pytest.raises(ConnectionRefusedError):
        Link(told, NETWORK, lambda: None, lambda _: None, lambda: None)


def test_a_standby_is_called_once_the_supervisor_is_gone(
    two: tuple[Supervisor, Supervisor],
) -> None:
    """One that answers nothing is not called twice: it may wait for other hosts."""
    first, standby = two
    link = make(first, standby)
    called = first.next_call()
    called.send("welcome")
    first.close()
    called.close()
    standby.next_call().close()
    standby.next_call().send("welcome", generation=1)
    wait_for(lambda: not link.gives_up())
    assert link.supervisor == standby.address


def test_a_process_that_ends_calls_no_supervisor(
    two: tuple[Supervisor, Supervisor],
) -> None:
    """The supervisor would take its end for an error of the script."""
    first, standby = two
    link = make(first, standby)
    called = first.next_call()
    called.send("welcome")
    first.close()
    called.close()
    wait_for(link.gives_up)
    with pytest.raises(queue.Empty):
        standby.calls.get(timeout=0.3)


def test_only_a_supervisor_at_another_address_is_a_move(
    two: tuple[Supervisor, Supervisor],
) -> None:
    """A restarted supervisor is on the host of the coordination service."""
    moves: list[int] = []
    first, standby = two
    link = make(first, standby, moved=lambda: moves.append(1))
    for _ in range(2):
        called = first.next_call()
        called.send("welcome")
        wait_for(lambda: not link.gives_up())
        called.close()
    first.next_call().close()  # it ends
    standby.next_call().close()  # it waits for other hosts
    assert not moves
    first.next_call().close()
    called = standby.next_call()
    called.send("welcome")
    wait_for(lambda: bool(moves))
    called.close()
    standby.next_call().send("welcome")
    wait_for(lambda: not link.gives_up())
    assert moves == [1]
