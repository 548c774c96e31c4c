"""Tests one process of a run: all processes follow the decisions of the first."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.elastic.processes import team as teams
from autopar.elastic.processes.link import Address


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
