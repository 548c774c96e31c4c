"""Measures the pauses of 2 -> 4 -> 3 processes, with and without prepared programs.

Usage: python benchmarks/reform.py [--width 256] [--depth 6] [--repeat 3]

A pause is the time from the last step of the old world to the first step of the new
one, by the workers' own records. ``besides`` is the pause without planning, compiling
and loading the program, which the ledger reports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from soak_figures import SCRIPT, losses

from autopar.elastic.processes.records import command

CHANGES = (4, 3, 2, 4, 3)


def pauses(folder: pathlib.Path) -> list[dict[str, Any]]:
    """For each world except the first: number of processes, pause and its parts."""
    steps = losses(folder)
    lines = [json.loads(x) for x in (folder / "losses.ledger").read_text().splitlines()]
    worlds = [x for x in lines if x["kind"] == "world"][1:]
    found: list[dict[str, Any]] = []
    for world in worlds:
        before = [t for k, _, t in steps if k == world["step"] - 1]
        after = [t for k, _, t in steps if k == world["step"]]
        if not before or not after:
            continue
        pause = min(after) - max(before)
        took = world["measured"]
        found.append(
            {
                "processes": world["processes"],
                "program": world["program"],
                "pause_s": round(pause, 3),
                "plan_s": round(took["plan_s"], 3),
                "program_s": round(took["compile_s"], 3),
                "place_s": round(took["place_s"], 3),
                "besides_s": round(pause - took["compile_s"], 3),
                "moved_bytes": took["moved_bytes"],
            }
        )
    return found


def prepared(folder: pathlib.Path, wanted: set[int], limit_s: float) -> None:
    """Waits until programs for worlds of these sizes have been prepared."""
    end = time.time() + limit_s
    done: set[int] = set()
    while time.time() < end:
        path = folder / "log.jsonl"
        if path.exists():
            lines = [json.loads(x) for x in path.read_text().splitlines()]
            done = {x["processes"] for x in lines if x["event"] == "prepared"}
        if wanted <= done:
            return
        time.sleep(0.2)
    print(f"not prepared within {limit_s:.0f} s: {sorted(wanted - done)}")


def wait(folder: pathlib.Path, size: int, limit_s: float = 120.0) -> None:
    """Waits until a world with this number of processes has formed."""
    end = time.time() + limit_s
    while time.time() < end:
        with contextlib.suppress(OSError, ValueError):
            now = command(folder, command="status")["status"]
            if now["formed"] and len(now["world"]) == size:
                return
        time.sleep(0.05)
    print(f"{size} processes did not form")


def measure(given: Any, *, ahead: bool) -> list[dict[str, Any]]:
    """Runs the changes, with or without prepared programs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        sizes = ["--processes", "2", "--max", "4", *([] if ahead else ["--no-ahead"])]
        words = [str(folder / "losses"), str(10**7), str(given.width), str(given.depth)]
        script = [str(SCRIPT), *words]
        where = ["--folder", str(folder)]
        run = subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", *where, *sizes, *script]
        )
        try:
            wait(folder, 2)
            for size in CHANGES:
                if ahead:
                    prepared(folder, {3, 4} if size == CHANGES[0] else {3}, 300)
                command(folder, command="resize", processes=size)
                wait(folder, size)
                time.sleep(given.between_s)
            command(folder, command="stop")
        finally:
            run.terminate()
            run.wait()
        return pauses(folder)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--between-s", type=float, default=5.0, dest="between_s")
    given = parser.parse_args()
    os.environ.setdefault("SOAK_SURVIVE", "1")
    for ahead in (False, True):
        print("compiled ahead" if ahead else "not compiled ahead", flush=True)
        for row in measure(given, ahead=ahead):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
