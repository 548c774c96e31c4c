"""Computes the figures of `soak.py` from its events and the files of the processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SCRIPT = pathlib.Path(__file__).with_name("soak_script.py")
# For this many seconds after all workers were killed, steps may go back to the
# checkpoint.
_RETURN_S = 360.0


def losses(folder: pathlib.Path) -> list[tuple[int, float, float]]:
    """Step, loss and time of every step of every process, in order of time."""
    found: list[tuple[int, float, float]] = []
    for path in folder.glob("losses.*"):
        if path.suffix != ".ledger":
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    step, loss, seconds = json.loads(line)
                    found.append((step, loss, seconds))
    return sorted(found, key=lambda x: x[2])


def set_pace(folder: pathlib.Path, seconds: float) -> None:
    """Sets the seconds of every step of a run that reads its pace from a folder."""
    new = folder / "pace.new"
    new.write_text(str(seconds))
    new.replace(folder / "pace")


def has_trained(
    folder: pathlib.Path, formed: Mapping[str, Any], processes: int, steps: int
) -> bool:
    """Whether a world has so many processes, and they have done so many steps.

    Args:
      folder: folder of the run.
      formed: the event of the world in the supervisor's log.
      processes: number of processes.
      steps: number of steps, those of each process counted.
    """
    if len(formed["workers"]) != processes:
        return False
    return sum(x[2] > formed["time_s"] for x in losses(folder)) >= steps


def longest_pause_s(
    steps: Sequence[tuple[int, float, float]], begin_s: float, end_s: float
) -> float:
    """The longest time between the ends of two steps, within a period."""
    times = [x[2] for x in steps if begin_s < x[2] < end_s]
    return round(max(b - a for a, b in itertools.pairwise(times)), 3)


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


def report(soak: Any, seed: int, kinds_of: Iterable[str]) -> dict[str, Any]:
    """The figures of a seed."""
    runs = [losses(folder) for folder in soak.runs]
    last = max((x[0] for steps in runs for x in steps), default=-1)
    plain = plain_losses(soak.folder, last + 1)
    worst = max(
        (abs(x[1] - plain[x[0]]) / abs(plain[x[0]]) for steps in runs for x in steps),
        default=0.0,
    )
    missing = sum(
        len(set(range(max(x[0] for x in steps) + 1)) - {x[0] for x in steps})
        for steps in runs
        if steps
    )
    kinds: dict[str, Any] = {}
    for kind in kinds_of:
        own = [x for x in soak.events if x["kind"] == kind]
        if own:
            seconds = [x["seconds"] for x in own]
            kinds[kind] = {
                "events": len(own),
                "right": sum(_right(x) for x in own),
                "median_s": round(statistics.median(seconds), 2),
                "longest_s": round(max(seconds), 2),
            }
    return {
        "seed": seed,
        "events": len(soak.events),
        "right": sum(_right(x) for x in soak.events),
        "recovered": sum(x["outcome"] == "recovered" for x in soak.events),
        "ended_as_promised": sum(
            x["outcome"] == "ended as promised" for x in soak.events
        ),
        "wrong": [x for x in soak.events if not _right(x)],
        "began_again": began_again(soak, runs),
        "asked_to_stop": len(soak.stops),
        "stopped": sum(soak.stops),
        "runs": len(runs),
        "steps": sum(max((x[0] for x in steps), default=-1) + 1 for steps in runs),
        "missing_steps": missing,
        "worst_relative_difference_of_losses": worst,
        "kinds": kinds,
    }


def began_again(soak: Any, runs: list[list[tuple[int, float, float]]]) -> int:
    """How often steps went back by more than two although no state was lost."""
    back = [x["time_s"] for x in soak.events if x.get("back")]
    count = 0
    for steps in runs:
        highest = -1
        for step, _, seconds in steps:
            lost = any(seconds - _RETURN_S < t < seconds for t in back)
            count += step < highest - 3 and not (lost and step > 0)
            highest = max(highest, step) if not lost else step
    return count


def _right(event: dict[str, Any]) -> bool:
    promised = "ended as promised" if event.get("gone") else "recovered"
    return event["outcome"] == promised
