"""Tests jobs of a real Slurm: nodes drain, fail and return, and the time limit is
reached.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import elastic_runs
import jax
import numpy as np
import pytest
import step_forms as forms
from checkout import ROOT
from processes import FLAGS
from slurm_cluster import SlurmCluster, missing_programs, wait_for

import autopar
from autopar.launching.slurm import SlurmJob, job_script

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STAND_IN = ROOT / "tests" / "support" / "slurm_stand_in.py"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(daemons: SlurmCluster) -> Iterator[SlurmCluster]:
    """A Slurm cluster without jobs; jobs of the test before are ended."""
    yield daemons
    daemons.end_jobs()


def submit(cluster: SlurmCluster, job: SlurmJob, **variables: str) -> int:
    """Submits a job; returns its number."""
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=job_script(job),
        env=cluster.env | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


class Job:
    """A job whose supervisor and agents do not train."""

    def __init__(
        self,
        cluster: SlurmCluster,
        place: pathlib.Path,
        nodes: tuple[int, int],
        *,
        fail: bool = False,
    ) -> None:
        self.cluster, self.folder = cluster, place / "run"
        self.folder.mkdir(exist_ok=True)
        if fail:
            (self.folder / "fail").touch()
        self.output = place / "output"
        self.last(10**6)
        job = SlurmJob(
            script=("train.py",),
            nodes=nodes,
            place=place,
            folder=pathlib.Path("run"),
            sbatch=(f"--output={self.output}",),
            command=(sys.executable, str(STAND_IN)),
            look_s=1,
        )
        self.number = submit(cluster, job)

    def last(self, step: int) -> None:
        """Ends the run after a step."""
        new = self.folder / "most.new"
        new.write_text(str(step))
        new.rename(self.folder / "most")  # the stand-in reads it all the time

    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, *events: str) -> None:
        """Waits until these events have happened, in any order."""
        self.wait_until(lambda: set(events) <= set(self.events()))

    def wait_until(self, done: Callable[[], bool]) -> None:
        try:
            wait_for(done, "")
        except AssertionError:
            pytest.fail(f"{self.events()}\n{self.output.read_text()}")

    def joined(self) -> list[str]:
        """The nodes that have joined, in order."""
        return [x.split()[1] for x in self.events() if x.startswith("joined")]

    def supervisor(self) -> int:
        """The process of the last supervisor."""
        return [int(x.split()[1]) for x in self.events() if x.startswith("super")][-1]

    def forget(self) -> None:
        (self.folder / "events").unlink()

    def finish(self) -> None:
        """Lets the run and the job end."""
        self.last(0)
        wait_for(
            lambda: self.cluster.state(self.number) in ("COMPLETED", ""),
            self.output.read_text(),
        )


def joined(*nodes: str) -> list[str]:
    return [f"joined {node}" for node in nodes]


def test_a_node_drains_and_comes_back(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    job = Job(cluster, tmp_path, (2, 4))
    job.wait_for(*joined("n1", "n2", "n3", "n4"))
    secret = job.folder / "secret.pem"
    assert secret.stat().st_mode & 0o777 == 0o600

    cluster.do("scontrol", "update", "nodename=n4", "state=drain", "reason=State=IDLE")
    job.wait_for("left n4")  # it was not killed
    assert cluster.state(job.number) == "RUNNING"
    job.forget()
    cluster.do("scontrol", "update", "nodename=n4", "state=resume")
    job.wait_for("joined n4")
    assert job.events() == ["joined n4"]
    job.finish()


def test_a_supervisor_that_dies_is_started_again(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    job = Job(cluster, tmp_path, (2, 2))
    job.wait_for(*joined("n1", "n2"))
    before = job.supervisor()
    job.forget()
    os.kill(before, signal.SIGKILL)
    job.wait_for(*joined("n1", "n2"))
    assert job.supervisor() != before
    job.finish()


def test_a_job_saves_before_its_limit_and_goes_on(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """On those nodes that are there then."""
    job = Job(cluster, tmp_path, (2, 4))
    job.wait_for(*joined("n1", "n2", "n3", "n4"))
    # As Slurm does shortly before the limit, which is in minutes.
    cluster.do("scancel", "--batch", "--signal=USR1", str(job.number))
    wait_for(lambda: (job.folder / "saved").exists(), "not saved")
    step = int((job.folder / "saved").read_text())
    assert f"suspended at {step}" in job.events()
    job.forget()
    cluster.do("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        cluster.start_at_once(job.number)
        job.wait_for(*joined("n1", "n2", "n4"))
        started = [x for x in job.events() if x.startswith("supervisor")]
        assert [x.split()[-4:] for x in started] == [["of", "3", "from", str(step)]]
    finally:
        cluster.do("scontrol", "update", "nodename=n3", "state=resume")
    job.finish()


@pytest.mark.parametrize(
    ("nodes", "node", "left"), [((2, 2), "n2", 2), ((1, 4), "n1", 3)]
)
def test_too_few_nodes_or_another_first_one_are_waited_for(
    cluster: SlurmCluster,
    tmp_path: pathlib.Path,
    nodes: tuple[int, int],
    node: str,
    left: int,
) -> None:
    job = Job(cluster, tmp_path, nodes)
    job.wait_until(lambda: len(job.joined()) == nodes[1])
    job.forget()
    cluster.do("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        cluster.start_at_once(job.number)
        job.wait_until(lambda: len(job.joined()) == left)
        assert node not in job.joined()
    finally:
        cluster.do("scontrol", "update", f"nodename={node}", "state=resume")
    job.finish()


def test_agents_that_always_fail_end_the_job(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    job = Job(cluster, tmp_path, (2, 2), fail=True)
    wait_for(lambda: cluster.state(job.number) in ("FAILED", ""), "goes on")
    text = job.output.read_text()
    assert "the agent of n2 failed 6 times; the node is given up" in text
    assert "no agent can be started" in text


def test_the_job_that_started_last_has_the_folder(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """So a first node that was cut off ends what it goes on with."""
    first = Job(cluster, tmp_path, (1, 1))
    first.wait_until(lambda: len(first.joined()) == 1)
    first.forget()
    last = Job(cluster, tmp_path, (1, 1))
    last.wait_until(lambda: len(last.joined()) == 1)
    wait_for(lambda: cluster.state(first.number) in ("FAILED", ""), "goes on")
    assert "this one ends" in last.output.read_text()
    assert cluster.state(last.number) == "RUNNING"
    last.finish()


def test_nodes_die(cluster: SlurmCluster, tmp_path: pathlib.Path) -> None:
    """The job lives on without another node, and without its first one is requeued."""
    job = Job(cluster, tmp_path, (2, 4))
    job.wait_for(*joined("n1", "n2", "n3", "n4"))
    try:
        cluster.kill("n3")
        job.wait_for("lost n3")
        held = ("squeue", "-h", "-j", str(job.number), "-o", "%N")
        wait_for(lambda: cluster.do(*held) == "n[1-2,4]", "n3 is still of the job")
        step = len(job.events())
        time.sleep(3)
        assert job.events()[step:] == []  # nobody starts an agent there

        cluster.kill("n1")
        job.forget()
        cluster.start_at_once(job.number)
        job.wait_for(*joined("n2", "n4"))
        text = job.output.read_text()
        assert "start 0 of the job, on n[1-4]" in text
        assert "start 1 of the job, on n[2,4]" in text
        job.wait_for("asked for 2")
    finally:
        for node in ("n1", "n3"):
            cluster.start(node)
    job.finish()


def found_losses(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Every step and loss that a process has written."""
    lines = [
        line
        for path in folder.glob("losses.*")
        if path.suffix[1:].isdigit()
        for line in path.read_text().splitlines()
    ]
    return [(int(k), float(loss)) for k, loss in map(json.loads, lines)]


def losses_alone(steps: int) -> list[float]:
    """The losses of one process without disturbance."""
    step = autopar.parallelize(forms.plain_step, cluster="1:cpu", split_batch=False)
    alone = autopar.elastic(
        step,
        forms.create_plain,
        elastic_runs.source,
        batch=forms.BATCH,
        steps=steps,
        args=(jax.random.key(0),),
        ahead=False,
    )
    return elastic_runs.losses(alone)


def test_a_script_trains_on_when_a_node_drains_and_the_limit_comes(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    steps = 150
    script = str(ROOT / "tests" / "support" / "elastic_script.py")
    out = str(tmp_path / "losses")
    job = SlurmJob(
        script=(script, out, str(steps), "1", "0.05", "saves"),
        nodes=(2, 3),
        place=tmp_path,
        sbatch=(f"--output={tmp_path / 'output'}",),
        look_s=1,
    )
    places = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")
    number = submit(
        cluster,
        job,
        PYTHONPATH=os.pathsep.join(map(str, places)),
        XLA_FLAGS=FLAGS,
        JAX_PLATFORMS="cpu",
        NPROC="4",
    )

    def worlds() -> list[int]:
        """The number of processes of each world that has formed."""
        log = tmp_path / "autopar-run" / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return [len(x["workers"]) for x in read if x["event"] == "formed"]

    def wait_for_world(*sizes: int) -> None:
        def trains() -> bool:
            return worlds() == list(sizes) and len(found_losses(tmp_path)) > before + 5

        before = len(found_losses(tmp_path))
        try:
            wait_for(trains, "", 120.0)
        except AssertionError:
            pytest.fail(f"{worlds()}\n{(tmp_path / 'output').read_text()}")

    wait_for_world(3)
    cluster.do("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        wait_for_world(3, 2)
    finally:
        cluster.do("scontrol", "update", "nodename=n3", "state=resume")
    wait_for_world(3, 2, 3)
    cluster.do("scancel", "--batch", "--signal=USR1", str(number))
    cluster.start_at_once(number)
    wait_for_world(3, 2, 3, 3)
    (tmp_path / "go").touch()
    wait_for(lambda: cluster.state(number) in ("COMPLETED", ""), "no end", 120.0)

    found, want = found_losses(tmp_path), losses_alone(steps)
    assert {k for k, _ in found} == set(range(steps))
    np.testing.assert_allclose(
        [loss for _, loss in found], [want[k] for k, _ in found], rtol=2e-5
    )
