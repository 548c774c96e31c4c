"""Replicas on devices of two kinds, half of them twice as fast: ours against even shares.

    python benchmarks/replicas_mixed.py [--steps 3] [layers=4 d_model=128 ...]

Plans the GPT example on 8 simulated devices, 4 of which are said to be half as fast as
the others, as replicas whose shares the planner chooses, and in the best even way: every
number of microbatches with as many for each replica, and one mesh of all devices at the
speed of the slow ones. The plan, and even shares of as many microbatches, run on devices
that wait as long in each microbatch as it is predicted to take, times a factor. Prints a
JSON line: the predicted seconds, the ratio of even to ours, and that ratio as it ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import workloads
from jax.sharding import PartitionSpec
from pipeline_mixed import mixed

import autopar
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.runtime.planned import PlannedStep, device_mesh, planned_step
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.layouts import automatic_axes
from autopar_passes.program.trace import opened

_OPTIONS = {"layers": 4, "d_model": 128, "seq": 64, "batch": 96}
# Seconds that an even step is to take: then what two cores compute does not count.
_STEP_S = 8.0
# Most microbatches of the even shares that are tried.
_MOST = 32


def main() -> None:
    """Plans, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    given = {k: int(v) for k, v in (word.split("=") for word in args.words)}
    training = workloads.training("gpt", **{**_OPTIONS, **given})
    state = training.create_state(jax.random.key(0))
    batch = next(training.batches(seed=0))
    step, arguments = training.step, (state, batch)
    analysis, cluster = analyse(step, arguments), mixed()
    ours = plan_analysis(analysis, cluster, PlanOptions(seconds=5.0))
    counts = tuple(r.microbatches for r in ours.replicas)
    evens = even_plans(analysis, cluster)
    best_s = min(evens.values())
    same = sum(counts) // 2
    even = planned(analysis, cluster, (same, sum(counts) - same))
    turn_s = turns(analysis, cluster, counts)
    factor = _STEP_S / even.predicted.step_s
    ran = {
        name: measured(step, analysis, arguments, plan, turn_s * factor, args.steps)
        for name, plan in (("even", even), ("ours", ours))
    }
    print(
        json.dumps(
            {
                "shares": counts,
                "mesh": ours.mesh["axes"],
                "ours_predicted_s": ours.predicted.step_s,
                "even_predicted_s": {k: round(v, 5) for k, v in evens.items()},
                "predicted_ratio": round(best_s / ours.predicted.step_s, 3),
                "same_number_ratio": round(
                    even.predicted.step_s / ours.predicted.step_s, 3
                ),
                "ratio_as_it_ran": round(ran["even"] / ran["ours"], 3),
                "ran_s": {k: round(v, 2) for k, v in ran.items()},
            }
        )
    )


def planned(
    analysis: Analysis, cluster: autopar.Cluster, counts: tuple[int, ...]
) -> autopar.Plan:
    """The plan with these shares."""
    asked = PlanOptions(seconds=5.0, microbatches=counts)
    return plan_analysis(analysis, cluster, asked)


def even_plans(analysis: Analysis, cluster: autopar.Cluster) -> dict[str, float]:
    """Predicted seconds of each even way."""
    slow = cluster.groups[1]
    (level,) = slow.levels
    larger = dataclasses.replace(level, size=2 * level.size)
    alike = autopar.Cluster(device=slow.device, levels=(larger,))
    auto = PlanOptions(seconds=5.0, microbatches="auto")
    found = {"one mesh": plan_analysis(analysis, alike, auto).predicted.step_s}
    each = 1
    while 2 * each <= _MOST:
        try:
            plan = planned(analysis, cluster, (each, each))
        except PlanError:
            break
        found[f"{each} + {each}"] = plan.predicted.step_s
        each *= 2
    return found


def turns(
    analysis: Analysis, cluster: autopar.Cluster, counts: tuple[int, ...]
) -> np.ndarray:
    """Seconds of one microbatch on each replica: the slope of the predictions."""
    more, less = max(counts), min(counts)
    plans = [planned(analysis, cluster, c) for c in ((more, less), (less, more))]
    first, second = ([r.step_s for r in plan.replicas] for plan in plans)
    return np.abs(np.subtract(first, second)) / (more - less)


def measured(
    step, analysis: Analysis, arguments, plan, turn_s: np.ndarray, steps: int
) -> float:
    """Seconds of a step on devices that wait in each microbatch."""
    made = planned_step(
        analysis, plan, device_mesh(plan), donate=False, wait=waiting(turn_s)
    )
    return statistics.median(times(step, made, arguments, steps))


def waiting(turn_s: np.ndarray):
    """Lets every device of a replica wait, before each of its microbatches."""

    def sleep(position, number):
        time.sleep(turn_s[int(position)])
        return np.asarray(number)

    def wait(position, number):
        mesh, spec = jax.sharding.get_abstract_mesh(), PartitionSpec()
        result = jax.ShapeDtypeStruct((), np.int32)
        return jax.shard_map(
            lambda p, n: jax.pure_callback(sleep, result, p, n),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            axis_names=automatic_axes(mesh),
            check_vma=False,
        )(position, number)

    return wait


def times(step, made: PlannedStep, arguments, steps: int) -> list[float]:
    """Seconds of steps, one by one; the first compiles and does not count."""
    flat = opened(step, arguments).arrays
    placed = [
        jax.device_put(x, s) for x, s in zip(flat, made.in_shardings, strict=True)
    ]
    out: list[float] = []
    for number in range(steps + 1):
        begin = time.perf_counter()
        jax.block_until_ready(made.function(*placed))
        if number:
            out.append(time.perf_counter() - begin)
    return out


if __name__ == "__main__":
    main()
