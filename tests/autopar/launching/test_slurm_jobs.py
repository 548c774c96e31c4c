"""Tests jobs of a real Slurm: nodes drain, fail and return, and the time limit is
reached.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Callable

import pytest
from checkout import ROOT
from slurm_cluster import SlurmCluster, wait_for

from autopar.launching.slurm import SlurmJob, job_script

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STAND_IN = ROOT / "tests" / "support" / "slurm_stand_in.py"


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
        self.number = cluster.submit(job_script(job))

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


def test_the_first_node_of_two_dies(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """One host could not decide that it leads, so the job is requeued."""
    job = Job(cluster, tmp_path, (1, 2))
    job.wait_for(*joined("n1", "n2"))
    try:
        cluster.kill("n1")
        assert not [x for x in job.events() if x.startswith("standby")]
        job.forget()
        cluster.start_at_once(job.number)
        job.wait_for(*joined("n2", "n3"), "asked for 2")
    finally:
        cluster.start("n1")
    job.finish()


def test_nodes_die(cluster: SlurmCluster, tmp_path: pathlib.Path) -> None:
    """The job goes on without its first nodes, one after the other."""
    job = Job(cluster, tmp_path, (2, 4))
    job.wait_for(*joined("n1", "n2", "n3", "n4"), "standby n2")
    killed: list[str] = []

    def kill(node: str, left: str) -> None:
        job.forget()
        killed.append(node)
        cluster.kill(node)
        held = ("squeue", "-h", "-j", str(job.number), "-o", "%N")
        wait_for(lambda: cluster.do(*held) == left, f"{node} is still of the job")

    drain = ("state=drain", "reason=test")
    try:
        kill("n1", "n[2-4]")
        job.wait_for(*joined("n2", "n3", "n4"), "standby n3")
        # The second node goes on with what the batch script did.
        cluster.do("scontrol", "update", "nodename=n4", *drain)
        job.wait_for("left n4")
        job.forget()
        cluster.do("scontrol", "update", "nodename=n4", "state=resume")
        job.wait_for("joined n4")
        assert job.events() == ["joined n4"]

        cluster.start(killed.pop())
        kill("n2", "n[3-4]")
        job.wait_for(*joined("n3", "n4"), "standby n4")
    finally:
        for node in killed:
            cluster.start(node)
    assert cluster.state(job.number) == "RUNNING"
    assert "Restarts=0" in cluster.do("scontrol", "show", "job", str(job.number))

    # Only the batch script can end the job with the status of the run.
    job.last(0)
    cluster.start_at_once(job.number)
    job.finish()
    assert "the run has ended with status 0" in job.output.read_text()


def test_a_standby_that_leads_saves_before_the_limit(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """Slurm's signal would reach only the batch script, which is gone."""
    job = Job(cluster, tmp_path, (2, 3))
    job.wait_for(*joined("n1", "n2", "n3"), "standby n2")
    job.forget()
    try:
        cluster.kill("n1")
        job.wait_for(*joined("n2", "n3"))
        cluster.do("scontrol", "update", f"jobid={job.number}", "timelimit=2")
        job.wait_until(lambda: (job.folder / "saved").exists())
        step = int((job.folder / "saved").read_text())
        assert f"suspended at {step}" in job.events()
        wait_for(
            lambda: (
                "Restarts=1" in cluster.do("scontrol", "show", "job", f"{job.number}")
            ),
            "it is not requeued",
        )
    finally:
        cluster.start("n1")


def test_a_standby_leads_while_the_batch_script_waits(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """The first node may be cut off without being dead."""
    job = Job(cluster, tmp_path, (3, 3))
    job.wait_for(*joined("n1", "n2", "n3"), "standby n2")
    supervisor = job.supervisor()
    stat = pathlib.Path(f"/proc/{supervisor}/stat").read_text()
    script = int(stat.rpartition(")")[2].split()[1])
    os.kill(script, signal.SIGSTOP)
    job.forget()
    os.kill(supervisor, signal.SIGKILL)
    job.wait_for(*joined("n1", "n2", "n3"), "standby n1")
    second = job.supervisor()
    os.kill(script, signal.SIGCONT)
    job.wait_until(lambda: "n2 leads the run now" in job.output.read_text())
    assert job.supervisor() == second
    job.finish()
    assert "the run has ended with status 0" in job.output.read_text()
    assert "Restarts=0" in cluster.do("scontrol", "show", "job", str(job.number))
