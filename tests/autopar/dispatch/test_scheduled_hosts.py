"""Tests a scheduler over hosts while hosts and the scheduler are killed and return.

Hosts are agents at different loopback addresses of this machine. One test starts them
with a real Slurm.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from checkout import ROOT
from process_losses import check_steps
from slurm_cluster import SlurmCluster, missing_programs

from autopar.dispatch.store import JobRecord, Store
from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.network import split_address
from autopar.elastic.processes.records import read_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SCRIPT = ROOT / "tests" / "support" / "elastic_script.py"
STEPS, PACE_S, LIMIT_S = 250, 0.05, 240.0
JOBS = """
[[job]]
name = "large"
script = "{script}"
args = ["losses-large", "{steps}", "1", "{pace_s}"]
max = 3
save_every = 20
user = "anna"
[[job]]
name = "small"
script = "{script}"
args = ["losses-small", "{steps}", "1", "{pace_s}"]
save_every = 20
max = 1
user = "ben"
"""


class Hosts:
    """A scheduler, and the agents of hosts."""

    def __init__(self, folder: pathlib.Path, *words: str) -> None:
        self.folder, self.state = folder, folder / "state"
        self.secret, self.port = folder / "secret", 0
        create_secret(self.secret)
        text = JOBS.format(script=SCRIPT, steps=STEPS, pace_s=PACE_S)
        (folder / "jobs.toml").write_text(text)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        # Further addresses at which agents look for a scheduler.
        self.homes: list[str] = []
        self.scheduler = self.start_scheduler("--quota=anna=2", *words)

    def _popen(
        self,
        *words: str,
        where: str,
        before: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        paths = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")
        with open(self.folder / where, "ab") as output:
            made = subprocess.Popen(
                [*before, sys.executable, "-m", "autopar", *words],
                cwd=self.folder,
                env={
                    **(env or os.environ),
                    "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    "JAX_PLATFORMS": "cpu",
                    "NPROC": "2",
                    "ELASTIC_LAST": str(STEPS - 10),
                },
                stdout=output,
                stderr=output,
            )
        self.processes.append(made)
        return made

    def start_scheduler(
        self, *words: str, home: str = "127.0.0.1"
    ) -> subprocess.Popen[bytes]:
        given = ["--backend=hosts", f"--listen={home}:{self.port}", "--interval=4"]
        given += [f"--secret={self.secret}", "--state=state", "--react=0.5", *words]
        made = self._popen("schedule", "jobs.toml", *given, where="scheduler")
        text = f"listens at {home}:"
        self.wait(lambda: made.poll() is not None or text in self.output("scheduler"))
        found = self.output("scheduler").rpartition(text)[2]
        self.port = int(found.partition(" ")[0])
        return made

    def start_agent(self, host: int, **options: Any) -> None:
        calls = ",".join(f"{home}:{self.port}" for home in ("127.0.0.1", *self.homes))
        given = [f"--supervisor={calls}", f"--secret={self.secret}"]
        given += [f"--address=127.0.0.{host}", f"--folder=host{host}"]
        where = f"agent{host}"
        self.agents[host] = self._popen("worker", *given, where=where, **options)

    def output(self, where: str) -> str:
        path = self.folder / where
        return path.read_text() if path.exists() else ""

    def wait(self, done: Callable[[], Any]) -> None:
        end = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < end, self._said()
            time.sleep(0.05)

    def _said(self) -> str:
        names = [p for p in self.folder.glob("*") if p.name[:5] in ("sched", "agent")]
        names += list(self.state.glob("jobs/*/output"))
        return "\n".join(f"== {p}\n{p.read_text()}" for p in sorted(names))

    def stored(self) -> Store:
        return Store(self.state / "state.sqlite", reads=True)

    def jobs(self) -> Mapping[str, JobRecord]:
        store = self.stored()
        found = store.jobs()
        store.close()
        return found

    def trains_on(self, job: str, count: int) -> Callable[[], bool]:
        """Whether a job has trained on this many hosts since the call."""
        before = len(self.losses(job))

        def trains() -> bool:
            found = self.jobs().get(job)  # the scheduler may not have stored it yet
            given = found and (found.devices, found.given_devices)
            return given == (count, count) and len(self.losses(job)) > before + 3

        return trains

    def hosts_of(self, job: str) -> list[int]:
        """The last numbers of the addresses of a job's hosts."""
        names = self.jobs()[job].places
        return sorted(int(n.rpartition(".")[2].rstrip(")")) for n in names)

    def losses(self, job: str) -> list[tuple[int, float]]:
        """Step and loss of every step of a job's processes."""
        found: list[tuple[int, float]] = []
        for path in self.folder.glob(f"losses-{job}.*"):
            if path.suffix != ".ledger":
                lines = path.read_text().splitlines()
                found += [tuple(json.loads(x)) for x in lines if x.endswith("]")]
        return found

    def homes_of_jobs(self) -> dict[str, tuple[str, int]]:
        """Address and process of the supervisor of each job."""
        found: dict[str, tuple[str, int]] = {}
        for path in self.state.glob("jobs/*/run.json"):
            state = read_state(path.parent) or {}
            found[path.parent.name] = split_address(state["address"])[0], state["pid"]
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for path in self.state.glob("jobs/*/run.json"):
            state = read_state(path.parent) or {}
            for pid in (state["pid"], (state["service"] or [0])[0]):
                if pid:
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path, *getattr(request, "param", ()))
    yield made
    made.close()


def test_jobs_share_hosts_that_come_and_go(hosts: Hosts) -> None:
    for host in (2, 3, 4):
        hosts.start_agent(host)
    hosts.wait(hosts.trains_on("large", 2))  # anna's quota
    hosts.wait(hosts.trains_on("small", 1))
    # Each job has a secret of its own, which only its owner can read.
    runs = [hosts.state / "jobs" / name for name in ("large", "small")]
    secrets = {(read_state(run) or {})["secret"] for run in runs}
    assert len(secrets | {hosts.secret.read_text()}) == 3
    assert {stat.S_IMODE((run / "run.json").stat().st_mode) for run in runs} == {0o600}
    # A host is lost while no scheduler runs: its job shrinks, and all train on.
    hosts.scheduler.kill()
    hosts.scheduler.wait()
    lost, attempts = hosts.hosts_of("large")[0], hosts.jobs()["large"].attempt
    hosts.agents[lost].kill()
    before = {job: len(hosts.losses(job)) for job in ("large", "small")}
    for job, count in before.items():
        hosts.wait(lambda job=job, count=count: len(hosts.losses(job)) > count + 5)
    # The next scheduler finds the hosts, the jobs and the quota.
    hosts.scheduler = hosts.start_scheduler()
    hosts.wait(hosts.trains_on("large", 1))
    hosts.start_agent(5)
    hosts.wait(hosts.trains_on("large", 2))
    assert hosts.stored().users()["anna"].devices == 2
    assert hosts.jobs()["large"].attempt == attempts
    # A host is asked to leave: its job moves to another one.
    (leaves,) = hosts.hosts_of("small")
    hosts.start_agent(6)
    hosts.agents[leaves].terminate()
    assert hosts.agents[leaves].wait(60) == 0
    hosts.wait(hosts.trains_on("small", 1))
    assert hosts.hosts_of("small") != [leaves]
    (hosts.folder / "go").touch()
    assert hosts.scheduler.wait(LIMIT_S) == 0, hosts.output("scheduler")
    assert {h: a.wait(20) for h, a in hosts.agents.items() if h != lost} == {
        h: 0 for h in hosts.agents if h != lost
    }
    for job in ("large", "small"):
        check_steps(hosts.losses(job), STEPS)


@pytest.mark.parametrize("hosts", [["--grace=90"]], indirect=True)
def test_the_scheduler_is_started_again_on_another_host(hosts: Hosts) -> None:
    """First its old host still has the supervisors of its jobs; then it is lost."""
    hosts.homes = ["127.0.0.9"]
    for host in (2, 3, 4):
        hosts.start_agent(host)
    hosts.wait(hosts.trains_on("large", 2))
    hosts.wait(hosts.trains_on("small", 1))
    attempts = {name: job.attempt for name, job in hosts.jobs().items()}
    before = hosts.homes_of_jobs()
    assert [home for home, _ in before.values()] == ["127.0.0.1"] * 2

    hosts.scheduler.kill()
    hosts.scheduler.wait()
    hosts.scheduler = hosts.start_scheduler(home="127.0.0.9")
    hosts.start_agent(5)  # the scheduler finds all hosts, and has lost no job
    hosts.wait(lambda: len(hosts.stored().nodes()) == 4)
    trains = [hosts.trains_on("large", 2), hosts.trains_on("small", 1)]
    hosts.wait(lambda: all(done() for done in trains))
    assert hosts.homes_of_jobs() == before

    for _, pid in before.values():
        os.kill(pid, signal.SIGKILL)
    hosts.wait(
        lambda: [x for x, _ in hosts.homes_of_jobs().values()] == ["127.0.0.9"] * 2
    )
    trains = [hosts.trains_on("large", 2), hosts.trains_on("small", 1)]
    hosts.wait(lambda: all(done() for done in trains))
    assert {name: job.attempt for name, job in hosts.jobs().items()} == attempts
    (hosts.folder / "go").touch()
    assert hosts.scheduler.wait(LIMIT_S) == 0, hosts.output("scheduler")
    for job in ("large", "small"):
        check_steps(hosts.losses(job), STEPS)


@pytest.mark.skipif(bool(missing_programs()), reason=f"no {missing_programs()}")
def test_srun_starts_the_hosts_of_jobs(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A node of Slurm is lost, and the jobs go on with the others."""
    slurm = SlurmCluster(tmp_path_factory.mktemp("slurm"), 3)
    try:
        for host, node in enumerate(slurm.nodes, 2):
            before = ("srun", "-N1", "-n1", "-w", node)
            hosts.start_agent(host, before=before, env=slurm.env)
        hosts.wait(hosts.trains_on("large", 2))
        hosts.wait(hosts.trains_on("small", 1))
        slurm.kill(slurm.nodes[hosts.hosts_of("large")[1] - 2])
        hosts.wait(hosts.trains_on("large", 1))
        (hosts.folder / "go").touch()
        assert hosts.scheduler.wait(LIMIT_S) == 0, hosts.output("scheduler")
    finally:
        slurm.stop()
    for job in ("large", "small"):
        check_steps(hosts.losses(job), STEPS)
