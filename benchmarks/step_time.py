"""Real step time on 8 simulated devices: our plan against every expert plan.

    python benchmarks/step_time.py [--profile FILE] [example ...]

Plans are made for the local machine (its saved profile if there is one) and
run in turns; the median of five turns counts.
"""

from __future__ import annotations

import argparse
import sys

import jax
import workloads

from autopar.cluster import Cluster
from autopar.planner.candidate import SearchResult
from autopar.planner.experts import search_from_experts
from autopar.planner.record import make_plan
from autopar.runtime.timing import measure_plans
from autopar.steps.analysis import analyse


def main() -> int:
    """Prints the table; returns 1 if ours is over 1.03 of the best expert plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--profile", default=None)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    cluster = Cluster.from_toml(options.profile) if options.profile else Cluster.local()
    workloads.row(
        "example", "plan", "predicted ms", "measured ms", "measured: ours / this one"
    )
    workloads.row(*["---"] * 5)
    over = 0
    for name in options.examples or workloads.EXAMPLES:
        step, args = workloads.arguments(name)
        analysis = analyse(step, args)
        result, experts = search_from_experts(
            analysis, cluster, seconds=options.seconds
        )
        plans = {"autopar": make_plan(analysis, result)}
        for expert in experts:
            if expert.candidate is not None:
                mesh = expert.candidate.pricer.mesh
                found = SearchResult(expert.candidate, ((mesh, expert.candidate),), 0.0)
                plans[f"{expert.name}, {expert.mesh}"] = make_plan(analysis, found)
        measured = measure_plans(analysis, plans)
        ours = measured["autopar"]
        for plan, seconds in sorted(measured.items(), key=lambda item: item[1]):
            workloads.row(
                name, plan, f"{plans[plan].predicted.step_s * 1e3:.2f}",
                f"{seconds * 1e3:.2f}", f"{ours / seconds:.3f}",
            )  # fmt: skip
        over += ours > 1.03 * min(measured.values())
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
