"""Tests that a script trains on in jobs of a real Slurm, with the right losses."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import elastic_runs
import jax
import numpy as np
import pytest
import step_forms as forms
from checkout import ROOT
from processes import FLAGS
from slurm_cluster import SlurmCluster, wait_for

import autopar
from autopar.launching.slurm import SlurmJob, job_script

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 150


class Job:
    """A job that trains a small step."""

    def __init__(self, cluster: SlurmCluster, place: pathlib.Path) -> None:
        self.cluster, self.place = cluster, place
        script = str(ROOT / "tests" / "support" / "elastic_script.py")
        job = SlurmJob(
            script=(script, str(place / "losses"), str(STEPS), "1", "0.05", "saves"),
            nodes=(2, 3),
            place=place,
            sbatch=(f"--output={place / 'output'}",),
            look_s=1,
        )
        places = (ROOT, ROOT / "solver", ROOT / "passes", ROOT / "tests" / "support")
        self.number = cluster.submit(
            job_script(job),
            PYTHONPATH=os.pathsep.join(map(str, places)),
            XLA_FLAGS=FLAGS,
            JAX_PLATFORMS="cpu",
            NPROC="4",
        )

    def log(self) -> list[dict[str, Any]]:
        """The logs of all supervisors, one after the other."""
        paths = [*self.place.glob("autopar-run/**/log.jsonl")]
        lines = [x for path in paths for x in path.read_text().splitlines()]
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return sorted(read, key=lambda line: line["time_s"])

    def worlds(self) -> list[int]:
        """The number of processes of each world that has formed."""
        return [len(x["workers"]) for x in self.log() if x["event"] == "formed"]

    def losses(self) -> list[tuple[int, float]]:
        """Every step and loss that a process has written."""
        lines = [
            line
            for path in self.place.glob("losses.*")
            if path.suffix[1:].isdigit()
            for line in path.read_text().splitlines()
        ]
        return [(int(k), float(loss)) for k, loss in map(json.loads, lines)]

    def wait_for_worlds(self, *sizes: int) -> None:
        """Waits until these worlds have formed, and the last one trains."""
        before = len(self.losses())

        def trains() -> bool:
            return self.worlds() == list(sizes) and len(self.losses()) > before + 5

        try:
            wait_for(trains, "", 120.0)
        except AssertionError:
            texts = [x.read_text() for x in self.place.glob("**/output*")]
            pytest.fail("\n".join([str(self.worlds()), *texts]))

    def go(self) -> None:
        """Lets the run end."""
        (self.place / "go").touch()

    def check(self) -> None:
        """Waits for the end of the job, and compares all losses with one process."""
        wait_for(
            lambda: self.cluster.state(self.number) in ("COMPLETED", ""),
            "no end",
            120.0,
        )
        found, want = self.losses(), losses_alone()
        assert {k for k, _ in found} == set(range(STEPS))
        np.testing.assert_allclose(
            [loss for _, loss in found], [want[k] for k, _ in found], rtol=2e-5
        )


def losses_alone() -> list[float]:
    """The losses of one process without disturbance."""
    step = autopar.parallelize(forms.plain_step, cluster="1:cpu", split_batch=False)
    alone = autopar.elastic(
        step,
        forms.create_plain,
        elastic_runs.source,
        batch=forms.BATCH,
        steps=STEPS,
        args=(jax.random.key(0),),
        ahead=False,
    )
    return elastic_runs.losses(alone)


def test_a_script_trains_on_when_a_node_drains_and_the_limit_comes(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    job = Job(cluster, tmp_path)
    job.wait_for_worlds(3)
    cluster.do("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        job.wait_for_worlds(3, 2)
    finally:
        cluster.do("scontrol", "update", "nodename=n3", "state=resume")
    job.wait_for_worlds(3, 2, 3)
    cluster.do("scancel", "--batch", "--signal=USR1", str(job.number))
    cluster.start_at_once(job.number)
    job.wait_for_worlds(3, 2, 3, 3)
    job.go()
    job.check()


def test_a_script_trains_on_when_the_first_node_dies(
    cluster: SlurmCluster, tmp_path: pathlib.Path
) -> None:
    """The others have copies of its state; no step runs twice."""
    job = Job(cluster, tmp_path)
    job.wait_for_worlds(3)
    try:
        cluster.kill("n1")
        job.wait_for_worlds(3, 2)
    finally:
        cluster.start("n1")
    assert "take over" in [line["event"] for line in job.log()]
    assert "begin anew" not in [line["event"] for line in job.log()]
    job.go()
    cluster.start_at_once(job.number)
    job.check()
