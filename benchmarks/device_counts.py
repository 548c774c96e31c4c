"""Predicted seconds of a step on each number of devices from 1 to 16.

    python benchmarks/device_counts.py [--most 16] [--only NAME ...] [--out FILE]

Plans each example for every number of H100s in one host. With one more device, a step
must not become slower by more than 1 %; devices that do not divide the batch may stay
idle. A row has the seconds for each number of devices, the number of devices that the
plan uses, and the largest ratio of a step to the fastest step with fewer devices. The
examples have a batch of 32 rows, which few numbers of devices divide. Examples named
``48`` have 48 rows.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import unet
from planning_time import UNET
from workloads import EXAMPLES, arguments, commit

import autopar

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "device_counts.json"
BAR = 1.01
_WIDE = {"layers": 4, "d_model": 1024, "seq": 256}
# Name -> example and options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"batch": 32}) for name in EXAMPLES},
    "unet": ("unet", {**UNET, "batch": 32}),
    "gpt wide": ("gpt", {**_WIDE, "batch": 32}),
    "gpt-scan wide 48": ("gpt-scan", {**_WIDE, "batch": 48}),
}


def step_of(name: str, options: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """A step and its abstract arguments."""
    if name != "unet":
        return arguments(name, **options)
    return unet.train_step(**options)


def measure(name: str, most: int) -> dict[str, Any]:
    """The row of a case."""
    step, args = step_of(*CASES[name])
    seconds, used = list[float](), list[int]()
    for count in range(1, most + 1):
        plan = autopar.plan(step, *args, cluster=f"{count}:h100")
        seconds.append(plan.predicted.step_s)
        used.append(plan.cluster.read().num_devices)
    rises = [b / min(seconds[:k]) for k, b in enumerate(seconds) if k]
    return {
        "example": name,
        "step_s": seconds,
        "used": used,
        "worst_rise": max(rises),
        "at": rises.index(max(rises)) + 2,
        "passes": max(rises) <= BAR,
    }


def main() -> None:
    """Measures each case, and writes each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    given = parser.parse_args()
    at = commit()
    rows = list[dict[str, Any]]()
    for name in given.only:
        rows.append(row := measure(name, given.most))
        milliseconds = " ".join(f"{1e3 * s:.3g}" for s in row["step_s"])
        print(f"{name}: worst {row['worst_rise']:.3f} at {row['at']}: {milliseconds}")
        sys.stdout.flush()
        words = f"python benchmarks/device_counts.py --most {given.most}"
        made = {"command": words, "at": at, "rows": rows}
        given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
