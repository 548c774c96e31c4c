"""Tests one process of a run: all processes follow the decisions of the first."""

from __future__ import annotations

import threading
import types
from concurrent import futures
from typing import Any

import memory_channel
import pytest

from autopar.elastic.processes import team as teams
from autopar.elastic.processes.link import Address
from autopar.elastic.processes.training import TeamRun
from autopar.runtime.world import in_lane


class OwnLink:
    """A connection whose supervisor is not missed yet."""

    lost = False

    def __init__(self, address: Address, *_: Any, **__: Any) -> None:
        self.address = address
        self.limits: list[tuple[int, int]] = []

    def pause(self, generation: int) -> int:
        return 7 + generation

    def limit(self, generation: int, step: int) -> None:
        self.limits.append((generation, step))


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> teams.Team:
    monkeypatch.setattr(teams, "Link", OwnLink)
    monkeypatch.setattr(teams, "Offers", lambda *_: None)
    found = teams.Team(Address("127.0.0.1:1", "token", 0, 60.0), survive=0, rows=0)
    found._form = {"generation": 3, "rank": 1, "members": []}
    return found


def test_a_process_ends_where_the_first_one_missed_the_supervisor(
    team: teams.Team,
) -> None:
    """Else it would look for another world, while the others save without it."""
    assert not team.is_orphaned
    assert team._obey({"order": "pause", "generation": 3}) == 10
    assert not team.is_orphaned
    team._obey({"order": "limit", "generation": 3, "step": 12})
    assert team.is_orphaned
    assert team._link.limits == [(3, 12)]  # type: ignore[attr-defined]


def test_a_world_that_formed_since_goes_on(team: teams.Team) -> None:
    team._obey({"order": "limit", "generation": 2, "step": 12})
    assert not team.is_orphaned


def test_a_thread_beside_the_steps_needs_no_devices() -> None:
    """Steps run collectives on them at the same time."""
    store = memory_channel.Store()

    def talk(index: int) -> tuple[bytes, list[bytes]]:
        channel = teams.WorldChannel(store, index, 2, lambda: None)
        with in_lane("beside"):
            first = channel.broadcast(b"from %d" % index)
            return first, channel.gather(b"of %d" % index)

    with futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(talk, range(2)))
    assert found == [(b"from 0", [b"of 0", b"of 1"])] * 2
    assert all("lanes/beside" in key for key in store.counts)


def test_a_thread_beside_the_steps_need_not_wait_for_a_process_that_leaves() -> None:
    """A world can be left after a step without that any process is lost."""
    ends = threading.Event()
    channel = teams.WorldChannel(memory_channel.Store(), 0, 2, lambda: None, ends)

    def talk() -> None:
        with in_lane("beside"):
            channel.exchange(b"", "choosing")

    with futures.ThreadPoolExecutor(1) as threads:
        waits = threads.submit(talk)
        assert not futures.wait([waits], 0.2).done
        ends.set()
        with pytest.raises(teams.WorldBroken):
            waits.result(10)


@pytest.mark.parametrize("breaks", [True, False])
def test_a_last_save_that_a_broken_world_ends_waits_for_a_supervisor(
    breaks: bool,
) -> None:
    """The state is only in memory then, so the process must not end."""

    def end(*_: Any) -> None:
        raise ConnectionError("the coordination service has ended")

    run: Any = types.SimpleNamespace(
        state=None, step=7, position=0,
        _saves=types.SimpleNamespace(end=end),
        _team=types.SimpleNamespace(broken=lambda _: breaks),
    )  # fmt: skip
    if breaks:
        TeamRun._end_orphaned(run)
    else:
        with pytest.raises(ConnectionError):
            TeamRun._end_orphaned(run)
