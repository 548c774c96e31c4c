"""Compares predicted communication and memory with those of the compiler.

    python benchmarks/predictions.py [--clusters 8 2x4 ...] [example ...]

For every example and cluster, the table has the bytes that one device sends: predicted,
in the module that Shardy partitions, and (for up to 32 devices) in the program that XLA
compiles for simulated devices. It also has the peak memory, predicted and according to
XLA.
"""

from __future__ import annotations

import argparse
import math
import sys

import jax
import workloads

from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.runtime.placement import abstract_mesh, device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse
from autopar_passes.audit.compiled import compiled_audit
from autopar_passes.audit.partitioned import shardy_collectives

MOST_SIMULATED = 32


def percent(predicted: float, real: float) -> str:
    """The error of a prediction, relative to the real value."""
    if real == 0:
        return "0%" if predicted == 0 else "inf"
    return f"{100 * (predicted / real - 1):+.1f}%"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clusters", nargs="*", default=workloads.CLUSTERS)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MOST_SIMULATED)
    workloads.row(
        "example", "cluster", "predicted MB", "Shardy", "XLA", "peak memory MB",
        "against XLA's", "named by the compiled audit",
    )  # fmt: skip
    workloads.row(*["---"] * 8)
    for name in options.examples or workloads.EXAMPLES:
        for shape in options.clusters:
            cluster = Cluster.parse(f"{shape}:{options.device}")
            batch = workloads.batch_for(cluster.num_devices)
            step, args = workloads.arguments(name, batch=batch)
            analysis = analyse(step, args)
            plan = plan_analysis(
                analysis, cluster, PlanOptions(seconds=options.seconds, stages=1)
            )
            row(name, shape, analysis, plan)
    return 0


def row(name: str, shape: str, analysis, plan) -> None:
    """Audits one plan and prints its row."""
    predicted = plan.predicted
    planned = planned_step(analysis, plan, abstract_mesh(plan))
    shardy = sum(c.sent_bytes for c in shardy_collectives(planned.lower()))
    xla, peak, named = "", "", ""
    if math.prod(plan.axis_sizes) <= MOST_SIMULATED:
        compiled = planned_step(analysis, plan, device_mesh(plan)).lower().compile()
        axes = tuple(plan.mesh["axes"].items())
        audit = compiled_audit(compiled, axes)
        xla = percent(predicted.communication_bytes, audit.communication_bytes)
        peak = percent(predicted.peak_memory_bytes, audit.peak_memory_bytes)
        named = "; ".join(audit.exceptions)
    workloads.row(
        name, shape, f"{predicted.communication_bytes / 1e6:.3f}",
        percent(predicted.communication_bytes, shardy), xla,
        f"{predicted.peak_memory_bytes / 1e6:.2f}", peak, named,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
