"""Our plan beside the plans experts write, under the same cost model.

    python benchmarks/experts.py [--device h100] [--seconds 10] [example ...]

For every example and cluster: predicted step time of our plan and of the best
expert plan, and how many expert plans do not fit.
"""

from __future__ import annotations

import argparse
import sys

import workloads

from autopar.cluster import Cluster
from autopar.planner.experts import search_from_experts
from autopar.steps.analysis import analyse


def main() -> int:
    """Prints the table; returns 1 if an expert plan is faster than ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--clusters", nargs="*", default=workloads.CLUSTERS)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    workloads.row(
        "example", "cluster", "ours ms", "gap", "best expert ms", "expert",
        "ours / best", "infeasible experts",
    )  # fmt: skip
    workloads.row(*["---"] * 8)
    slower = 0
    for name in options.examples or workloads.EXAMPLES:
        for shape in options.clusters:
            cluster = Cluster.parse(f"{shape}:{options.device}")
            batch = workloads.batch_for(cluster.num_devices)
            step, args = workloads.arguments(name, batch=batch)
            result, experts = search_from_experts(
                analyse(step, args), cluster, seconds=options.seconds
            )
            found = [e for e in experts if e.candidate is not None]
            best = min(found, key=lambda e: e.candidate.step_s)
            ours = result.best
            ratio = ours.step_s / best.candidate.step_s
            slower += ratio > 1 + 1e-9
            workloads.row(
                name, shape, f"{ours.step_s * 1e3:.4f}", f"{ours.solution.gap:.1e}",
                f"{best.candidate.step_s * 1e3:.4f}", best.name, f"{ratio:.4f}",
                len(experts) - len(found),
            )  # fmt: skip
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
