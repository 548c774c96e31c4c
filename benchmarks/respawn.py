"""Processes that end with their world: seconds until they train again, and losses.

Usage: python benchmarks/respawn.py [--kills 10] [--large-width 4096] [--out FILE]

There are three rows: 1 GiB of state in each of two processes, one of which is killed;
the pauses after kills with a small model; and the losses of these runs, compared with
one process. No run has a checkpoint, so no state can be read from one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from soak_figures import SCRIPT, losses, plain_losses

from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.records import command, read_state

# Weight and momentum of 8 layers of 4096 x 4096 float32: 1.07 GB.
LAYERS = 8
LIMIT_S = 400.0
# Seconds of training between two kills.
BETWEEN_S = 2.0


class Run:
    """A run of the script in two processes; killed processes are replaced."""

    def __init__(
        self, folder: pathlib.Path, width: int, depth: int, *, split: str
    ) -> None:
        """Starts the run, and waits until it trains.

        Args:
          folder: folder of the run.
          width: width of a layer.
          depth: number of layers.
          split: ``1``: the state is split over the processes; ``whole``: each process
            has all of it.
        """
        self.folder, self.size = folder, (width, depth)
        words = ["--processes", "2", "--restarts", "1000000", "--no-ahead"]
        words += [
            "--recovery",
            "respawn",
            "--keep-every",
            "20",
            "--folder",
            str(folder),
        ]
        script = [str(SCRIPT), str(folder / "losses"), str(10**7)]
        # On a busy machine, a process that computes a large step answers late.
        words += ["--silence", "60", "--collective-timeout", "60"]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "autopar",
                "run",
                *words,
                *script,
                *map(str, self.size),
            ],
            env={**os.environ, "SOAK_SURVIVE": "1", "SOAK_SPLIT": split},
        )
        self.wait(lambda: self.trains(0))

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits until a function returns true.

        Raises:
          RuntimeError: the wait takes too long.
        """
        end = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the run in {self.folder} does not go on")
            time.sleep(0.05)

    def worlds(self) -> list[dict[str, Any]]:
        """The ledger's line about each world."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "losses.ledger").read_text().splitlines()
            found = [json.loads(x) for x in lines if x.endswith("}")]
            return [x for x in found if x["kind"] == "world"]
        return []

    def trains(self, generation: int) -> bool:
        """Whether both processes have done steps in a world after the given one."""
        worlds = self.worlds()
        if not worlds or worlds[-1]["generation"] <= generation:
            return False
        after = [x for x in losses(self.folder) if x[2] > worlds[-1]["time_s"]]
        return len(after) >= 4

    def kill(self) -> dict[str, Any]:
        """Kills the second process; returns the ledger's line about the next world."""
        before = self.worlds()[-1]["generation"]
        state = read_state(self.folder)
        assert state is not None
        second = ProcessId.from_data(state["workers"][str(state["world"][1])])
        assert second is not None
        os.kill(second.pid, signal.SIGKILL)
        self.wait(lambda: self.trains(before))
        found = next(x for x in self.worlds() if x["generation"] > before)
        return {"step": found["step"], **found["measured"]}

    def stop(self) -> None:
        """Ends the run after a step."""
        with contextlib.suppress(OSError):
            command(self.folder, command="stop")
            self.process.wait(60)
        self.process.terminate()
        self.process.wait()


def largest_difference(folder: pathlib.Path) -> dict[str, Any]:
    """The losses of a run of the small model, compared with those of one process."""
    found = losses(folder)
    last = max(x[0] for x in found)
    plain = plain_losses(folder, last + 1)
    worst = max(abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for x in found)
    missing = len(set(range(last + 1)) - {x[0] for x in found})
    return {"steps": last + 1, "missing": missing, "largest_relative_difference": worst}


def measure_large(width: int) -> dict[str, Any]:
    """Kills one of two processes that have about 1 GiB of state each."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(pathlib.Path(folder), width, LAYERS, split="whole")
        try:
            world = run.kill()
        finally:
            run.stop()
    mapped_s = world["map_s"] + world["place_s"]
    moved = {k: world[k] for k in ("kept_bytes", "moved_bytes")}
    parts = ("pause_s", "start_s", "plan_s", "compile_s", "flush_s", "write_s")
    return {"mapped_s": mapped_s, **moved, **{k: world[k] for k in parts}}


def measure_small(kills: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The pauses after kills with a small model, and the losses of the run."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        run = Run(folder, 16, 2, split="1")
        try:
            for _ in range(kills):
                time.sleep(BETWEEN_S)
                world = run.kill()
                rest_s = world["pause_s"] - world["start_s"]
                found.append({**world, "rest_s": rest_s})
                print(json.dumps(found[-1]), flush=True)
        finally:
            run.stop()
        return found, largest_difference(folder)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of pauses and their parts."""
    names = ("pause_s", "start_s", "rest_s", "plan_s", "compile_s", "flush_s")
    return {name: statistics.median(x[name] for x in rows) for name in names}


def main() -> None:
    """Measures, prints and writes the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--large-width", type=int, default=4096, dest="width")
    data = pathlib.Path(__file__).parents[1] / "docs" / "data" / "respawn.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    large = measure_large(given.width)
    print(json.dumps(large, indent=1), flush=True)
    rows, right = measure_small(given.kills)
    made: dict[str, Any] = {
        "command": f"python benchmarks/respawn.py --kills {given.kills}",
        "summary": {
            "large_mapped_s": large["mapped_s"],
            **{f"median_{k}": v for k, v in medians(rows).items()},
            **right,
        },
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "large": large,
        "kills": rows,
    }
    print(json.dumps(made["summary"], indent=1))
    given.out.write_text(json.dumps(made, indent=1) + "\n")
    good = large["mapped_s"] < 1.0 and not right["missing"]
    good &= right["largest_relative_difference"] < 1e-5
    good &= made["summary"]["median_rest_s"] < 3.0
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
