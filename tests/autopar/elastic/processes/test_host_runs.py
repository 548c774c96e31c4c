"""Tests runs over several hosts that join, leave and are lost; checks the losses."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from host_runs import Bed, HostRun, why_not
from process_losses import check_losses

REASON = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]

Start = Callable[..., HostRun]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Bed]:
    """Three hosts, and a host for the supervisor."""
    with Bed(4) as made:
        yield made


@pytest.fixture
def start(hosts: Bed, tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts a run, and the agents of its hosts."""
    runs: list[HostRun] = []

    def started(*words: Any, agents: int = 3, **options: Any) -> HostRun:
        folder = tmp_path / "run"
        run = HostRun(hosts, folder, folder / "losses", *words, **options)
        runs.append(run)
        for host in range(agents):
            run.start_agent(host)
        return run

    yield started
    for run in runs:
        run.clean()
        for host in range(4):
            run.link(host, up=True)


def test_workers_and_agents_are_killed_and_hosts_join(start: Start) -> None:
    """State is split over hosts; what one of them had alone lies on others, too."""
    run = start(300, 1, 0.03, processes=2, agents=2)
    run.wait_for_size(2)
    run.start_agent(2)
    run.wait_for_size(3)
    run.kill(run.world()[0])
    run.wait_for_size(2)
    host = run.host_of(run.world()[1])
    run.agents[host].kill()  # its workers die with it
    run.wait_for_size(1)
    run.start_agent(host)
    run.wait_for_size(2)
    assert run.wait() == 0, run.output()
    assert all(agent.wait(20) == 0 for h, agent in run.agents.items() if h != host)
    check_losses(run, 300)


def test_a_host_is_lost_and_comes_back(start: Start) -> None:
    """Nothing ends its connections; its workers are led out when it is back."""
    run = start(400, 1, 0.03, processes=3, silence=5)
    run.wait_for_size(3)
    host = run.host_of(run.world()[1])
    run.link(host, up=False)
    run.wait_for_size(2)
    run.link(host, up=True)
    run.wait_for_size(3)
    assert run.wait() == 0, run.output()
    check_losses(run, 400)


def test_a_host_that_is_asked_to_go(start: Start) -> None:
    run = start(300, 0, 0.03, processes=3)
    run.wait_for_size(3)
    host = run.host_of(run.world()[0])
    run.agents[host].send_signal(signal.SIGTERM)
    run.wait_for_size(2)
    assert run.agents[host].wait(60) == 0
    assert run.wait() == 0, run.output()
    check_losses(run, 300)
    # What one host has compiled, the others have got: who compiles keeps its own alone.
    kept = run.programs()
    assert kept[host] <= kept[(host + 1) % 3] == kept[(host + 2) % 3] != set()


def test_the_only_host_is_asked_to_go(start: Start) -> None:
    """Another one has room, so the state goes there."""
    run = start(300, 0, 0.03, processes=1, max=1, agents=1)
    run.wait_for_size(1)
    run.start_agent(1)
    run.wait_for(lambda: run.output().count("joined, with room") == 2)
    run.agents[0].send_signal(signal.SIGTERM)
    assert run.agents[0].wait(60) == 0
    run.wait_for_worlds(2)
    assert run.wait() == 0, run.output()
    check_losses(run, 300)


def test_processes_start_again_on_their_hosts(start: Start) -> None:
    """Where their state is; a host that is asked to go hands its state out first."""
    run = start(200, 1, 0.03, processes=3, recovery="respawn")
    run.wait_for_size(3)
    first = {w: (run.host_of(w), run.pid(w)) for w in run.world()}
    run.kill(run.world()[1])
    run.wait_for_size(2)
    second = {w: (run.host_of(w), run.pid(w)) for w in run.world()}
    assert {w: host for w, (host, _) in second.items()}.items() <= {
        (w, host) for w, (host, _) in first.items()
    }
    assert not {pid for _, pid in second.values()} & {x for _, x in first.values()}
    name, leaves = run.state()["run"], run.world()[0]
    host = run.host_of(leaves)
    run.agents[host].send_signal(signal.SIGTERM)
    run.wait_for(lambda: leaves not in run.world())
    assert run.agents[host].wait(60) == 0
    assert run.wait() == 0, run.output()
    check_losses(run, 200)
    assert all(agent.wait(20) == 0 for agent in run.agents.values())
    assert not [x for x in os.listdir("/dev/shm") if name in x]


def test_the_supervisor_is_killed_and_started_again(start: Start) -> None:
    """Workers train on meanwhile, and agents find it again."""
    run = start(300, 1, 0.03, processes=3)
    run.wait_for_size(3)
    worlds = len(run.worlds())
    run.kill_supervisor()
    run.process = run.started()
    run.wait_for_worlds(worlds + 1)
    run.kill(run.world()[2])
    run.wait_for_size(2)
    assert run.wait() == 0, run.output()
    check_losses(run, 300)


@pytest.mark.parametrize(
    ("home", "left", "recovery"), [(-1, 3, "inplace"), (0, 2, "respawn")]
)
def test_the_supervisors_host_is_lost(
    start: Start, home: int, left: int, recovery: str
) -> None:
    """A standby goes on with all workers, or without those of the supervisor's host."""
    run = start(300, 1, 0.03, processes=3, agents=0, home=home, recovery=recovery)
    for host in range(3):
        run.start_agent(host, supervisor=f"{run.address(home)},{run.address(2)}")
    run.wait_for_size(3)
    there = [w for w in run.world() if run.host_of(w) != home]
    run.start_standby(2)
    run.link(home, up=False)
    run.wait_for_size(left)
    assert set(run.world()) == set(there)
    run.kill(run.world()[0])
    run.wait_for_size(left - 1)
    assert run.wait() == 0, run.output()
    check_losses(run, 300)


def test_two_worlds_never_train(start: Start) -> None:
    """All hosts are cut off from the supervisor, and train on as long as they may.

    Another one waits for them, and has their state when they are back.
    """
    run = start(400, 1, 0.05, "saves", processes=2, agents=2, silence=6, grace=6)
    run.wait_for_size(2)
    run.link(-1, up=False)
    run.start_agent(2)
    run.wait_for_words("may train on")
    run.link(-1, up=True)
    run.wait_for_words("another")
    run.wait_for_worlds(2)
    assert run.wait() == 0, run.output()
    check_losses(run, 400)


def test_stages_over_hosts(start: Start) -> None:
    """Activations pass between hosts; one is lost in the middle of a schedule."""
    run = start(120, 2, 0.03, "saves", "none", 2, processes=4, agents=0)
    for host in range(2):
        run.start_agent(host, slots=2)
    run.wait_for_size(4)
    host = run.host_of(run.world()[2])
    run.agents[host].kill()
    run.wait_for_size(2)
    run.start_agent(host, slots=2)
    run.wait_for_size(4)
    assert run.wait() == 0, run.output()
    check_losses(run, 120)
