"""Tests standbys: the hosts agree on one supervisor at a time."""

from __future__ import annotations

import dataclasses
import math
import random
import socket
import threading
import types
from typing import Any

import pytest

from autopar.elastic.processes import runner, standby
from autopar.elastic.processes.hosts import HostLauncher
from autopar.elastic.processes.members import Connection
from autopar.elastic.processes.network import Network
from autopar.elastic.processes.runner import Runner
from autopar.elastic.processes.standby import (
    HostRecords,
    Record,
    tell_end,
    wait_for_run,
)

AGENTS = 4


@dataclasses.dataclass
class Model:
    """Agents that record states, and supervisors that each try to be the only one."""

    draw: random.Random
    kept: dict[str, Record | None] = dataclasses.field(
        default_factory=lambda: {f"agent{k}": None for k in range(AGENTS)}
    )
    calls: dict[str, Record] = dataclasses.field(default_factory=dict)
    supervisors: list[HostRecords] = dataclasses.field(
        default_factory=lambda: [HostRecords()]
    )

    def some(self) -> list[str]:
        return self.draw.sample(sorted(self.kept), self.draw.randint(1, AGENTS))

    def send(self, to: HostRecords, record: Record) -> None:
        """Sends the record to some agents; the supervisor gets answers from some of
        them.
        """
        for agent in self.some():
            if record.may_replace(self.kept[agent]):
                self.kept[agent] = record
                if self.draw.random() < 0.9:
                    to.on_recorded(agent, record.number)

    def form(self, supervisor: HostRecords) -> bool:
        """A supervisor tries to form a world of the hosts that it reaches."""
        state = {"generation": supervisor.last.agreed + self.draw.randint(0, 1)}
        same = state["generation"] == supervisor.last.agreed
        hosts = supervisor.last.voters if same else self.some()
        record = supervisor.make(state, hosts)
        self.send(supervisor, record)
        return supervisor.wait(record, limit_s=0.0) and not same

    def take_over(self) -> bool:
        """A standby takes the latest record that agents have sent it."""
        agent = self.draw.choice(sorted(self.kept))
        if (record := self.kept[agent]) is not None:
            self.calls[agent] = record
        latest = max(self.calls.values(), key=lambda r: r.order, default=None)
        if latest is None or not latest.is_agreed(self.calls, takes_over=True):
            return False
        taker = HostRecords()
        taker.take_over(latest)
        record = taker.make(latest.state, latest.hosts)
        self.send(taker, record)
        self.calls.clear()
        agreed = taker.wait(record, takes_over=True, limit_s=0.0)
        if agreed:
            self.supervisors.append(taker)
        return agreed


@pytest.mark.parametrize("seed", range(5))
def test_only_the_last_supervisor_forms_worlds(seed: int) -> None:
    """Whoever reaches whom, whichever messages are lost, and however old calls are."""
    draw = random.Random(seed)
    for _ in range(300):
        model = Model(draw)
        for _ in range(30):
            if draw.random() < 0.5:
                model.take_over()
            else:
                supervisor = draw.choice(model.supervisors)
                assert not model.form(supervisor) or supervisor is model.supervisors[-1]


def record_of(**fields: Any) -> Record:
    known = {"by": "x", "epoch": 0, "number": 2, "base": (0, 0), "agreed": 1}
    agents = {"voters": ("a", "b", "c"), "hosts": ("a", "b", "c")}
    return Record(**{**known, **agents, "state": {"generation": 1}, **fields})


def test_a_world_that_is_not_agreed_yet_does_not_vote_alone() -> None:
    """Its supervisor asked one host to record it, and was then cut off."""
    record = record_of(hosts=("a",), state={"generation": 2})
    assert not record.is_agreed(["a"], takes_over=True)
    assert record.is_agreed(["a", "b"], takes_over=True)


def test_a_standby_takes_the_latest_record_of_enough_hosts(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(standby, "_PATIENCE_S", 0.0)
    network = Network()
    calls = standby._Calls(network, 0)
    at = network.address(calls.listener.port)

    def call(agent: str, record: Record) -> None:
        connection = Connection(network.connect(at, 5.0))
        connection.send("host", agent=agent, record=record.to_data())
        answer = connection.receive()
        assert answer is not None
        assert answer["kind"] == "standby"
        connection.close()

    late = record_of(number=3)
    call("a", record_of())
    assert calls.find() is None
    call("b", late)
    assert calls.find() == (late, 2)
    calls.listener.close()


def test_a_standby_ends_with_its_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    network, found = Network(), []
    waits = threading.Thread(target=lambda: found.append(wait_for_run(network, port)))
    waits.start()
    while waits.is_alive():
        try:
            tell_end(network, network.address(port), 3)
        except OSError:
            continue
        waits.join(5.0)
    assert found == [3]


def test_a_supervisor_that_starts_anew_asks_no_lost_host() -> None:
    """A new world forms on new hosts, and old hosts that are back may join it."""
    lost = record_of(epoch=1, number=4)
    for anew in (False, True):
        records = HostRecords()
        records.restore(lost.to_data(), anew=anew)
        made = records.make({"generation": 2}, ["new"])
        records.on_recorded("new", made.number)
        assert records.wait(made, limit_s=0.0) == anew
        assert made.may_replace(lost)
    assert not made.may_replace(record_of(by="y", epoch=2, number=5))
    assert not lost.may_replace(made)


@pytest.mark.parametrize(("answers_s", "taken"), [(30.0, True), (70.0, False)])
def test_hosts_may_answer_a_standby_late(
    monkeypatch: pytest.MonkeyPatch, answers_s: float, taken: bool
) -> None:
    """Agents call the lost supervisor in between, and a busy machine is slow."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(runner, "time", clock)
    made = Runner.__new__(Runner)
    monkeypatch.setattr(made, "_job", types.SimpleNamespace(grace_s=8.0), raising=False)
    monkeypatch.setattr(made, "_write", lambda **_: now[0] > answers_s)
    assert made._take_over() == taken


@pytest.mark.parametrize(("unplaced", "gives_up"), [({3}, False), (set(), True)])
def test_only_hosts_that_do_not_answer_make_a_minority(
    monkeypatch: pytest.MonkeyPatch, unplaced: set[int], gives_up: bool
) -> None:
    """Not a worker that no host has: all hosts may have answered."""
    made, launcher = Runner.__new__(Runner), HostLauncher(["train.py"], 5.0)
    launcher.unplaced = frozenset(unplaced)
    limits = types.SimpleNamespace(fence_s=13.0)
    for name, value in {
        "_minority_s": math.inf,
        "_launcher": launcher,
        "_job": types.SimpleNamespace(limits=limits),
        "_write": lambda *_, **__: False,
        "log": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(made, name, value, raising=False)
    assert not made.record({})
    assert (made._minority_s < math.inf) == gives_up
