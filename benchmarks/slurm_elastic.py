"""Kills the first node of a Slurm job while a script trains on four nodes.

Usage: python benchmarks/slurm_elastic.py [--steps 600]

The cluster is a real Slurm on this machine: a slurmctld, and a slurmd for each node.
The job is that of `autopar launch slurm`. The data has the longest time between two
steps when the first node dies, how many steps ran again, and the differences between
the losses and those of the same script in one process. The exit code is 1 if the job
fails, a step is missing, or a loss differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from soak_figures import (
    has_trained,
    longest_pause_s,
    losses,
    plain_losses,
    set_pace,
)

from autopar.launching.slurm import SlurmJob, job_script

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

# This module belongs to the tests, which are no package of the project.
slurm_cluster: Any = importlib.import_module("slurm_cluster")

SCRIPT = ROOT / "benchmarks" / "ray_script.py"
NODES = 4
LIMIT_S = 300.0
SLOW_S = 0.1
TOLERANCE = 1e-4


class Training:
    """A job that trains on all nodes of a cluster."""

    def __init__(self, cluster: Any, folder: pathlib.Path, steps: int) -> None:
        """Submits the job.

        Args:
          cluster: a `SlurmCluster`.
          folder: folder for the files of the job.
          steps: number of steps.
        """
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        self.pace(SLOW_S)
        job = SlurmJob(
            script=(str(SCRIPT), str(folder / "losses"), str(steps)),
            nodes=(2, NODES),
            place=folder,
            sbatch=(f"--output={folder / 'output'}",),
            run=("--no-ahead",),
            look_s=1,
        )
        self.number = cluster.submit(
            job_script(job), JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(sys.path)
        )

    def pace(self, seconds: float) -> None:
        """Sets the seconds of every step."""
        set_pace(self.folder, seconds)

    def log(self, event: str) -> list[dict[str, Any]]:
        """The events of a kind in the logs of all supervisors."""
        paths = self.folder.glob("autopar-run/**/log.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return sorted(
            (line for line in found if line["event"] == event),
            key=lambda line: line["time_s"],
        )

    def wait(self, done: Callable[[], object]) -> None:
        """Waits until a function returns true.

        Raises:
          RuntimeError: the wait takes too long.
        """
        end = time.time() + LIMIT_S
        while not done():
            if time.time() > end:
                texts = [x.read_text() for x in self.folder.glob("**/output*")]
                raise RuntimeError("\n".join(texts))
            time.sleep(0.1)

    def wait_for_world(self, count: int, processes: int) -> None:
        """Waits until so many worlds have formed, and the last one trains."""

        def trains() -> bool:
            formed = self.log("formed")
            steps = 10 * processes
            return len(formed) >= count and has_trained(
                self.folder, formed[-1], processes, steps
            )

        self.wait(trains)


def measure(steps: int, folder: pathlib.Path) -> dict[str, Any]:
    """Runs the job; returns the figures."""
    cluster = slurm_cluster.SlurmCluster(folder, NODES)
    try:
        run = Training(cluster, folder / "job", steps)
        run.wait_for_world(1, NODES)
        load = [round(os.getloadavg()[0], 1)]
        killed_s = time.time()
        cluster.kill("n1")
        run.wait_for_world(2, NODES - 1)
        trained_s = time.time()
        cluster.start("n1")
        run.pace(0.0)
        run.wait(lambda: (run.folder / "autopar-run" / "ended").exists())
        cluster.start_at_once(run.number)
        run.wait(lambda: cluster.state(run.number) in ("COMPLETED", "FAILED", ""))
        state = cluster.do("scontrol", "show", "job", str(run.number)).split()
    finally:
        cluster.stop()
    load.append(round(os.getloadavg()[0], 1))
    done, formed = losses(run.folder), run.log("formed")
    plain = plain_losses(run.folder, steps)
    before = max(x[0] for x in done if x[2] < formed[1]["time_s"])
    return {
        "nodes": NODES,
        "worlds": [x["workers"] for x in formed],
        "ended as": "COMPLETED" if "JobState=COMPLETED" in state else "FAILED",
        "steps": steps,
        "missing steps": len(set(range(steps)) - {x[0] for x in done}),
        "steps that ran again": max(0, before + 1 - formed[1]["step"]),
        "largest relative difference of losses": max(
            abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for x in done
        ),
        "seconds from the death to the takeover": round(
            run.log("take over")[0]["time_s"] - killed_s, 2
        ),
        "longest pause, s": longest_pause_s(done, killed_s - 2.0, trained_s),
        "load average": load,
    }


def main() -> None:
    """Measures, and writes the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    data = ROOT / "docs" / "data" / "slurm_elastic.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    if missing := slurm_cluster.missing_programs():
        sys.exit(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    with tempfile.TemporaryDirectory() as temporary:
        row = measure(given.steps, pathlib.Path(temporary))
    print(json.dumps(row, indent=1))
    words = ["python benchmarks/slurm_elastic.py", *sys.argv[1:]]
    text = json.dumps({"command": " ".join(words), "rows": [row]}, indent=1)
    given.out.write_text(text + "\n")
    right = not row["missing steps"] and row["ended as"] == "COMPLETED"
    right = right and row["largest relative difference of losses"] < TOLERANCE
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
