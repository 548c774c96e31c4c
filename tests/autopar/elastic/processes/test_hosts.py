"""Tests workers on hosts, with imitated agents."""

from __future__ import annotations

import pathlib
import signal
import threading
import time
from typing import Any

import pytest
from fake_agents import Agent

from autopar.elastic.processes import agents, hosts
from autopar.elastic.processes.hosts import HostLauncher
from autopar.elastic.processes.recovery import RESPAWNED


class Run:
    """Records the launcher's reports to the run."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.linked: set[int] = set()
        self.returning: set[int] = set()

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        self.told.append(("end", worker, code))

    def on_unreached(self, worker: int, *, spare: bool) -> None:
        self.told.append(("unreached", worker, spare))

    def on_join(self, machines: int) -> None:
        self.told.append(("join", machines))

    def on_wait(self, worker: int) -> None:
        self.told.append(("wait", worker))

    def on_start(self, worker: int) -> None:
        self.told.append(("start", worker))

    def on_leave(self, worker: int, *, spare: bool) -> None:
        self.told.append(("leave", worker, spare))

    def on_host(self, name: str, slots: int) -> None:
        self.told.append(("host", name, slots))

    def may_return(self, worker: int) -> bool:
        return worker in self.returning

    def has_link(self, worker: int) -> bool:
        return worker in self.linked

    def is_done(self) -> bool:
        return True

    def wait_for(self, *wanted: Any) -> None:
        end = time.monotonic() + 20
        while wanted not in self.told:
            assert time.monotonic() < end, self.told
            time.sleep(0.005)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[HostLauncher, Run]:
    monkeypatch.setattr(hosts, "_AWAY_S", 0.05)
    monkeypatch.setattr(hosts, "_RETRY_S", 0.01)
    launcher, run = HostLauncher(["train.py"], 5.0), Run()
    launcher.begin("run", run)
    return launcher, run


def call(launcher: HostLauncher, name: str, slots: int = 1, **more: Any) -> Agent:
    """An agent connects, and the launcher has greeted it."""
    agent = Agent()
    first = {
        "agent": name,
        "name": name,
        "slots": slots,
        "versions": hosts.versions(),
        "run": "",
        "workers": [],
        "ended": {},
        **more,
    }
    serving = threading.Thread(target=launcher.serve, args=(first, agent), daemon=True)
    serving.start()
    end = time.monotonic() + 20
    while not agent.sent and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.02)
    return agent


def test_workers_wait_for_hosts_and_fill_one_after_another(
    made: tuple[HostLauncher, Run],
) -> None:
    launcher, run = made
    for worker in range(3):
        launcher.start(worker, {})
    assert run.told == [("wait", 0), ("wait", 1), ("wait", 2)]
    one = call(launcher, "one", slots=2)
    assert one.started() == [0, 1]
    two = call(launcher, "two", slots=4)
    assert two.started() == [2]
    run.wait_for("join", 3)
    for worker in (3, 4):
        launcher.start(worker, {})
    assert two.started() == [2, 3, 4]


def test_a_worker_that_ends_leaves_room(made: tuple[HostLauncher, Run]) -> None:
    launcher, run = made
    launcher.start(0, {})
    agent = call(launcher, "one")
    launcher.start(1, {})
    assert agent.started() == [0]
    agent.say("ended", worker=0, code=3)
    run.wait_for("end", 0, 3)
    launcher.settle(0)
    assert agent.started() == [0, 1]
    assert ("forget", {"workers": [0]}) in agent.sent


def test_a_worker_that_starts_again_keeps_its_slot(
    made: tuple[HostLauncher, Run],
) -> None:
    """The memory of its host has its state, so no worker that waits gets the slot."""
    launcher, run = made
    launcher.start(5, {})
    agent = call(launcher, "one")
    launcher.start(1, {})
    agent.say("ended", worker=5, code=RESPAWNED)
    run.wait_for("end", 5, RESPAWNED)
    launcher.settle(9)  # another worker's end
    assert agent.started() == [5]
    launcher.start(5, {})
    launcher.settle(5)
    assert agent.started() == [5, 5]
    assert not any(kind == "forget" for kind, _ in agent.sent)


def test_an_old_end_of_a_worker_that_runs_elsewhere_does_not_count(
    made: tuple[HostLauncher, Run],
) -> None:
    launcher, run = made
    assert launcher.watch(0, None)
    call(launcher, "two", workers=[0])
    one = call(launcher, "one", ended={"0": RESPAWNED})
    assert ("forget", {"workers": [0]}) in one.sent
    assert not any(t[0] == "end" for t in run.told)


def test_a_worker_that_moves_is_forgotten_where_it_was(
    made: tuple[HostLauncher, Run],
) -> None:
    launcher, run = made
    launcher.start(0, {})
    one, two = call(launcher, "one"), call(launcher, "two")
    one.say("ended", worker=0, code=RESPAWNED)
    run.wait_for("end", 0, RESPAWNED)
    launcher._hosts["one"].slots = 0
    launcher.start(0, {})
    assert two.started() == [0]
    assert one.sent[-1] == ("forget", {"workers": [0]})


def test_an_agent_forgets_ends_that_were_handled(tmp_path: pathlib.Path) -> None:
    given = {"supervisor": "10.0.0.1:7000", "secret": "", "slots": 2}
    agent = agents.Agent(agents.AgentOptions(**given, folder=tmp_path))
    agent._report(3, RESPAWNED)
    agent._report(4, 0)
    agent._obey({"kind": "forget", "workers": [3]})
    assert agent._ended == {4: 0}


def test_a_worker_that_runs_on_two_hosts_ends_on_one(
    made: tuple[HostLauncher, Run],
) -> None:
    """Its end there does not count, and leaves no slot of the other host free."""
    launcher, run = made
    assert launcher.watch(0, None)
    one = call(launcher, "one", workers=[0])
    run.returning = {0}
    two = call(launcher, "two", workers=[0])
    assert ("signal", {"worker": 0, "number": signal.SIGKILL}) in two.sent
    assert not any(kind == "signal" for kind, _ in one.sent)
    two.say("ended", worker=0, code=-9)
    launcher.start(1, {})
    launcher.start(2, {})
    assert two.started() == [1]
    assert one.started() == []
    record = launcher.make_record({"generation": 3, "world": [0, 1]})
    assert record is not None
    assert record.hosts == ("one", "two")
    assert not any(t[0] == "end" for t in run.told)


def test_a_ready_worker_that_no_host_has_is_given_up(
    made: tuple[HostLauncher, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No world with it can be recorded, although all hosts answer."""
    launcher, run = made
    agent = call(launcher, "one", standbys=1, workers=[])
    record = launcher.make_record({"generation": 3, "world": [7]})
    assert record is None
    assert launcher.unplaced == {7}
    assert not launcher.record(record, waits=True, takes_over=True)
    assert not launcher.record(record, waits=True)
    assert not any(kind == "signal" for kind, _ in agent.sent)
    monkeypatch.setattr(launcher, "_silent_s", -1.0)
    assert not launcher.record(record, waits=True)
    run.wait_for("unreached", 7, True)
    assert ("signal", {"worker": 7, "number": signal.SIGKILL}) in agent.sent


def test_an_agent_that_dies_takes_its_workers_along(
    made: tuple[HostLauncher, Run],
) -> None:
    """Not those that are still connected: perhaps only the agent's line was cut."""
    launcher, run = made
    for worker in range(2):
        launcher.start(worker, {})
    agent = call(launcher, "one", slots=2)
    run.linked = {1}
    agent.close()
    run.wait_for("unreached", 0, False)
    time.sleep(0.1)
    assert ("unreached", 1, False) not in run.told
    run.linked = set()
    run.wait_for("unreached", 1, False)
    run.wait_for("host", "one", 0)


def test_an_agent_that_calls_again_has_its_workers(
    made: tuple[HostLauncher, Run],
) -> None:
    """What has ended meanwhile is told; what was given up meanwhile is killed."""
    launcher, run = made
    for worker in range(3):
        launcher.start(worker, {})
    agent = call(launcher, "one", slots=3)
    agent.close()
    run.returning = {8}
    again = call(launcher, "one", 4, workers=[0, 8, 9], ended={"1": -9, "2": 0})
    run.wait_for("end", 1, -9)
    run.wait_for("end", 2, 0)
    killed = [data["worker"] for kind, data in again.sent if kind == "signal"]
    assert killed == [9]
    assert not any(t[0] == "unreached" for t in run.told)


def test_a_worker_that_cannot_be_reached_is_given_up_and_killed_later(
    made: tuple[HostLauncher, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, run = made
    launcher.start(0, {})
    agent = call(launcher, "one")
    launcher.signal(0, signal.SIGKILL)
    assert agent.sent[-1] == ("signal", {"worker": 0, "number": signal.SIGKILL})
    monkeypatch.setattr(hosts, "_SILENT_S", -1.0)
    launcher.signal(0, signal.SIGTERM)
    assert len(agent.sent) == 3
    launcher.signal(0, signal.SIGKILL)
    run.wait_for("unreached", 0, False)
    monkeypatch.setattr(hosts, "_SILENT_S", 5.0)
    again = call(launcher, "one", workers=[0])
    assert ("signal", {"worker": 0, "number": signal.SIGKILL}) in again.sent
    run.wait_for("join", 1)


def test_workers_of_an_earlier_supervisor(made: tuple[HostLauncher, Run]) -> None:
    launcher, run = made
    for worker in (4, 5):
        assert launcher.watch(worker, None)
    agent = call(launcher, "one", slots=1, workers=[4])
    assert not any(kind == "signal" for kind, _ in agent.sent)
    assert ("join", 1) not in run.told
    launcher.signal(5, signal.SIGKILL)
    run.wait_for("unreached", 5, False)


def test_workers_of_an_earlier_supervisor_that_no_agent_has(
    made: tuple[HostLauncher, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had been waiting for a host; one that is connected has lost its agent."""
    launcher, run = made
    monkeypatch.setattr(launcher, "_silent_s", 0.05)
    run.linked = {5}
    for worker in (4, 5):
        assert launcher.watch(worker, None)
    run.wait_for("unreached", 4, False)
    time.sleep(0.1)
    assert ("unreached", 5, False) not in run.told
    agent = call(launcher, "one", workers=[5])
    assert not any(kind == "signal" for kind, _ in agent.sent)


def test_a_host_that_leaves_takes_no_more(made: tuple[HostLauncher, Run]) -> None:
    launcher, run = made
    launcher.start(0, {})
    agent = call(launcher, "one", slots=2)
    agent.say("leave")
    run.wait_for("leave", 0, False)
    launcher.start(1, {})
    assert agent.started() == [0]


def test_a_host_that_leaves_learns_of_room_that_comes(
    made: tuple[HostLauncher, Run],
) -> None:
    launcher, run = made
    for worker in range(2):
        launcher.start(worker, {})
    agent = call(launcher, "one", slots=2)
    agent.say("leave")
    run.wait_for("leave", 1, False)
    call(launcher, "two")
    agent.say("leave")
    run.wait_for("leave", 1, True)
    assert run.told.count(("leave", 0, False)) == 2


def test_a_worker_starts_elsewhere_where_its_host_has_no_script(
    made: tuple[HostLauncher, Run], capfd: pytest.CaptureFixture[str]
) -> None:
    launcher, run = made
    launcher.start(0, {})
    one = call(launcher, "one", slots=2)
    one.say("ended", worker=0, code=2, wrong="there is no script")
    time.sleep(0.1)
    assert one.started() == [0]
    assert call(launcher, "two").started() == [0]
    assert not any(t[0] == "end" for t in run.told)
    assert run.told.count(("wait", 0)) == 2
    assert "host one: there is no script" in capfd.readouterr().err


def test_a_scheduler_places_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots of hosts do not count; of those that wait, the last ones go."""
    launcher, run = HostLauncher(["train.py"], 5.0, places={"one": 1, "two": 1}), Run()
    launcher.begin("run", run)
    for worker in range(3):
        launcher.start(worker, {})
    one = call(launcher, "one", slots=4)
    other = call(launcher, "three", slots=4)
    assert (one.started(), other.started()) == ([0], [])
    assert launcher.move({"one": 1, "two": 1}) == [2]
    run.wait_for("end", 2, None)
    assert launcher.move({"one": 0, "three": 2}) == [0]
    assert other.started() == [1]
    launcher.start(3, {})
    assert other.started() == [1, 3]
    assert launcher.move({"three": 1}) == [0, 3]
    assert ("join", 4) not in run.told
    other.say("ended", worker=1, code=2, wrong="there is no script")
    run.wait_for("end", 1, 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"versions": {"autopar": "0.0.1"}}, "install the same"),
        ({"versions": None}, "install the same"),
        ({"slots": 0}, "--slots"),
        ({"slots": "2"}, "--slots"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused(
    made: tuple[HostLauncher, Run], more: dict[str, Any], words: str
) -> None:
    launcher, run = made
    agent = call(launcher, "one", **more)
    kind, data = agent.sent[0]
    assert kind == "refused"
    assert words in data["reason"]
    assert not run.told


def test_the_end_of_a_run_is_told(made: tuple[HostLauncher, Run]) -> None:
    launcher, _ = made
    agent = call(launcher, "one")
    launcher.close()
    assert agent.sent[-1] == ("end", {"done": True})
    assert call(launcher, "two").sent[-1] == ("end", {"done": True})
