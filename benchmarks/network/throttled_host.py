"""A host whose CPU quota is halved, and raised again, while a script trains.

    python benchmarks/network/throttled_host.py [--cores 0.4] [--host 3]

A run over four hosts trains `link_script.py`. Hosts are network namespaces with a
control group each, which gets an equal quota of the machine's cores. Then one host gets
half of its quota, and later all of it again. Nobody tells the run. The first row says
after how many seconds the run had noticed and trained by another plan, and how long its
steps took then over those of the best static split. A static split is a run that begins
with the throttled host and runs a given number of microbatches on each host. The second
row compares the steps after the quota was raised with those before it was halved.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from bed import Bed
from host_run import CpuShares, HostRun

from autopar import Cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS, RATE, ROWS = 4, 1000, 64
SPLITS = ["5+5+4+2", "5+4+4+3", "9+9+9+5", "10+9+9+4"]


class Trial:
    """Runs on throttled hosts."""

    def __init__(self, given: Any, place: pathlib.Path, bed: Bed, shares: CpuShares):
        """Keeps where to run."""
        self.given, self.place, self.bed, self.shares = given, place, bed, shares
        self.runs = 0

    def start(self, cluster: str, *split: str) -> HostRun:
        """Starts a run whose hosts have no quotas until its first world trains."""
        for rank in range(HOSTS):
            self.shares.set(rank, None)
        self.runs += 1
        size = [str(self.given.layers), f"{ROWS}x{self.given.sequence}"]
        script = [cluster, "none", *size, *split]
        options = ["--no-ahead"] if split else []
        folder = self.place / f"run{self.runs}"
        run = HostRun(folder, self.bed, script, options=options, shares=self.shares)
        if run.wait_for("formed", 1) is None:
            print(run.output(), file=sys.stderr)
            run.close()
            raise SystemExit("no world has formed")
        if not split:  # likely next worlds are prepared
            run.wait_for("prepared", 4, 90.0)
        for rank in range(HOSTS):
            self.shares.set(rank, self.given.cores)
        return run

    def static(self, split: str) -> float:
        """The mean seconds of a step of a split, with a throttled host."""
        speeds = [0.5 if k == self.given.host else 1.0 for k in range(HOSTS)]
        equal = Cluster.parse(f"{HOSTS}x1:cpu,network={RATE}Mb/s")
        path = self.place / "uneven.toml"
        path.write_text(equal.with_speeds(speeds).to_toml())
        run = self.start(str(path), _turned(split, self.given.host))
        try:
            self.shares.set(self.given.host, self.given.cores / 2)
            return statistics.mean(run.seconds(self.given.seconds))
        finally:
            run.close()

    def adaptive(self) -> list[dict[str, Any]]:
        """The rows of a run whose host is throttled, and then not any more."""
        run = self.start(f"1x1:cpu,network={RATE}Mb/s")
        host, cores, length_s = self.given.host, self.given.cores, self.given.seconds
        rows: list[dict[str, Any]] = []
        try:
            before_s = statistics.mean(run.seconds(length_s))
            for k, share in enumerate([cores / 2, cores]):
                self.shares.set(host, share)
                at = time.time()
                worst_s = statistics.mean(run.seconds(10.0)) if k == 0 else None
                formed = run.wait_for("formed", k + 2)
                step_s = statistics.mean(run.seconds(length_s))
                found = run.log("speeds")
                rows.append(
                    {
                        "host's cores": share,
                        "other hosts' cores": cores,
                        "seconds until replanned": formed and round(formed - at, 1),
                        "speeds": list(found[-1]["speeds"].values()) if found else [],
                        "prepared while training": run.prepared(),
                        "pause": run.pause(),
                        "plan": run.scheme(),
                        "microbatches": run.shares(),
                        "step ms before the change": round(1e3 * before_s, 1),
                        "step ms until replanned": worst_s and round(1e3 * worst_s, 1),
                        "step ms": round(1e3 * step_s, 1),
                        "load": round(os.getloadavg()[0], 1),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            print(run.output()[-3000:], file=sys.stderr)
            run.close()
        return rows


def _turned(split: str, host: int) -> str:
    """A split whose last host changes places with another one."""
    found = split.split("+")
    found[host], found[-1] = found[-1], found[host]
    return "+".join(found)


def measure(given: Any) -> dict[str, Any]:
    """The rows, and the steps of the static splits."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        Bed(HOSTS + 1, RATE) as bed,
        CpuShares(bed) as shares,
    ):
        trial = Trial(given, pathlib.Path(temporary), bed, shares)
        rows = trial.adaptive()
        splits: dict[str, list[float]] = {}
        for _ in range(given.turns):
            for split in given.splits:
                splits.setdefault(split, []).append(trial.static(split))
                print(split, splits[split], flush=True)
    found = {split: 1e3 * statistics.median(x) for split, x in splits.items()}
    best = min(found, key=lambda split: found[split])
    slow, again = rows
    slow["best static split"] = best
    slow["over the best static split"] = round(slow["step ms"] / found[best], 3)
    before_ms = again["step ms before the change"]
    again["over before the change"] = round(again["step ms"] / before_ms, 3)
    static = {split: round(x, 1) for split, x in found.items()}
    return {"rows": rows, "step ms of static splits": static}


def main() -> None:
    """Measures, and writes the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=float, default=0.4, help="of each host")
    parser.add_argument("--host", type=int, default=3, help="the throttled one")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each mean")
    parser.add_argument("--splits", nargs="*", default=SPLITS)
    parser.add_argument("--turns", type=int, default=1, help="of the static splits")
    data = ROOT / "docs" / "data" / "throttled_host.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    words = ["python benchmarks/network/throttled_host.py", *sys.argv[1:]]
    made = {"command": " ".join(words), **measure(given)}
    given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
