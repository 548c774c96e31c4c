"""Pipelines on devices of two speeds: planned stages compared with equal stages.

    python benchmarks/pipeline_mixed.py [--microbatches 16] [layers=12 d_model=256 ...]

The GPT example is planned on 8 simulated devices, 4 of which are described as half as
fast as the others. It is planned with ``stages="auto"``, and with two stages of equally
many layers under every schedule. Both plans run on devices that wait for the predicted
time of each task, times a factor. Prints a JSON line: the predicted seconds, the ratio
of equal to planned stages, and the measured ratio.
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
import workloads

import autopar
from autopar.planner.options import PlanOptions
from autopar.planner.stages.entry import cut_as, plan_wanted
from autopar.planner.stages.plan import SCHEDULES, layers_of
from autopar.planner.stages.staged import StageSite, WantedPipeline
from autopar.plans import PipelineData, Plan
from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.planned import pipelined_step
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.program.trace import open_arguments
from autopar_passes.stages.cut import Phase, TaskKey

_OPTIONS = {"layers": 12, "d_model": 256, "seq": 64, "batch": 32}
# Seconds of a step. They are so many that the computing time of two cores does not
# matter.
_STEP_S = 8.0


def main() -> None:
    """Plans, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    given = {k: int(v) for k, v in (word.split("=") for word in args.words)}
    training = workloads.training("gpt", **{**_OPTIONS, **given})
    state = training.create_state(jax.random.key(0))
    batch = next(training.batches(seed=0))
    step, arguments = training.step, (state, batch)
    analysis = analyse(step, arguments)
    cluster = mixed()
    options = PlanOptions(stages="auto", microbatches=args.microbatches, seconds=5.0)
    ours = autopar.plan(
        step,
        *arguments,
        cluster=cluster,
        stages="auto",
        microbatches=args.microbatches,
        seconds=5.0,
    )
    evens = [
        even(analysis, cluster, options, args.microbatches, schedule)
        for schedule in SCHEDULES
    ]
    best = min(evens, key=lambda plan: plan.predicted.step_s)
    factor = _STEP_S / best.predicted.step_s
    ran = {
        name: measured(step, analysis, arguments, plan, factor, args.steps)
        for name, plan in (("ours", ours), ("even", best))
    }
    print(
        json.dumps(
            {
                "ours": described(ours),
                "even": described(best),
                "ours_predicted_s": ours.predicted.step_s,
                "even_predicted_s": best.predicted.step_s,
                "predicted_ratio": round(
                    best.predicted.step_s / ours.predicted.step_s, 3
                ),
                "ratio_as_it_ran": round(ran["even"] / ran["ours"], 3),
            }
        )
    )


def mixed() -> autopar.Cluster:
    """A cluster of four devices, and four devices of half the speed."""
    fast = autopar.Cluster.local(4)
    known = fast.device
    slow = dataclasses.replace(
        known,
        name="half as fast",
        peak_flops_per_s=tuple((n, v / 2) for n, v in known.peak_flops_per_s),
        memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s / 2,
        vector_flops_per_s=known.vector_flops_per_s / 2,
        kernel_latency_s=2 * known.kernel_latency_s,
    )
    other = dataclasses.replace(fast, device=slow)
    return autopar.Cluster(groups=(fast, other), between=fast.levels[-1].link)


def even(
    analysis: Analysis,
    cluster: autopar.Cluster,
    options: PlanOptions,
    microbatches: int,
    schedule,
) -> Plan:
    """Two stages, one on each kind of device, with as many layers in each part."""
    layers = layers_of(analysis, cluster)
    parts = 2 * schedule.chunks
    cuts = tuple(round(k * layers.count / parts) for k in range(parts))
    first, second = cluster.groups
    wanted = WantedPipeline(
        layers=tuple(layers.starts),
        parts=cuts,
        schedule=schedule,
        sites=(
            StageSite(devices=(0, 1, 2, 3), cluster=first),
            StageSite(devices=(4, 5, 6, 7), cluster=second),
        ),
    )
    return plan_wanted(analysis, cluster, options, wanted, microbatches)


def described(plan: Plan) -> str:
    """A short text about the stages of a plan."""
    data = plan.pipeline
    if data is None:
        return f"one stage on {len(plan.stage.devices)} devices"
    counts = [len(stage.devices) for stage in plan.stages]
    return f"{plan.schedule}, parts from layers {data.parts}, devices {counts}"


def measured(
    step, analysis: Analysis, arguments, plan: Plan, factor: float, steps: int
) -> float:
    """Seconds of a step on devices that wait, without the update."""
    assert plan.pipeline is not None
    made = pipelined_step(
        analysis,
        cut_as(analysis, plan),
        plan,
        jax.devices(),
        donate=False,
        wait_s=lambda key: factor * predicted_s(plan.pipeline, key),
    )
    return statistics.median(times(step, made, arguments, steps))


def times(step, made: PlannedStep, arguments, steps: int) -> list[float]:
    """Seconds of each step; the first step compiles and is left out."""
    flat = open_arguments(step, arguments).arrays
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


def predicted_s(data: PipelineData | None, key: TaskKey) -> float:
    """The predicted seconds of a task."""
    assert data is not None
    match key.phase:
        case Phase.FORWARD:
            return data.forward_s[key.number]
        case Phase.BACKWARD | Phase.BACKWARD_INPUT:
            return data.backward_s[key.number]
        case Phase.BACKWARD_WEIGHT:
            return data.weight_s[key.number]
        case _:
            return 0.0


if __name__ == "__main__":
    main()
