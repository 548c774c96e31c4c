"""Compares our plan with plans that experts write, under the same cost model.

    python benchmarks/experts.py [--device h100] [--seconds 10] [example ...]
    python benchmarks/experts.py --large [--clusters 8x8:h100 ...] [model ...]

For every example and cluster, the table has the predicted step time of our plan, of a
search that does not start from an expert's plan (``cold``), and of the best expert
plan. It also has the number of expert plans that do not fit, and the known scheme that
our plan resembles. ``--large`` plans models of realistic size (`benchmarks/large.py`).
Seconds are CPU seconds, without tracing, of our search and of the experts' plans. Each
row is a separate process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import large
import workloads

from autopar.cluster import Cluster
from autopar.planner.candidate import Candidate
from autopar.planner.experts import Expert, expert_plans
from autopar.planner.scheme import worth_of
from autopar.planner.search import search
from autopar.steps.analysis import analyse
from autopar.steps.for_devices import for_devices

HEADING = (
    "model", "cluster", "ours ms", "gap", "cold ms", "best expert ms", "expert",
    "ours / best", "cold / best", "infeasible experts", "ours s", "cold s",
    "experts s", "ours resembles",
)  # fmt: skip


def main() -> int:
    """Prints the table; returns 1 if an expert plan is faster than ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--clusters", nargs="*")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.large, options)))
        return 0
    workloads.row(*HEADING)
    workloads.row(*["---"] * len(HEADING))
    slower = 0
    for name, cluster in pairs(options):
        flags = ["--large"] if options.large else []
        run = subprocess.run(
            [
                *(sys.executable, __file__, *flags, "--seconds", str(options.seconds)),
                *("--one", f"{name} {cluster}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            lines = run.stderr.strip().splitlines() or [f"exit {run.returncode}"]
            workloads.row(name, cluster, f"failed: {lines[-1][:200]}")
            slower += 1
            continue
        found = json.loads(run.stdout.strip().splitlines()[-1])
        slower += not found["ratio"] <= 1 + 1e-9
        workloads.row(name, cluster, *cells(found))
    return int(slower > 0)


def pairs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the name and cluster of each row."""
    if options.large:
        for name in options.examples or large.CASES:
            for cluster in options.clusters or large.CLUSTERS:
                yield name, cluster
        return
    for name in options.examples or workloads.EXAMPLES:
        for shape in options.clusters or workloads.CLUSTERS:
            yield name, f"{shape}:{options.device}"


def measured(row: str, real: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Plans one row in this process."""
    name, text = row.split(" ", 1)
    cluster = Cluster.parse(text)
    if real:
        step, args = large.CASES[name](cluster)
    else:
        batch = workloads.batch_for(cluster.num_devices)
        step, args = workloads.arguments(name, batch=batch)
    analysis = for_devices(analyse(step, args), cluster.num_devices)
    found: dict[str, Any] = {}
    for kind in ("ours", "cold"):
        started = time.process_time()
        result = search(
            analysis, cluster, seconds=options.seconds, experts=kind == "ours"
        )
        found[f"{kind}_cpu_s"] = time.process_time() - started
        found[f"{kind}_s"] = result.best.step_s
        if kind == "ours":
            found |= said(result.best)
    started = time.process_time()
    experts = expert_plans(analysis, cluster, seconds=options.seconds)
    found["experts_cpu_s"] = time.process_time() - started
    return found | against(found, experts)


def said(best: Candidate) -> dict[str, Any]:
    """The printed fields of our plan besides its time."""
    worth = worth_of(best.estimate, best.step_s)
    report = best.report
    return {"gap": report.gap, "status": report.status.value, "scheme": worth.scheme}


def against(found: dict[str, Any], experts: list[Expert]) -> dict[str, Any]:
    """The ratio of our times to the time of the best expert plan."""
    times = {
        f"{e.name} on {e.mesh}": e.candidate.step_s
        for e in experts
        if e.candidate is not None
    }
    best = min(times.values(), default=math.inf)
    return {
        "expert": next((n for n, s in times.items() if s == best), "none fits"),
        "best_s": best,
        "experts": times,
        "ratio": found["ours_s"] / best,
        "cold_ratio": found["cold_s"] / best,
        "unfit": len(experts) - len(times),
    }


def cells(found: dict[str, Any]) -> list[str]:
    """The cells of a row after its model and cluster."""
    times = (f"{found[k] * 1e3:.4f}" for k in ("ours_s", "cold_s", "best_s"))
    ours, cold, best = times
    spent = [f"{found[f'{k}_cpu_s']:.0f}" for k in ("ours", "cold", "experts")]
    return [
        ours, f"{found['gap']:.1e}", cold, best, found["expert"],
        f"{found['ratio']:.4f}", f"{found['cold_ratio']:.4f}", str(found["unfit"]),
        *spent, found["scheme"],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
