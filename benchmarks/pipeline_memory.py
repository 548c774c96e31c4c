"""Memory of a GPT that fits only in pipeline stages, predicted and measured.

    python benchmarks/pipeline_memory.py [--share 0.7] [layers=8 d_model=128 ...]

The benchmark finds the least memory per device with which a plan of one stage fits 8
simulated devices without microbatches, and takes a fraction of it as the limit. Then it
plans for this limit (``stages="auto"``, or a given number of stages), runs two steps,
and prints a JSON line: the limit, the predicted memory of plans with one and with
several stages, and the largest measured memory of a device: the arrays that are alive
after a task, plus the task's temporary buffers according to the compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
from collections import Counter

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import workloads

import autopar
from autopar.errors import InfeasibleError
from autopar.runtime.stages.pipeline import StagePipeline

_OPTIONS = {"layers": 8, "d_model": 128, "seq": 128, "batch": 32}


def main() -> None:
    """Plans, runs and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--stages", default="auto")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    given = {k: int(v) for k, v in (word.split("=") for word in args.words)}
    training = workloads.training("gpt", **{**_OPTIONS, **given})
    state = training.create_state(jax.random.key(0))
    batch = next(training.batches(seed=0))
    local = autopar.Cluster.local(8)
    least = least_bytes(training.step, state, batch, local)
    limit = int(args.share * least)
    tight = with_memory(local, limit)
    out: dict[str, object] = {"least_of_one_stage": least, "limit": limit}
    for count in (1, "auto"):
        try:
            plan = autopar.plan(
                training.step, state, batch, cluster=tight, microbatches=count
            )
            out[f"one_stage_of_{count}"] = plan.predicted.peak_memory_bytes
        except InfeasibleError:
            out[f"one_stage_of_{count}"] = "does not fit"
    stages = args.stages if args.stages == "auto" else int(args.stages)
    step = autopar.parallelize(
        training.step, cluster=tight, stages=stages, microbatches=args.microbatches
    )
    state, _ = step(state, batch)
    plan = step.plan
    out |= {
        "plan": f"{len(plan.stages)} stages, {plan.schedule}, "
        f"{plan.microbatches} microbatches",
        "predicted": plan.predicted.peak_memory_bytes,
    }
    pipeline = getattr(step.prepare(state, batch), "pipeline", None)
    if pipeline is not None:
        state, loss = measured(pipeline, lambda: step(state, batch), out)
        out["loss"] = float(loss)
        out["fits"] = out["held"] <= limit
    print(json.dumps(out))


def least_bytes(step, state, batch, cluster) -> float:
    """The least memory with which a plan of one stage without microbatches is found."""
    plan = autopar.plan(step, state, batch, cluster=cluster)
    fits = plan.predicted.peak_memory_bytes
    low, high = 0.0, fits
    while high - low > 0.02 * fits:
        middle = (low + high) / 2
        try:
            autopar.plan(
                step, state, batch, cluster=with_memory(cluster, int(middle)), seconds=3
            )
            high = middle
        except InfeasibleError:
            low = middle
    return high


def with_memory(cluster: autopar.Cluster, nbytes: int) -> autopar.Cluster:
    """The cluster with this much memory on each device."""
    device = dataclasses.replace(cluster.device, memory_bytes=nbytes)
    return dataclasses.replace(cluster, device=device)


def measured(pipeline: StagePipeline, run, out: dict[str, object]):
    """Runs a step, and measures the live arrays after each task."""
    temporaries = {
        key: call.code.function.lower(*call.code.in_structs)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for key, call in pipeline.calls.items()
    }
    most: Counter[int] = Counter()
    devices = {
        k: [d.id for d in stage.mesh.devices.flat]
        for k, stage in enumerate(pipeline.stages)
    }

    def watching(key, function):
        def call(*arguments):
            made = function(*arguments)
            jax.block_until_ready(made)
            held = alive()
            for device in devices[key.stage]:
                most[device] = max(most[device], held[device] + temporaries[key])
            return made

        return call

    calls = dict(pipeline.calls)
    for key, call in calls.items():
        code = dataclasses.replace(
            call.code, function=watching(key, call.code.function)
        )
        pipeline.calls[key] = dataclasses.replace(call, code=code)
    result = run()
    pipeline.calls.update(calls)
    out["held"] = max(most.values())
    out["held_by_device"] = [most[d] for d in sorted(most)]
    return result


def alive() -> Counter[int]:
    """Bytes of all arrays on each device."""
    found: Counter[int] = Counter()
    for array in jax.live_arrays():
        # The thread of another stage may be donating the array at this moment.
        with contextlib.suppress(RuntimeError):
            shape = array.sharding.shard_shape(array.shape)
            nbytes = math.prod(shape) * array.dtype.itemsize
            for device in array.sharding.addressable_devices:
                found[device.id] += nbytes
    return found


if __name__ == "__main__":
    main()
