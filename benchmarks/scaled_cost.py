"""Time and error of estimates of a planned step at other batch sizes.

    python benchmarks/scaled_cost.py [example ...]

For each example a plan is made, and then ``StepEstimate.seconds(batch, accumulation)``
is called. *query* is the median time of a call with a new batch size, and *again* that
of a call with the same batch size again. *error* is the largest difference, over
batches of a quarter to 8 times the planned batch, from tracing the step at that batch
and pricing the same layouts anew. Batch sizes at which the planner forms other nodes
are left out and counted.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import workloads

from autopar.cluster import Cluster
from autopar.cost.estimate import StepEstimate, estimate
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
QUERIES = 100


def analysed(name: str, batch: int) -> Analysis:
    """Analyses an example's step at a batch size."""
    step, args = workloads.arguments(name, batch=batch, **SMALL[name])
    return analyse(step, args)


def query_s(found: StepEstimate, asked: Sequence[float]) -> float:
    """Median seconds of one call."""
    times: list[float] = []
    for batch in asked:
        start = time.perf_counter()
        found.seconds(batch, 2)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Prints the table."""
    names = sys.argv[1:] or list(SMALL)
    workloads.row(
        "example", "cluster", "query", "again", "error", "batches", "left out"
    )
    workloads.row(*["---"] * 7)
    for name in names:
        analysis = analysed(name, BATCH)
        others = {f: analysed(name, int(f * BATCH)) for f in FACTORS}
        for text in CLUSTERS:
            cluster = Cluster.parse(text)
            best = search(analysis, cluster, seconds=5).best
            cost = estimate(best.assignment, best.pricer)
            asked = [1.0 + k / QUERIES for k in range(QUERIES)]
            first_s, again_s = query_s(cost, asked), query_s(cost, asked)
            errors: list[float] = []
            for factor, other in others.items():
                if other.structure != analysis.structure:
                    continue
                moved = dataclasses.replace(best.assignment, analysis=other)
                want = estimate(moved, best.pricer).seconds()
                found = cost.seconds(factor)
                errors.append(abs(found / want - 1))
            workloads.row(
                name,
                text,
                f"{1e3 * first_s:.2f} ms",
                f"{1e6 * again_s:.1f} us",
                f"{max(errors):.2%}" if errors else "-",
                len(errors),
                len(others) - len(errors),
            )


if __name__ == "__main__":
    main()
