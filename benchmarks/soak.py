"""Kills, joins and leaves at random, while a script trains in 2 to 4 processes.

Usage: python benchmarks/soak.py --seed 1 --events 200

Prints the share of events after which all surviving processes went on, the pauses, and
whether the losses are those of the uninterrupted run; exits with 1 where they are not,
or where an event was not recovered.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autopar.elastic.processes.runner import command

HERE = pathlib.Path(__file__).parent
SCRIPT = HERE / "soak_script.py"
LEAST, MOST = 2, 4
# Longest that an event may take to recover from; joins start a process.
LIMIT_S = 120.0


class Soak:
    """A run that events happen to."""

    def __init__(
        self,
        folder: pathlib.Path,
        seed: int,
        processes: int = 3,
        options: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        """Starts the run.

        Args:
          folder: for all files.
          seed: of the events.
          processes: to begin with.
          options: of ``autopar run`` besides.
          words: of the script besides.
        """
        self.folder, self.draw = folder, random.Random(seed)
        self.events: list[dict[str, Any]] = []
        given = [str(SCRIPT), str(folder / "losses"), str(10**7), *words]
        sizes = ["--processes", str(processes), "--max", str(MOST)]
        rest = ["--folder", str(folder), "--silence", "20", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", *sizes, *rest, *given],
            stdout=open(folder / "output", "w"),  # noqa: SIM115 (for the child)
            stderr=subprocess.STDOUT,
        )
        self.wait(lambda: self.count("formed") > 0)

    def log(self) -> list[dict[str, Any]]:
        """The supervisor's log."""
        try:
            lines = (self.folder / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def count(self, event: str) -> int:
        """How often something has happened."""
        return sum(x["event"] == event for x in self.log())

    def wait(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Waits until something has happened; False where it does not."""
        end = time.time() + limit_s
        while time.time() < end and self.process.poll() is None:
            if done():
                return True
            time.sleep(0.02)
        return False

    def status(self) -> dict[str, Any]:
        """What the supervisor says now."""
        return command(self.folder, command="status")["status"]

    def pids(self) -> dict[int, int]:
        """Worker -> process id."""
        return {x["worker"]: x["pid"] for x in self.log() if x["event"] == "start"}

    def event(self) -> bool:
        """Lets one event happen, and waits until the run has recovered from it."""
        world = self.status()["world"]
        kinds = ["kill", "leave"] if len(world) > LEAST else []
        kinds += ["join"] if len(world) < MOST else []
        kind = self.draw.choice(kinds)
        before = time.time()
        if kind == "join":
            command(self.folder, command="resize", processes=len(world) + 1)
        else:
            worker = self.draw.choice(world)
            if kind == "leave":
                command(self.folder, command="remove", worker=worker)
            else:
                with contextlib.suppress(OSError):
                    os.kill(self.pids()[worker], signal.SIGKILL)
            world = [w for w in world if w != worker]
        size = len(world) + (kind == "join")
        recovered = self.wait(lambda: self.recovered(before, size, world))
        found = {"kind": kind, "time_s": before, "recovered": recovered}
        self.events.append({**found, "lost": len(self.lost(before))})
        return recovered

    def lost(self, before: float) -> list[int]:
        """The processes that died since then though nobody killed them.

        gloo ends a process that gets a message of another length than it waits for,
        which happens where a peer dies in the middle of a collective. One whose
        error was blamed on the death of another process ends with that error.
        """
        codes = [x for x in self.log() if x["event"] == "gone"]
        return [x["worker"] for x in codes if x["time_s"] > before and _died(x["code"])]

    def recovered(self, before: float, size: int, world: Collection[int] = ()) -> bool:
        """Whether those that live have formed a world since then, and train.

        ``world`` has so many processes less as were lost of it since.
        """
        log, size = self.log(), size - len({*self.lost(before)} & {*world})
        formed = [k for k, x in enumerate(log) if x["event"] in ("form", "formed")]
        if len(formed) < 2 or log[formed[-1]]["event"] != "formed":
            return False
        form, end = log[formed[-2]], log[formed[-1]]
        return end["time_s"] > before and len(form.get("workers", ())) == size

    def run(self, count: int) -> None:
        """Lets so many events happen."""
        for k in range(count):
            time.sleep(self.draw.uniform(0.0, 1.0))
            if not self.event():
                print(f"event {k} was not recovered: {self.events[-1]}", flush=True)
                for name in ("log.jsonl", "output"):
                    text = (self.folder / name).read_text().splitlines()
                    print(f"the end of {name}:", *text[-40:], sep="\n", flush=True)
                return
            if (k + 1) % 10 == 0:
                print(f"{k + 1} events", flush=True)

    def stop(self) -> None:
        """Ends the run."""
        with contextlib.suppress(OSError):
            command(self.folder, command="stop")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for pid in [self.process.pid, *self.pids().values()]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _died(code: int | None) -> bool:
    return code not in (None, 0, -signal.SIGKILL)


def losses(folder: pathlib.Path) -> list[tuple[int, float, float]]:
    """Step, loss and time of every step of every process, by time."""
    found: list[tuple[int, float, float]] = []
    for path in folder.glob("losses.*"):
        if path.suffix != ".ledger":
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    step, loss, seconds = json.loads(line)
                    found.append((step, loss, seconds))
    return sorted(found, key=lambda x: x[2])


def plain_losses(folder: pathlib.Path, steps: int) -> dict[int, float]:
    """The losses of the same script in one process, without events."""
    out = folder / "plain"
    subprocess.run(
        [sys.executable, str(SCRIPT), str(out), str(steps)],
        env={**os.environ, "SOAK_PACE_S": "0", "SOAK_SPLIT": "0"},
        check=True,
    )
    (path,) = [x for x in folder.glob("plain.*") if x.suffix != ".ledger"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {step: loss for step, loss, _ in lines}


def pauses(events: list[dict[str, Any]], steps: list[tuple[int, float, float]]) -> list:
    """Of each event the longest time between two steps that it fell into or caused."""
    times = [x[2] for x in steps]
    ends = [x["time_s"] for x in events[1:]] + [float("inf")]
    found: list[float] = []
    for event, end in zip(events, ends, strict=True):
        gaps = [
            b - a
            for a, b in itertools.pairwise(times)
            if b > event["time_s"] and a < end
        ]
        found.append(max(gaps, default=0.0))
    return found


def main() -> None:
    """Runs and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for all files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, given.seed)
        try:
            soak.run(given.events)
        finally:
            soak.stop()
        sys.exit(report(soak, given))


def report(soak: Soak, given: Any) -> int:
    """Prints what was found; returns the exit code."""
    steps = losses(soak.folder)
    last = max((x[0] for x in steps), default=-1)
    plain = plain_losses(soak.folder, last + 1)
    worst = max(
        (abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for x in steps), default=0.0
    )
    missing = set(range(last + 1)) - {x[0] for x in steps}
    killed = {x["worker"] for x in soak.log() if x["event"] == "kill"}
    killed |= set(soak.lost(0.0))
    found = pauses(soak.events, steps)
    recovered = sum(x["recovered"] for x in soak.events)
    count = len(soak.events)
    result = {
        "seed": given.seed,
        "events": count,
        "recovered": recovered,
        "in_process": (count - len(killed)) / max(1, count),
        "steps": last + 1,
        "missing_steps": len(missing),
        "worst_relative_difference_of_losses": worst,
        "median_pause_s": round(statistics.median(found), 3),
        "longest_pause_s": round(max(found), 3),
    }
    for kind in ("kill", "leave", "join"):
        own = [p for p, e in zip(found, soak.events, strict=True) if e["kind"] == kind]
        if own:
            result[f"{kind}: events, median and longest pause in s"] = [
                len(own),
                round(statistics.median(own), 3),
                round(max(own), 3),
            ]
    print(json.dumps(result, indent=1))
    good = recovered == count == given.events and worst < 1e-5 and not missing
    return 0 if good else 1


if __name__ == "__main__":
    main()
