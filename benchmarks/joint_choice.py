"""Layouts and codecs chosen together, compared with layouts first and codecs second.

    python benchmarks/joint_choice.py [--device h100] [--shape 4x2] [example ...]

The links between hosts have rates from 0.1 to 400 Gbit/s. For each rate, the table has
the predicted step times and meshes of three plans: the best plan without codecs, this
plan's layouts with the best codecs, and layouts and codecs chosen together.
"""

from __future__ import annotations

import argparse
import collections
import sys

import jax
import workloads

from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import analyse

RATES = (0.1, 0.3, 1, 3, 10, 25, 50, 100, 200, 400)


def main() -> int:
    """Prints the table; returns 1 if the joint choice is ever worse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*", default=["gpt"])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--shape", default="4x2")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=["layers=12", "d_model=1024", "heads=16", "seq=512"],
        help="options of the example",
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    workloads.row(
        "example", "Gbit/s", "no codecs ms", "layouts, then codecs ms", "together ms",
        "layouts without codecs", "layouts together", "codecs together",
    )  # fmt: skip
    workloads.row(*["---"] * 8)
    worse = False
    for name in options.examples:
        sizes = {k: int(v) for k, v in (s.split("=") for s in options.sizes)}
        analysis = analyse(*workloads.arguments(name, batch=options.batch, **sizes))
        for rate in options.rates:
            worse |= row(name, rate, analysis, options)
    return int(worse)


def row(name: str, rate: float, analysis, options: argparse.Namespace) -> bool:
    """Plans for one rate; returns whether the joint choice is worse."""
    text = f"{options.shape}:{options.device},network={rate:g}Gb/s"
    cluster = Cluster.parse(text)
    given = {"seconds": options.seconds}
    none = plan_analysis(analysis, cluster, PlanOptions(**given))
    after = plan_analysis(
        analysis, cluster, PlanOptions(compression="auto", layouts=none, **given)
    )
    joint = plan_analysis(analysis, cluster, PlanOptions(compression="auto", **given))
    times = [f"{1e3 * p.predicted.step_s:.2f}" for p in (none, after, joint)]
    workloads.row(name, f"{rate:g}", *times, layout(none), layout(joint), codecs(joint))
    return joint.predicted.step_s > after.predicted.step_s * (1 + 1e-6)


def layout(plan) -> str:
    """The mesh, and the number of parameters split over each set of axes."""
    axes = " ".join(f"{k}={v}" for k, v in plan.mesh["axes"].items())
    split = collections.Counter(
        "+".join(sorted({a for dim in spec for a in dim})) or "whole"
        for path, spec in plan.inputs.items()
        if plan.roles[path] == "parameter"
    )
    batch = {
        a
        for path, spec in plan.inputs.items()
        if plan.roles[path] == "batch"
        for dim in spec
        for a in dim
    }
    parts = ", ".join(f"{n} {k}" for k, n in sorted(split.items()))
    return f"{axes}; batch over {'+'.join(sorted(batch)) or 'none'}; {parts}"


def codecs(plan) -> str:
    """The number of gradients that each codec sends."""
    found = collections.Counter(g.codec or "as they are" for g in plan.gradients)
    return ", ".join(f"{n} {k}" for k, n in found.most_common(4))


if __name__ == "__main__":
    sys.exit(main())
