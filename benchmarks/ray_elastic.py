"""Kills a raylet and adds another one while a script trains on a Ray cluster.

Usage: python benchmarks/ray_elastic.py [--steps 600]

The cluster has several raylets on this machine. The command prints the pauses of the
training, and the differences between its losses and those of the same script in one
process. The exit code is 1 if the run does not finish, a step is missing, or a loss
differs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
import raylets
from ray import cluster_utils
from soak_figures import longest_pause_s, losses, plain_losses, set_pace

SCRIPT = pathlib.Path(__file__).parent / "ray_script.py"
LIMIT_S = 240.0
# Seconds of each step until the last node has joined, so that the run does not end
# before.
SLOW_S = 0.25
# Losses differ by rounding, because worlds of other sizes sum in another order.
TOLERANCE = 1e-4


class RayRun:
    """A run on a Ray cluster that consists of this machine."""

    def __init__(self, folder: pathlib.Path, steps: int, nodes: int = 2) -> None:
        """Starts a head node without workers, nodes with one CPU each, and the run.

        Args:
          folder: folder for the files of the run.
          steps: number of steps of the run.
          nodes: number of nodes and of workers at the start.
        """
        self.folder = folder
        self.cluster = cluster_utils.Cluster()
        self.nodes: list[Any] = []
        self.add(num_cpus=0, include_dashboard=False)
        for _ in range(nodes):
            self.add()
        self.pace(SLOW_S)
        words = [f"--processes={nodes}", f"--max={nodes + 1}", f"--folder={folder}"]
        words += ["--backend=ray", f"--address={self.cluster.address}", "--no-ahead"]
        words += [str(SCRIPT), str(folder / "losses"), str(steps)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", *words],
            stdout=open(folder / "output", "w"),  # noqa: SIM115 (for the child)
            stderr=subprocess.STDOUT,
        )

    def pace(self, seconds: float) -> None:
        """Sets the seconds of every step."""
        set_pace(self.folder, seconds)

    def add(self, **options: Any) -> None:
        """Adds a raylet; the first raylet is the head node.

        Raises:
          Exception: Ray's error, if the raylet does not start.
        """
        self.nodes.append(raylets.added(self.cluster, **options))

    def kill(self, node: Any) -> None:
        """Kills a raylet by SIGKILL."""
        raylets.kill(node)

    def worlds(self) -> list[tuple[float, list[int]]]:
        """For each world, when it had the state, and its workers."""
        found: list[tuple[float, list[int]]] = []
        forming: list[int] = []
        for line in self.log():
            if line["event"] == "form":
                forming = line["workers"]
            elif line["event"] == "formed":
                found.append((line["time_s"], forming))
        return found

    def log(self) -> list[dict[str, Any]]:
        """The supervisor's log."""
        try:
            lines = (self.folder / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits until a function returns true.

        Raises:
          RuntimeError: the run ended, or the wait takes too long.
        """
        end = time.time() + LIMIT_S
        while not done():
            if time.time() > end or self.process.poll() is not None:
                raise RuntimeError((self.folder / "output").read_text())
            time.sleep(0.02)

    def trains(self, world: list[int]) -> bool:
        """Whether these workers train together, and have done some steps."""
        worlds = self.worlds()
        if not worlds or worlds[-1][1] != world:
            return False
        return sum(x[2] > worlds[-1][0] for x in losses(self.folder)) >= 4

    def close(self) -> None:
        """Ends the run and the cluster."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.cluster.shutdown()


def main() -> None:
    """Runs the training, and reports the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for all files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = RayRun(folder, given.steps)
        try:
            run.wait(lambda: run.trains([0, 1]))
            killed_s = time.time()
            run.kill(run.nodes[1])
            run.wait(lambda: len(run.worlds()[-1][1]) == 1)
            run.wait(lambda: run.trains(run.worlds()[-1][1]))
            run.add()
            added_s = time.time()
            run.wait(lambda: run.trains([*run.worlds()[1][1], 2]))
            run.pace(0.0)
            code = run.process.wait(LIMIT_S)
        finally:
            run.close()
        sys.exit(report(run, given.steps, code, killed_s, added_s))


def report(run: RayRun, count: int, code: int, killed_s: float, added_s: float) -> int:
    """Prints the figures; returns the exit code."""
    steps = losses(run.folder)
    plain = plain_losses(run.folder, count)
    worst = max(abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for x in steps)
    missing = len(set(range(count)) - {x[0] for x in steps})
    formed = run.worlds()[-1][0]
    gone = next(x["time_s"] for x in run.log() if x["event"] == "gone")
    joined = [x["time_s"] for x in run.log() if x["event"] == "start"][-1]
    result = {
        "ray": ray.__version__,
        "exit_code": code,
        "worlds": [x[1] for x in run.worlds()],
        "missing_steps": missing,
        "worst_relative_difference_of_losses": worst,
        "kill_to_worker_gone_s": round(gone - killed_s, 3),
        "pause_at_loss_s": longest_pause_s(steps, killed_s, added_s),
        "pause_at_join_s": longest_pause_s(steps, joined, run.worlds()[-1][0] + 5),
        "worker_started_to_world_s": round(formed - joined, 3),
    }
    print(json.dumps(result, indent=1))
    return 0 if code == 0 and not missing and worst < TOLERANCE else 1


if __name__ == "__main__":
    main()
