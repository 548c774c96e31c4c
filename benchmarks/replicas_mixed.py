"""Replicas on devices of two speeds: planned shares compared with equal shares.

    python benchmarks/replicas_mixed.py [--steps 3] [layers=4 d_model=128 ...]

The GPT example is planned on 8 simulated devices, 4 of which are described as half as
fast as the others. One plan has replicas with shares that the planner chooses. The
other is the best equal division: replicas with equally many microbatches (1, 2 or 4),
or one mesh of all devices at the speed of the slow devices. All plans have one mesh
axis within a replica. Planned and best equal replicas run on devices that wait, in each
microbatch, for the predicted seconds times a factor. Prints a JSON line: the predicted
seconds, the ratios of equal to planned, and the measured ratio of the replicas.
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
from pipeline_mixed import mixed, times

import autopar
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.layouts import automatic_axes

_OPTIONS = {"layers": 4, "d_model": 128, "seq": 64, "batch": 96}
# Seconds of a step with equal shares. They are so many that the computing time of two
# cores does not matter.
_STEP_S = 8.0
# The most microbatches of a replica in the equal division.
_MOST = 8
# All plans have one mesh axis in a replica, and the same time limit.
_LIMITS = PlanOptions(seconds=2.0, max_axes=1)


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
    ours = plan_analysis(analysis, cluster, _LIMITS)
    alike_s = one_mesh(analysis, cluster).predicted.step_s
    evens = even_plans(analysis, cluster)
    even = min(evens, key=lambda plan: plan.predicted.step_s)
    even_s = {shares(plan): round(plan.predicted.step_s, 5) for plan in evens}
    factor = _STEP_S / even.predicted.step_s
    ran = {
        name: measured(step, analysis, arguments, plan, factor, args.steps)
        for name, plan in (("even", even), ("ours", ours))
    }
    print(
        json.dumps(
            {
                "shares": shares(ours),
                "ours_predicted_s": round(ours.predicted.step_s, 5),
                "even_predicted_s": even_s | {"one mesh": round(alike_s, 5)},
                "predicted_ratio": round(
                    min(alike_s, *even_s.values()) / ours.predicted.step_s, 3
                ),
                "predicted_ratio_of_replicas": round(
                    even.predicted.step_s / ours.predicted.step_s, 3
                ),
                "ratio_as_it_ran": round(ran["even"] / ran["ours"], 3),
                "ran_s": {k: round(v, 2) for k, v in ran.items()},
            }
        )
    )


def shares(plan: autopar.Plan) -> str:
    """The microbatches of each replica, such as ``2 + 1``."""
    return " + ".join(str(r.microbatches) for r in plan.replicas)


def one_mesh(analysis: Analysis, cluster: autopar.Cluster) -> autopar.Plan:
    """The best plan without replicas, as if all devices were slow."""
    slow = cluster.groups[1]
    (level,) = slow.levels
    larger = dataclasses.replace(level, size=2 * level.size)
    alike = autopar.Cluster(device=slow.device, levels=(larger,))
    auto = dataclasses.replace(_LIMITS, microbatches="auto")
    return plan_analysis(analysis, alike, auto)


def even_plans(analysis: Analysis, cluster: autopar.Cluster) -> list[autopar.Plan]:
    """Plans of replicas with equally many microbatches."""
    found: list[autopar.Plan] = []
    each = 1
    while 2 * each <= _MOST:
        asked = dataclasses.replace(_LIMITS, microbatches=(each, each))
        try:
            found.append(plan_analysis(analysis, cluster, asked))
        except PlanError:
            break
        each *= 2
    return found


def measured(
    step, analysis: Analysis, arguments, plan, factor: float, steps: int
) -> float:
    """Seconds of a step on devices that wait in each microbatch."""
    turn_s = [factor * r.step_s / r.microbatches for r in plan.replicas]
    made = planned_step(
        analysis, plan, device_mesh(plan), donate=False, wait=waiting(turn_s)
    )
    return statistics.median(times(step, made, arguments, steps))


def waiting(turn_s: list[float]):
    """Makes every device of a replica wait before each of its microbatches."""

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


if __name__ == "__main__":
    main()
