"""Compares pipelines with plans of one stage over real links, and with predictions.

    python benchmarks/network/pipelines.py --hosts 2 --rates 100 1000 --profile \\
        --plans data tensor pipeline:4 pipeline:8 data+int8 --out steps.json

Each host is a process with one device; a pipeline has one stage for each host. The name
of a plan says how it splits the step: "data" splits the batch, "tensor" splits the
model, and "pipeline:M" is a pipeline with M microbatches (with "pipeline" the planner
chooses M). With "planned" the planner decides everything. The part after "+" is the
codec of gradients. ``--profile`` measures hosts and links at each rate, as ``autopar
profile --distributed`` does, and plans with the result. The plans run one step each in
turns, so that other load of the machine affects all of them. The seconds of a step are
those of the slowest process.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import bed
import clusters
import jax
import language_model
import numpy as np
import time_to_loss
import worker
from jax.sharding import PartitionSpec

import autopar

WARM_STEPS = 2
TIMEOUT_S = 1800.0
FAST = "1000Gb/s,network_latency=1us"


def split_plan(
    workload: language_model.Workload, name: str, cluster: autopar.Cluster
) -> autopar.Plan:
    """A plan of one stage, chosen without regard to the links.

    The plan is made for links that cost almost nothing, and then priced for the real
    links.
    """
    name, _, codec = name.partition("+")
    if name == "data":
        layouts = time_to_loss.data_parallel_plan(workload)
    else:
        fast = autopar.Cluster.parse(f"{worker.count()}x1:cpu,network={FAST}")
        pins = {"data/*": PartitionSpec()}
        layouts = planned(workload, cluster=fast, pins=pins, stages=1)
    return planned(
        workload, cluster=cluster, compression=codec or "none", layouts=layouts
    )


def planned(workload: language_model.Workload, **asked: Any) -> autopar.Plan:
    """Plans the workload's step for the whole batch."""
    state = jax.eval_shape(workload.create)
    data = jax.eval_shape(lambda: workload.batch(0))
    return autopar.plan(workload.step, state, data, seconds=None, **asked)


def plan_of(
    workload: language_model.Workload, name: str, cluster: autopar.Cluster
) -> autopar.Plan:
    """The plan with a given name; see the module.

    Raises:
      ValueError: no plan has this name.
    """
    how, _, count = name.partition("+")[0].partition(":")
    codec = name.partition("+")[2] or "none"
    if how in ("data", "tensor"):
        return split_plan(workload, name, cluster)
    if how == "planned":
        return planned(workload, cluster=cluster, compression=codec)
    if how != "pipeline":
        raise ValueError(f"{name!r}: expected data, tensor, pipeline or planned.")
    asked = {"microbatches": int(count)} if count else {}
    return planned(
        workload, cluster=cluster, compression=codec, stages=worker.count(), **asked
    )


class Training:
    """A training under one plan."""

    def __init__(self, workload: language_model.Workload, plan: autopar.Plan) -> None:
        """Compiles the step and creates the state.

        Args:
          workload: the model and its data.
          plan: how.
        """
        self.workload = workload
        self.plan = plan
        self.step = autopar.parallelize(workload.step, plan=plan)
        example = jax.eval_shape(lambda: workload.batch(0))
        self.state = self.step.init(workload.create, batch=example)
        self.losses: list[float] = []

    def take(self) -> float:
        """Runs a step, and returns its seconds."""
        rows = time_to_loss.rows(self.workload, len(self.losses))
        worker.barrier()
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, rows)
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - begin
        self.losses.append(float(metrics["loss"]))
        return seconds


def run(options: argparse.Namespace, rate_mbit: float) -> None:
    """Runs all plans at one rate, in turns."""
    sizes = language_model.Sizes(
        layers=options.layers, d_model=options.width, batch=options.batch
    )
    workload = language_model.build(0, sizes)
    if options.profile:
        cluster = time_to_loss.measured(rate_mbit)
    else:
        fits = clusters.load(options.links)
        cluster = clusters.described(rate_mbit or None, worker.count(), fits)
    worker.set_rate(None)
    idle = worker.background()
    trained: list[Training] = []
    for name in options.plans:
        trained.append(Training(workload, plan_of(workload, name, cluster)))
        for _ in range(WARM_STEPS):
            trained[-1].take()
        worker.say(f"{rate_mbit:g} Mbit/s: compiled {name}")
    worker.set_rate(rate_mbit or None)
    seconds: list[list[float]] = [[] for _ in trained]
    for _ in range(options.steps):
        for taken, one in zip(seconds, trained, strict=True):
            taken.append(one.take())
    for name, one, taken in zip(options.plans, trained, seconds, strict=True):
        sent, _ = worker.measure(one.take, idle)
        worker.report(record(name, rate_mbit, one, taken, sent))


def record(
    name: str, rate_mbit: float, one: Training, taken: Sequence[float], sent: Any
) -> dict[str, Any]:
    """The results of one process for a plan, as JSON."""
    plan = one.plan
    return {
        "plan": name,
        "rate_mbit": rate_mbit,
        "hosts": worker.count(),
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "predicted_s": plan.predicted.step_s,
        "step_s": list(taken),
        "sent_bytes": sent.data_bytes,
        "losses": one.losses,
    }


def merged(found: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record for each plan and rate, from the records of all processes."""
    out: list[dict[str, Any]] = []
    for same in zip(*found, strict=False):
        longest = np.max([one["step_s"] for one in same], axis=0).tolist()
        sent = max(one["sent_bytes"] for one in same)
        out.append({**same[0], "step_s": longest, "sent_bytes": sent})
    return out


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as a table; losses are those of the last step."""
    lines = [
        "| Mbit/s | plan | stages x microbatches | measured ms (range) | predicted ms "
        "| most MB sent | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in records:
        ms = [1e3 * s for s in one["step_s"]]
        shape = f"{one['stages']} x {one['microbatches']} {one['schedule']}"
        lines.append(
            f"| {one['rate_mbit']:g} | {one['plan']} | {shape} | "
            f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f}) | "
            f"{1e3 * one['predicted_s']:.0f} | {one['sent_bytes'] / 1e6:.2f} | "
            f"{one['losses'][-1]:.4f} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--rates", type=float, nargs="+", default=[100.0, 1000.0], help="Mbit/s")
    add("--plans", nargs="+", default=["data", "tensor", "pipeline"])
    add("--steps", type=int, default=5)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=384)
    add("--batch", type=int, default=32, help="rows over all hosts")
    add("--links", type=pathlib.Path, help="a file of collectives.py, to plan with")
    add("--profile", action="store_true", help="measure hosts and links, and plan so")
    add("--timeout", type=float, default=TIMEOUT_S, help="seconds")
    add("--out", type=pathlib.Path, help="everything, as JSON")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        worker.start()
        for rate in options.rates:
            run(options, rate)
        return 0
    results, code = bed.run_inside(__file__, options.hosts, options.timeout)
    records = merged(results)
    print(table(records))
    if options.out:
        found = {"records": records, "machine": clusters.machine()}
        options.out.write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    bed.exit_with(main)
