"""Queries of a planned step's time: how long they take, and how far they are off.

    python benchmarks/scaled_cost.py [example ...]

For each example a plan is made; then ``ScaledCost.step_s(devices, batch,
accumulation)`` is asked. *query* is the median time of one query, *first* the time of
the first query of a number of devices. *error* is the largest difference, over batches
of a quarter to 8 times the planned one, to tracing the step at that batch and pricing
the same layouts anew. Batches at which the planner sees other nodes are left out and
counted.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import workloads

from autopar.cluster import Cluster
from autopar.cost.breakdown import step_s
from autopar.cost.evaluate import evaluate
from autopar.cost.scaling import ScaledCost
from autopar.errors import PlanError
from autopar.planner.search import search
from autopar.steps.analysis import Analysis, analyse

CLUSTERS = ("2x4:cpu", "4x8:h100")
SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "d_model": 512, "seq": 256},
    "gpt-scan": {"layers": 2, "d_model": 512, "seq": 256},
    "gpt-nnx": {"layers": 2},
    "llama": {"layers": 2, "d_model": 512, "seq": 256},
    "vit": {"layers": 2},
    "resnet": {},
    "moe": {"layers": 2},
    "lstm": {},
}
BATCH = 256
FACTORS = (0.25, 0.5, 2.0, 8.0)
QUERIES = 2000


def analysed(name: str, batch: int) -> Analysis:
    """An example's step at a batch size."""
    step, args = workloads.arguments(name, batch=batch, **SMALL[name])
    return analyse(step, args)


def query_s(cost: ScaledCost, devices: int) -> float:
    """Median seconds of one query."""
    times: list[float] = []
    for k in range(QUERIES):
        start = time.perf_counter()
        cost.step_s(devices, BATCH + 8 * (k % 64), 1 + k % 3)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Prints the table."""
    names = sys.argv[1:] or list(SMALL)
    workloads.row(
        "example", "cluster", "query", "first", "error", "batches", "left out"
    )
    workloads.row(*["---"] * 7)
    for name in names:
        analysis = analysed(name, BATCH)
        others = {f: analysed(name, int(f * BATCH)) for f in FACTORS}
        for text in CLUSTERS:
            cluster = Cluster.parse(text)
            best = search(analysis, cluster, seconds=5).best
            cost = ScaledCost(best.assignment, best.pricer)
            start = time.perf_counter()
            try:
                cost.step_s(2 * cluster.num_devices, BATCH)
                first = f"{1e3 * (time.perf_counter() - start):.0f} ms"
            except PlanError:
                first = "no other degree"
            errors: list[float] = []
            for factor, other in others.items():
                if other.structure != analysis.structure:
                    continue
                moved = dataclasses.replace(best.assignment, analysis=other, _known={})
                want = step_s(evaluate(moved, best.pricer))
                found = cost.step_s(cluster.num_devices, int(factor * BATCH))
                errors.append(abs(found / want - 1))
            workloads.row(
                name,
                text,
                f"{1e6 * query_s(cost, cluster.num_devices):.1f} us",
                first,
                f"{max(errors):.2%}" if errors else "-",
                len(errors),
                len(others) - len(errors),
            )


if __name__ == "__main__":
    main()
