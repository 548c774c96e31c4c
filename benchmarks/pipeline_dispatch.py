"""Time that the host takes to issue the tasks of a pipeline.

    python benchmarks/pipeline_dispatch.py [--stages 2] [--microbatches 8] [--steps 20]

Plans the GPT example in stages on simulated devices. Prints a JSON line: microseconds
to issue a task where programs are empty (they take and return arrays of the same shapes
and compute nothing), all stages together, and the share of the real step that this is,
in percent. Medians, and the least of all steps: what else runs on the machine adds to a
step, and takes nothing off.
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
import jax.numpy as jnp
import workloads

import autopar
from autopar_passes.stages.cut import Phase


def main() -> None:
    """Times real and empty steps in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    training = workloads.training("gpt", batch=32)
    state = training.create_state(jax.random.key(0))
    batch = next(training.batches(seed=0))
    step = autopar.parallelize(
        training.step,
        cluster=autopar.Cluster.local(args.devices),
        stages=args.stages,
        microbatches=args.microbatches,
    )
    state, loss = step(state, batch)
    jax.block_until_ready(loss)
    planned = step.prepare(state, batch)
    pipeline = planned.pipeline
    real = dict(pipeline.calls)
    empty = {
        key: call if key.phase is Phase.UPDATE else emptied(call)
        for key, call in real.items()
    }
    flat = jax.tree.leaves(state)
    seconds: dict[str, list[float]] = {"real": [], "empty": []}
    for number in range(2 * (args.steps + 1)):
        name, calls = (("real", real), ("empty", empty))[number % 2]
        pipeline.calls.update(calls)
        begin = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        if number > 1:
            whole_s = time.perf_counter() - begin
            seconds[name].append(whole_s if name == "real" else pipeline.issuing_s)
    tasks = len(pipeline.order)
    real_s, empty_s = (statistics.median(seconds[k]) for k in ("real", "empty"))
    print(
        json.dumps(
            {
                "stages": args.stages,
                "devices": args.devices,
                "microbatches": args.microbatches,
                "arrays": len(flat),
                "tasks": tasks,
                "empty_us_a_task": round(1e6 * empty_s / tasks, 1),
                "least_us_a_task": round(1e6 * min(seconds["empty"]) / tasks, 1),
                "real_step_ms": round(1e3 * real_s, 2),
                "share_percent": round(100 * empty_s / real_s, 2),
            }
        )
    )


def emptied(call):
    """A task with the same arguments and results that computes nothing."""
    code = call.code
    made = jax.eval_shape(code.function, *code.in_structs)
    shardings = code.function.lower(*code.in_structs).compile().output_shardings
    zeros = jax.jit(
        lambda: [jnp.zeros(x.shape, x.dtype) for x in made], out_shardings=shardings
    )()
    jax.block_until_ready(zeros)
    kept = len(zeros) - len(code.accumulated)
    one = jax.jit(
        lambda *arguments: [arguments[0].ravel()[:1]] if arguments else [],
        keep_unused=True,
    )

    def function(*arguments):
        one(*arguments)
        # What leaves the step is consumed by the next one.
        fresh = [jnp.copy(x) if x.ndim == 0 else x for x in zeros[:kept]]
        return [*fresh, *arguments[len(code.inputs) :]]

    return dataclasses.replace(call, code=dataclasses.replace(code, function=function))


if __name__ == "__main__":
    main()
