"""Drains a node of a Ray cluster of several hosts while a script trains on it.

    python benchmarks/network/ray_drain.py [--steps 600]

Each host is a network namespace with its own folder for Ray, a raylet and an address.
Three workers train on three hosts; the fourth host has Ray's head and `autopar run`.
One node is drained, as a provider of spot nodes does, and all of its processes are
killed once its worker has left. Later a raylet is started there again. The data has the
pauses of the training, and the differences between its losses and those of the same
script in one process. The exit code is 1 if the run fails, a step is missing or runs
twice, or a loss differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import bed
import netns

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from soak_figures import (
    has_trained,
    longest_pause_s,
    losses,
    plain_losses,
    set_pace,
)

from autopar.elastic.processes.certificates import create_secret

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "ray_script.py"
WORKERS = 3
LIMIT_S = 400.0
# A raylet gives up if it does not start within 15 s. On a busy machine, it must be
# started several times.
STARTS = 5
# Seconds of each step until the last node has joined.
SLOW_S = 0.25
# Losses differ by rounding, because worlds of other sizes sum in another order.
TOLERANCE = 1e-4
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# The folder for Ray's files and sockets, which each host has for itself.
OWN_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'
LIST_NODES = (
    "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); "
    "print(json.dumps({x['NodeManagerAddress']: x['NodeID'] for x in ray.nodes() "
    "if x['Alive']}))"
)


class RayHosts:
    """A Ray cluster with a raylet on each host of a bed; the first host has the
    head.
    """

    def __init__(self, hosts: bed.Bed, folder: pathlib.Path) -> None:
        """Starts all raylets.

        Args:
          hosts: the hosts.
          folder: folder for the output of Ray's processes.
        """
        self.hosts, self._folder = hosts.hosts, folder
        self.address = f"{self.hosts[0].address}:6379"
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(len(self.hosts)):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Starts the raylet of a host; tries again if it gives up.

        Raises:
          RuntimeError: it never starts.
        """
        host = self.hosts[rank]
        words = [*RAY, "start", "--block", f"--node-ip-address={host.address}"]
        words += ["--disable-usage-stats", f"--object-store-memory={80 << 20}"]
        if rank == 0:
            words += ["--head", "--port=6379", "--num-cpus=0"]
            words += ["--include-dashboard=false"]
        else:
            words += [f"--address={self.address}", "--num-cpus=1"]
        inside = ["ip", "netns", "exec", host.namespace, "sh", "-c", OWN_FOLDER, "sh"]
        path = self._folder / f"raylet{rank}"
        for _ in range(STARTS):
            before = path.stat().st_size if path.exists() else 0
            with open(path, "ab") as output:
                made = subprocess.Popen(
                    [*inside, *words], stdout=output, stderr=subprocess.STDOUT
                )
            self._raylets[rank] = made
            end = time.time() + 90.0
            while made.poll() is None and time.time() < end:
                if b"Ray runtime started" in path.read_bytes()[before:]:
                    return
                time.sleep(0.1)
            self.kill(rank)
        raise RuntimeError(path.read_text())

    def kill(self, rank: int) -> None:
        """Kills all processes of a host."""
        netns.end_processes(self.hosts[rank].namespace)
        self._raylets[rank].wait()

    def at_head(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command beside Ray's head."""
        target = str(self._raylets[0].pid)
        inside = ["nsenter", "--target", target, "--net", "--mount", "--wd=."]
        return subprocess.Popen([*inside, *words], **options)

    def drain(self, rank: int) -> None:
        """Tells Ray that the provider takes the node of a host back."""
        words = [sys.executable, "-c", LIST_NODES, self.address]
        listed, _ = self.at_head(words, stdout=subprocess.PIPE).communicate()
        node = json.loads(listed.splitlines()[-1])[self.hosts[rank].address]
        words = [*RAY, "drain-node", f"--address={self.address}", f"--node-id={node}"]
        words += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        words += ["--deadline-remaining-seconds=300"]
        if self.at_head(words).wait():
            raise RuntimeError("ray drain-node fails")


class Training:
    """A run of `autopar run --backend ray`."""

    def __init__(self, cluster: RayHosts, folder: pathlib.Path, steps: int) -> None:
        """Starts the run on all nodes."""
        self.folder = folder
        create_secret(folder / "secret")
        self.pace(SLOW_S)
        words = ["run", "--backend=ray", f"--address={cluster.address}", "--no-ahead"]
        words += [f"--listen={cluster.hosts[0].address}:7000"]
        words += [f"--secret={folder / 'secret'}", f"--folder={folder}"]
        words += [f"--processes={WORKERS}", f"--max={WORKERS}"]
        words += [str(SCRIPT), str(folder / "losses"), str(steps)]
        with open(folder / "output", "w") as output:
            self.process = cluster.at_head(
                [sys.executable, "-m", "autopar", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def pace(self, seconds: float) -> None:
        """Sets the seconds of every step."""
        set_pace(self.folder, seconds)

    def log(self, event: str) -> list[dict[str, Any]]:
        """The events of a kind in the supervisor's log."""
        try:
            lines = (self.folder / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in found if line["event"] == event]

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

    def wait_for_world(self, count: int, processes: int) -> None:
        """Waits until so many worlds have formed, and the last one trains."""

        def trains() -> bool:
            formed = self.log("formed")
            steps = 4 * processes
            return len(formed) >= count and has_trained(
                self.folder, formed[-1], processes, steps
            )

        self.wait(trains)

    def close(self) -> None:
        """Ends the run."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def steps_again(
    steps: Sequence[tuple[int, float, float]], formed: Sequence[dict[str, Any]]
) -> int:
    """How many steps ran again, because worlds began at steps that were done."""
    again = 0
    for world in formed[1:]:
        done = max(x[0] for x in steps if x[2] < world["time_s"])
        again += max(0, done + 1 - world["step"])
    return again


def measure(steps: int, folder: pathlib.Path) -> dict[str, Any]:
    """Runs the training; returns the figures."""
    with bed.Bed(WORKERS + 1) as hosts:
        cluster = RayHosts(hosts, folder)
        load = [round(os.getloadavg()[0], 1)]
        run = Training(cluster, folder, steps)
        try:
            run.wait_for_world(1, WORKERS)
            cluster.drain(WORKERS)
            drained_s = time.time()
            run.wait(lambda: bool(run.log("gone")))
            run.wait_for_world(2, WORKERS - 1)
            left_s = time.time()
            cluster.kill(WORKERS)
            time.sleep(20.0)  # Ray notices the death after some 15 s
            worlds = len(run.log("formed"))
            started_s = time.time()
            cluster.start(WORKERS)
            run.wait_for_world(worlds + 1, WORKERS)
            joined_s = time.time()
            run.pace(0.0)
            code = run.process.wait(LIMIT_S)
        except BaseException:
            print((folder / "output").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            run.close()
    load.append(round(os.getloadavg()[0], 1))
    done, formed = losses(folder), run.log("formed")
    plain = plain_losses(folder, steps)
    starts = [x["time_s"] for x in run.log("start")]
    return {
        "exit code": code,
        "worlds": [x["workers"] for x in formed],
        "steps": steps,
        "missing steps": len(set(range(steps)) - {x[0] for x in done}),
        "steps that ran again": steps_again(done, formed),
        "largest relative difference of losses": max(
            abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for x in done
        ),
        "seconds from the drain to the next world": round(
            formed[1]["time_s"] - drained_s, 2
        ),
        "longest pause when the worker leaves, s": longest_pause_s(
            done, drained_s - 2.0, left_s
        ),
        "worlds that broke when the node died": worlds - 2,
        "longest pause while the node dies, s": longest_pause_s(
            done, left_s, started_s
        ),
        "seconds from the worker's start to its world": round(
            formed[-1]["time_s"] - starts[-1], 2
        ),
        "longest pause when the worker joins, s": longest_pause_s(
            done, starts[-1], joined_s
        ),
        "load average": load,
    }


def main() -> int:
    """Measures, and writes the data; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    data = ROOT / "docs" / "data" / "ray_drain.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        row = measure(given.steps, pathlib.Path(temporary))
    print(json.dumps(row, indent=1))
    words = ["python benchmarks/network/ray_drain.py", *sys.argv[1:]]
    text = json.dumps({"command": " ".join(words), "rows": [row]}, indent=1)
    given.out.write_text(text + "\n")
    right = not row["missing steps"] and not row["steps that ran again"]
    right = right and row["largest relative difference of losses"] < TOLERANCE
    return 0 if right and row["exit code"] == 0 else 1


if __name__ == "__main__":
    bed.exit_with(main)
