"""Runs five small trainings on a cluster of four nodes, under two policies.

Usage: python benchmarks/scheduled_jobs.py [--on ray|hosts|slurm]
    [--policies goodput,fifo] [--keep FOLDER] [--out FILE]   # the clusters in FILE stay
    python benchmarks/scheduled_jobs.py --simulate 12,5,1.5 40,20,4

The nodes are raylets of a Ray cluster on this machine, hosts in network namespaces
(with an agent each), or nodes of a local Slurm (srun starts the agents). The trainings
arrive over time. One node is lost and one is added. The steps have set durations,
because all nodes share this machine's cores. The command prints the mean completion
time of each policy, and the prediction of the simulator with the same policy, curves,
arrivals and costs of moves. A separate training measures these costs before. The exit
code is 1 if a training does not finish, or if its last loss differs from that of an
undisturbed run. With --simulate it only prints the predictions of the simulator, for
given seconds of a start, of joining processes and of a change of devices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import workloads
from ray_pace import seconds_of

from autopar.dispatch.backend import HostCluster, RayCluster
from autopar.dispatch.endpoint import Endpoint
from autopar.dispatch.running import ProcessRuns
from autopar.dispatch.specs import Handed, JobSpec
from autopar.dispatch.store import JobRecord, Store
from autopar.dispatch.supervising import ending_file
from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.network import Network
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import NodeEvent, Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves
from autopar.scheduler.simulator.metrics import metrics

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE / "network"), str(HERE.parent / "tests" / "support")]
SCRIPT = HERE / "scheduled_jobs_script.py"
DATA = HERE.parent / "docs" / "data" / "scheduled_jobs.json"
NODES, BATCH, LIMIT_S = 4, 24, 1500.0
INTERVAL_S, REACT_S, KILL_S, ADD_S = 10.0, 2.0, 62.0, 122.0
# The lost node, by its number in the policies.
KILLED = 1
# Seconds for which a lost node counts as alive: in Ray (docs/elastic_ray.md), and for a
# scheduler whose connection to an agent is silent.
UNSEEN_S = 15.0
SAVE_EVERY = 10
PORT = 7400
TOLERANCE = 1e-4
# The usual seconds from step to step are the median of this many.
_USUAL = 5


@dataclasses.dataclass(frozen=True)
class Training:
    """A training: its number of steps, seconds of a step on one device, and request."""

    name: str
    at_s: float
    steps: int
    one_s: float
    asks: int


TRAININGS = (
    Training("wide", 0.0, 100, 3.0, 4),
    Training("small", 15.0, 40, 1.5, 1),
    Training("pair", 35.0, 60, 2.0, 2),
    Training("late", 65.0, 80, 2.4, 4),
    Training("short", 85.0, 24, 1.6, 2),
)


def curve_of(one_s: float) -> CurveTable:
    """The goodput curve of a training on 1 to 4 nodes."""
    points = [
        CurvePoint(
            cluster=f"{n}x1:cpu", kind="cpu", nodes=n, devices=n, batch=BATCH,
            step_s=seconds_of(one_s, n), goodput=BATCH / seconds_of(one_s, n),
        )
        for n in range(1, NODES + 1)
    ]  # fmt: skip
    return CurveTable(points=tuple(points), base_batch=BATCH)


class Bed(Protocol):
    """A cluster of nodes with one device each, to which the benchmark adds nodes."""

    options: list[str]
    """Of `autopar schedule`, for this cluster."""

    fence_s: float
    """Seconds for which a job that has lost all its processes waits for them."""

    def add(self) -> None:
        """Adds a node."""
        ...

    def kill(self, name: str) -> None:
        """Kills a node at once."""
        ...

    @contextlib.contextmanager
    def runs(self, folder: pathlib.Path) -> Generator[tuple[ProcessRuns, list[str]]]:
        """Starts jobs without a scheduler; also yields the names of the nodes."""
        ...

    def close(self) -> None:
        """Ends all."""
        ...


class Raylets:
    """A head node without workers, and raylets with one CPU each."""

    fence_s = 0.0  # Ray says that a process is dead

    def __init__(self, folder: pathlib.Path) -> None:
        """Starts them."""
        import raylets
        from ray import cluster_utils

        del folder
        self._raylets, self.cluster = raylets, cluster_utils.Cluster()
        self.nodes: list[Any] = []
        self.add(num_cpus=0, include_dashboard=False)
        self.options = ["--backend=ray", f"--address={self.cluster.address}"]
        for _ in range(NODES):
            self.add()

    def add(self, **options: Any) -> None:
        """See `Bed`; the first raylet is the head node."""
        self.nodes.append(self._raylets.added(self.cluster, **options))

    def kill(self, name: str) -> None:
        """See `Bed`."""
        (node,) = (x for x in self.nodes if x.node_id == name)
        self._raylets.kill(node)

    @contextlib.contextmanager
    def runs(self, folder: pathlib.Path) -> Generator[tuple[ProcessRuns, list[str]]]:
        """See `Bed`."""
        cluster = RayCluster(self.cluster.address)
        try:
            names = [place.name for place in cluster.places()]
        finally:
            cluster.close()
        yield ProcessRuns(folder, cluster.words), names

    def close(self) -> None:
        """See `Bed`."""
        self.cluster.shutdown()


class Hosts:
    """Agents of hosts; the hosts are network namespaces connected to this one."""

    address = "10.77.0.254"
    fence_s = 30.0  # the silence and the grace of its workers (docs/elastic_hosts.md)

    def __init__(
        self, folder: pathlib.Path, rate_mbit: float | None = None, count: int = NODES
    ) -> None:
        """Starts the hosts, and an agent on each host except the last one.

        Args:
          folder: for the files of the agents.
          rate_mbit: rate of the links in Mbit/s; None: no limit.
          count: number of hosts with an agent.
        """
        self.folder, self.secret = folder, folder / "secret"
        self.rate_mbit, self.count = rate_mbit, count
        folder.mkdir(parents=True, exist_ok=True)
        if not self.secret.exists():
            create_secret(self.secret)
        self.options = ["--backend=hosts", f"--listen={self.address}:{PORT}"]
        self.options += [f"--secret={self.secret}"]
        self.agents: list[subprocess.Popen[bytes]] = []
        self._open()
        for _ in range(count):
            self.add()

    def _open(self) -> None:
        import netns
        from bed import Bed as Namespaces

        self._command = netns.command
        self._bed = Namespaces(self.count + 1, self.rate_mbit).__enter__()
        bridge = f"{self._bed.prefix}br"
        words = ["ip", "addr", "add", f"{self.address}/24", "dev", bridge]
        netns.command(words, "give the scheduler an address")

    def _words(self, host: int) -> list[str]:
        """The words before the command of a host's agent."""
        return ["ip", "netns", "exec", self._bed.hosts[host].namespace]

    def _address(self, host: int) -> str:
        return self._bed.hosts[host].address

    def add(self) -> None:
        """See `Bed`."""
        host = len(self.agents)
        words = [*self._words(host), sys.executable, "-m", "autopar", "worker"]
        words += [f"--supervisor={self.address}:{PORT}", f"--secret={self.secret}"]
        words += [f"--folder={self.folder / f'host{host}'}", "--grace=600"]
        words += [f"--address={self._address(host)}"]
        with open(self.folder / f"agent{host}", "ab") as output:
            made = subprocess.Popen(
                words, stdout=output, stderr=output, env=self._environment()
            )
        self.agents.append(made)

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def kill(self, name: str) -> None:
        """See `Bed`; the host's connections are not closed."""
        addresses = [f"({self._address(k)})" for k in range(self.count)]
        (host,) = (k for k, x in enumerate(addresses) if name.endswith(x))
        self._kill(host)
        self.agents[host].kill()

    def _kill(self, host: int) -> None:
        words = ["ip", "-n", self._bed.hosts[host].namespace, "link", "set", "eth0"]
        self._command([*words, "down"], "take a link down")

    @contextlib.contextmanager
    def runs(self, folder: pathlib.Path) -> Generator[tuple[ProcessRuns, list[str]]]:
        """See `Bed`; the agents wait for the scheduler afterwards."""
        cluster = HostCluster(self.address)
        network = Network(self.address, self.secret.read_text())
        endpoint = Endpoint(network, PORT, lambda _: {}, cluster.serve)
        try:
            end = time.time() + LIMIT_S
            while len(cluster.places()) < self.count and time.time() < end:
                time.sleep(0.1)
            names = [place.name for place in cluster.places()]
            yield ProcessRuns(folder, cluster.words, cluster.introduce), names
        finally:
            endpoint.close()
            cluster.close()

    def close(self) -> None:
        """See `Bed`."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        self._close()

    def _close(self) -> None:
        self._bed.__exit__(None, None, None)


class SlurmNodes(Hosts):
    """Agents that srun starts on the nodes of a local Slurm."""

    address = "127.0.0.1"

    def _open(self) -> None:
        # This module belongs to the tests, which are no package of the project.
        slurm_cluster = importlib.import_module("slurm_cluster")
        place = self.folder / "slurm"
        place.mkdir()
        self._slurm = slurm_cluster.SlurmCluster(place, NODES + 1)

    def _words(self, host: int) -> list[str]:
        return ["srun", "-N1", "-n1", "-w", self._slurm.nodes[host]]

    def _address(self, host: int) -> str:
        return f"127.0.0.{host + 2}"

    def _environment(self) -> dict[str, str]:
        return self._slurm.env | {k: os.environ[k] for k in ("PYTHONPATH",)}

    def _kill(self, host: int) -> None:
        self._slurm.kill(self._slurm.nodes[host])

    def _close(self) -> None:
        self._slurm.stop()


BEDS = {"ray": Raylets, "hosts": Hosts, "slurm": SlurmNodes}


def words(folder: pathlib.Path, name: str, steps: int, one_s: float) -> list[str]:
    """Arguments of the training script."""
    return [str(folder / f"losses-{name}"), str(steps), "16", "2", str(one_s)]


def written(folder: pathlib.Path, name: str) -> list[tuple[Any, ...]]:
    """Step, loss, time and devices of every finished step, in order of time.

    A script may write more fields.
    """
    found: list[tuple[Any, ...]] = []
    for path in folder.glob(f"losses-{name}.*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(tuple(json.loads(line)))
    return sorted(found, key=lambda x: x[2])


def measured(folder: pathlib.Path, bed: Bed, spec: JobSpec, turns: int = 2) -> Moves:
    """Measures the costs of moves with a job that starts, grows and shrinks.

    Args:
      folder: where the job, whose name is "moves", writes its steps (`written`).
      bed: the cluster.
      spec: the job, which does not end by itself.
      turns: how often all is done.
    """
    with bed.runs(folder / "moves") as (runs, names):
        return _measured(folder, runs, names, spec, turns)


def _measured(
    folder: pathlib.Path,
    runs: ProcessRuns,
    names: list[str],
    spec: JobSpec,
    turns: int,
) -> Moves:
    runs_folder = folder / "moves" / "moves"
    handed = Handed(spec=spec, folder=str(HERE))
    job = JobRecord(name="moves", handed=handed, attempt=1, places={names[0]: 1})
    starts: list[float] = []
    joins: list[float] = []
    pauses: list[float] = []

    def until(done: Any) -> list[tuple[Any, ...]]:
        end = time.time() + LIMIT_S / 4
        while not done(found := written(folder, "moves")):
            if time.time() > end or ending_file(runs_folder, job.attempt).exists():
                raise RuntimeError((runs_folder / "output").read_text())
            time.sleep(0.1)
        return found

    for attempt in range(1, turns + 1):
        begun = time.time()
        job = dataclasses.replace(job, attempt=attempt, places={names[0]: 1})
        runs.start(job)
        steps = until(lambda x, t=begun: x and x[-1][2] > t)
        starts.append(next(x[2] for x in steps if x[2] > begun) - begun)
        for count in (2, 4, 1):
            time.sleep(3.0)
            asked, before = time.time(), sum(job.places.values())
            job = dataclasses.replace(job, places=dict.fromkeys(names[:count], 1))
            assert runs.move(job) == ""
            steps = until(lambda x, n=count: x[-1][3] == n)
            first = next(
                k for k, x in enumerate(steps) if x[2] > asked and x[3] == count
            )
            gaps = [b[2] - a[2] for a, b in itertools.pairwise(steps[:first])]
            usual = statistics.median(gaps[-_USUAL:])
            pauses.append(max(steps[first][2] - steps[first - 1][2] - usual, 0.0))
            if count > before:
                joins.append(max(steps[first - 1][2] - asked, 0.0))
        assert runs.suspend(job) == ""
        while runs.look(job).ending is None:
            time.sleep(0.1)
    return Moves(
        start_s=statistics.mean(starts),
        join_s=statistics.mean(joins),
        change_s=statistics.mean(pauses),
    )


def table(folder: pathlib.Path) -> pathlib.Path:
    """Writes the table of jobs and their curves."""
    lines: list[str] = []
    for t in TRAININGS:
        curve_of(t.one_s).save(folder / f"{t.name}.json")
        given = json.dumps(words(folder, t.name, t.steps, t.one_s))
        lines += [
            "[[job]]", f'name = "{t.name}"', f'script = "{SCRIPT}"',
            f"args = {given}", f"submitted_s = {t.at_s}", f"devices = {t.asks}",
            f"max = {NODES}", f'curve = "{t.name}.json"', f"save_every = {SAVE_EVERY}",
            f"steps = {t.steps}",
        ]  # fmt: skip
    path = folder / "jobs.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def scheduled(
    folder: pathlib.Path,
    bed: Bed,
    policy: str,
    moves: Moves,
    jobs: pathlib.Path,
    during: Callable[[float, pathlib.Path], None] = lambda begin_s, state: None,
) -> tuple[float, Mapping[str, JobRecord]]:
    """Runs jobs under a policy.

    Args:
      folder: for the files of the scheduler.
      bed: the cluster.
      policy: name of the policy.
      moves: measured costs of moves, for the policy.
      jobs: the table of jobs.
      during: called once the scheduler has begun, with the time and its state's file.

    Returns:
      When the scheduler began, and its records of the jobs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state"
    given = [*bed.options, f"--policy={policy}", f"--state={state}"]
    given += [f"--interval={INTERVAL_S}"]
    given += [f"--react={REACT_S}"]
    given += [f"--start-cost={moves.start_s}", f"--change-cost={moves.change_s}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autopar", "schedule", str(jobs), *given],
        stdout=open(folder / "output", "w"),  # noqa: SIM115 (for the child)
        stderr=subprocess.STDOUT,
    )
    try:
        begin_s = _begin(state / "state.sqlite", process)
        during(begin_s, state / "state.sqlite")
        process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
    return begin_s, records(folder)


def records(folder: pathlib.Path) -> Mapping[str, JobRecord]:
    """The records of the jobs of a scheduler (`scheduled`), by name."""
    store = Store(folder / "state" / "state.sqlite", reads=True)
    found = store.jobs()
    store.close()
    return found


def completed(
    folder: pathlib.Path, bed: Bed, policy: str, moves: Moves
) -> dict[str, Any]:
    """Runs the trainings while a node is lost and one joins; says when each ended."""

    def disturb(begin_s: float, state: pathlib.Path) -> None:
        time.sleep(max(begin_s + KILL_S - time.time(), 0.0))
        bed.kill(_names(state)[KILLED])
        time.sleep(max(begin_s + ADD_S - time.time(), 0.0))
        bed.add()

    folder.mkdir(parents=True, exist_ok=True)
    begin_s, jobs = scheduled(folder, bed, policy, moves, table(folder), disturb)
    spent: dict[str, Any] = {}
    for t in TRAININGS:
        last = written(folder, t.name)[-1]
        spent[t.name] = {
            "state": jobs[t.name].state,
            "moves": jobs[t.name].moves,
            "completion_s": last[2] - begin_s - t.at_s,
            "last_step": last[0] + 1,
            "last_loss": last[1],
        }
    return spent


def _names(path: pathlib.Path) -> list[str]:
    """The names of the nodes, in the order of their numbers in the policies."""
    store = Store(path, reads=True)
    found = [name for name, _, _ in store.nodes()]
    store.close()
    return found


def _begin(path: pathlib.Path, process: subprocess.Popen[bytes]) -> float:
    """When the scheduler made its first decision."""
    while process.poll() is None:
        with contextlib.suppress(Exception):
            store = Store(path, reads=True)
            begin = store.fact("begin_s")
            store.close()
            if begin is not None:
                return float(begin)
        time.sleep(0.1)
    raise RuntimeError((path.parent.parent / "output").read_text())


def predicted(policy: str, moves: Moves) -> dict[str, float]:
    """The completion time of each training in the simulator.

    The simulator makes its first decision one interval after its start, so all its
    times are later by one interval.
    """
    events = (
        NodeEvent(at_s=0.0, node=NODES, away=True),
        NodeEvent(at_s=INTERVAL_S + KILL_S, node=KILLED, away=True, noticed_s=UNSEEN_S),
        NodeEvent(at_s=INTERVAL_S + ADD_S, node=NODES, away=False),
    )
    options = Options(interval_s=INTERVAL_S, react_s=REACT_S, events=events)
    jobs = [
        CurveJob(
            Job(
                name=t.name, application=SCRIPT.name, submitted_s=INTERVAL_S + t.at_s,
                devices=t.asks, batch=BATCH, steps=t.steps,
            ),
            curve_of(t.one_s).on("cpu"),
            NODES,
            moves,
            states_steps=True,
        )
        for t in TRAININGS
    ]  # fmt: skip
    nodes = Nodes.parse(f"{NODES + 1}x1:cpu")
    history = simulate(jobs, nodes, policy_of(policy), options)
    assert not metrics(history).failed
    return {
        job.job.name: (job.completed_s or 0.0) - job.job.submitted_s
        for job in history.jobs
    }


def undisturbed(folder: pathlib.Path) -> dict[str, float]:
    """The last loss of each training if it runs alone and as fast as possible."""
    found: dict[str, float] = {}
    for t in TRAININGS:
        given = words(folder, f"plain-{t.name}", t.steps, 0.0)
        kept = written(folder, f"plain-{t.name}")
        if not kept or kept[-1][0] + 1 != t.steps:
            subprocess.run([sys.executable, str(SCRIPT), *given], check=True)
        found[t.name] = written(folder, f"plain-{t.name}")[-1][1]
    return found


def main() -> None:
    """Runs the trainings, and reports the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=BEDS, default="ray")
    parser.add_argument("--policies", default="goodput,fifo")
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for all files")
    parser.add_argument("--simulate", nargs="+", help="seconds: START,JOIN,CHANGE")
    given = parser.parse_args()
    if given.simulate:
        report_simulated(given.simulate, given.policies.split(","))
        return
    # Actors run in other folders than this process, so paths must be absolute.
    paths = [os.path.abspath(x) for x in sys.path]
    os.environ |= {"SOAK_SPLIT": "0", "JAX_PLATFORMS": "cpu"}
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or pathlib.Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        good, found = report(folder, given.on, given.policies.split(","))
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        kept[given.on] = {**found, "commit": workloads.commit()}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
        sys.exit(not good)


def report_simulated(costs: list[str], policies: list[str]) -> None:
    """Prints the average completion time of each policy in the simulator.

    Args:
      costs: seconds of a start, of joining processes and of a change, with commas.
      policies: names of policies.
    """
    for cost in costs:
        start_s, join_s, change_s = map(float, cost.split(","))
        moves = Moves(
            start_s=start_s, join_s=join_s, change_s=change_s,
            fence_s=Hosts.fence_s, save_every=SAVE_EVERY,
        )  # fmt: skip
        means = {
            policy: round(statistics.mean(predicted(policy, moves).values()), 1)
            for policy in policies
        }
        print(json.dumps({"moves": [start_s, join_s, change_s], **means}), flush=True)


def report(
    folder: pathlib.Path, on: str, policies: list[str]
) -> tuple[bool, dict[str, Any]]:
    """Prints the figures; returns whether all trainings were right, and the figures."""
    plain = undisturbed(folder)
    command = f"python benchmarks/scheduled_jobs.py --on {on}"
    result: dict[str, Any] = {"command": command}
    good = True
    for policy in policies:
        bed: Bed = BEDS[on](folder / policy)
        loads = [os.getloadavg()[0]]
        try:
            given = words(folder / policy, "moves", 100000, 1.0)
            spec = JobSpec(
                name="moves", script=str(SCRIPT), args=tuple(given), max=NODES
            )
            moves = dataclasses.replace(
                measured(folder / policy, bed, spec),
                fence_s=bed.fence_s,
                save_every=SAVE_EVERY,
            )
            found = completed(folder / policy, bed, policy, moves)
        finally:
            bed.close()
        loads.append(os.getloadavg()[0])
        expected = predicted(policy, moves)
        mean = statistics.mean(x["completion_s"] for x in found.values())
        wanted = statistics.mean(expected.values())
        for t in TRAININGS:
            mine = found[t.name]
            mine["predicted_s"] = expected[t.name]
            mine["loss_apart"] = abs(mine["last_loss"] / plain[t.name] - 1)
            done = mine["state"] == "done" and mine["last_step"] == t.steps
            good = good and done and mine["loss_apart"] < TOLERANCE
        result[policy] = {
            "moves": dataclasses.asdict(moves),
            "load_averages": loads,
            "average_completion_s": mean,
            "predicted_s": wanted,
            "error": wanted / mean - 1,
            "jobs": found,
        }
        print(json.dumps({policy: result[policy]}, indent=1), flush=True)
    if {"goodput", "fifo"} <= result.keys():
        ours, fifo = (result[p]["average_completion_s"] for p in ("goodput", "fifo"))
        result["faster_than_fifo"] = fifo / ours
    print(json.dumps({k: v for k, v in result.items() if k not in policies}))
    return good, result


if __name__ == "__main__":
    main()
