"""Tests hosts that connect to a scheduler, leave it and are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from dispatching import handed
from fake_agents import Agent

from autopar.dispatch import backend
from autopar.dispatch.backend import ClusterNode, HostCluster
from autopar.dispatch.store import JobRecord
from autopar.elastic.processes import hosts


def connect(cluster: HostCluster, name: str, **fields: Any) -> Agent:
    """Connects an agent, and returns once it has an answer."""
    agent = Agent()
    first = {"agent": f"agent of {name}", "name": name, "run": "", "slots": 2}
    first |= {"device": "h100", "versions": hosts.versions(), **fields}
    threading.Thread(target=cluster.serve, args=(first, agent), daemon=True).start()
    wait(lambda: agent.sent)
    return agent


def wait(done: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def names(cluster: HostCluster) -> list[str]:
    return [place.name for place in cluster.places()]


def test_hosts_join_leave_and_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks takes no devices from jobs at once."""
    cluster = HostCluster("10.0.0.1")
    one, two = connect(cluster, "one"), connect(cluster, "two", slots=1)
    assert cluster.places() == (
        ClusterNode("one", 2, "h100"),
        ClusterNode("two", 1, "h100"),
    )
    two.close()
    assert names(cluster) == ["one", "two"]
    monkeypatch.setattr(backend, "_AWAY_S", 0.0)
    wait(lambda: names(cluster) == ["one"])
    connect(cluster, "two", agent="the next one")
    assert names(cluster) == ["one", "two"]
    one.say("leave")
    wait(lambda: names(cluster) == ["two"])
    monkeypatch.setattr(backend, "_SILENT_S", 0.0)
    assert names(cluster) == []


def test_hosts_of_running_jobs_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first round of a new scheduler would suspend all jobs."""
    cluster = HostCluster("10.0.0.1", [ClusterNode("one", 2)])
    assert names(cluster) == ["one"]
    connect(cluster, "one")
    assert cluster.places() == (ClusterNode("one", 2, "h100"),)
    monkeypatch.setattr(backend, "_RETURN_S", 0.0)
    assert names(HostCluster("10.0.0.1", [ClusterNode("one", 2)])) == []


def test_only_the_hosts_of_a_job_get_its_secret() -> None:
    cluster = HostCluster("10.0.0.1")
    one, two = connect(cluster, "one"), connect(cluster, "two")
    job = JobRecord(name="job", handed=handed("job"), places={"one": 1, "gone": 1})
    cluster.introduce(job, "10.0.0.1:5", "secret")
    told = {"job": "job", "supervisor": "10.0.0.1:5", "secret": "secret"}
    assert one.sent[1:] == [("serve", told)]
    assert [kind for kind, _ in two.sent] == ["welcome"]
    cluster.end_agents()
    assert one.sent[-1] == two.sent[-1] == ("end", {"done": True})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent": "another"}, "another agent of one is connected"),
        ({"versions": {"autopar": "0.0.1"}}, "install the same"),
        ({"slots": 0}, "--slots"),
    ],
)
def test_an_agent_is_refused(fields: dict[str, Any], words: str) -> None:
    cluster = HostCluster("10.0.0.1")
    connect(cluster, "one")
    kind, data = connect(cluster, "one", **fields).sent[0]
    assert kind == "refused"
    assert words in data["reason"]
    assert names(cluster) == ["one"]
