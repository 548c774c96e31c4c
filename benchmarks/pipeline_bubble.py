"""Fraction of a step in which pipeline stages wait, predicted and measured.

    python benchmarks/pipeline_bubble.py [--stages 4] [--microbatches 16] [--unit 0.03]

Two cores cannot compute four stages at once. Therefore every task of a small model
waits for a fixed time: a forward pass one unit, and a backward pass two units. Under
zero-bubble schedules, the gradients of inputs and those of weights take one unit each.
Under interleaved schedules, each of two chunks takes half. Prints a JSON line for each
schedule: the fraction that the schedule predicts, the fraction that the trace of tasks
shows, both in percent, and the largest number of live activations on each stage.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("NPROC", "16")  # one thread for each task that waits
_STAGES = 4
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_force_host_platform_device_count={2 * _STAGES}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from task_times import Ran, Recorder  # noqa: E402

import autopar  # noqa: E402
from autopar.planner.stages.entry import cut_as  # noqa: E402
from autopar.runtime.stages.planned import pipelined_step  # noqa: E402
from autopar.steps.analysis import analyse  # noqa: E402
from autopar_passes.stages.cut import Phase, TaskKey  # noqa: E402
from autopar_solver import (  # noqa: E402
    Schedule,
    ScheduleKind,
    equal_parts,
    make_table,
    play,
)

# XLA runs programs with fewer than 1,000 operations at once, in the thread that issues
# them.
WIDTH, LAYERS = 64, 8
SCHEDULES = (
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.ONE_F_ONE_B),
    Schedule(ScheduleKind.INTERLEAVED, 2),
    Schedule(ScheduleKind.ZERO_BUBBLE),
)


def loss(params, batch):
    """Mean square error of a chain of products."""
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def step(params, batch):
    """One step of gradient descent."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int):
    """Weights, and a batch with this number of rows."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 3 for k in keys[:LAYERS]]
    x, y = (jax.random.normal(k, (rows, WIDTH)) for k in keys[LAYERS:])
    return params, {"x": x, "y": y}


def main() -> None:
    """Runs each schedule once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=_STAGES)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.03)
    args = parser.parse_args()
    for schedule in SCHEDULES:
        row = measured(schedule, args.stages, args.microbatches, args.unit)
        print(json.dumps(row), flush=True)


def measured(
    schedule: Schedule, stages: int, microbatches: int, unit: float
) -> dict[str, object]:
    """The figures of one schedule, predicted and measured."""
    table = make_table(schedule, stages, microbatches)
    paper = play(table, equal_parts(table, 1.0, 2.0, 1.0))
    params, batch = arguments(2 * microbatches)
    plan = autopar.plan(
        step,
        params,
        batch,
        cluster=autopar.Cluster.local(stages),
        stages=stages,
        microbatches=microbatches,
        schedule=schedule.kind.value,
    )
    analysis = analyse(step, (params, batch))
    units = {
        Phase.FORWARD: 1.0,
        Phase.BACKWARD: 2.0,
        Phase.BACKWARD_INPUT: 1.0,
        Phase.BACKWARD_WEIGHT: 1.0,
        Phase.UPDATE: 0.0,
    }

    def wait_s(key: TaskKey) -> float:
        return units[key.phase] * unit / schedule.chunks

    made = pipelined_step(
        analysis,
        cut_as(analysis, plan),
        plan,
        jax.devices(),
        donate=True,
        wait_s=wait_s,
    )
    flat = [*params, batch["x"], batch["y"]]
    placed = [
        jax.device_put(x, s) for x, s in zip(flat, made.in_shardings, strict=True)
    ]
    placed[:LAYERS] = made.function(*placed)[:LAYERS]  # compiles
    jax.block_until_ready(placed)
    made.pipeline.recorder = Recorder()
    out = made.function(*placed)
    ran = made.pipeline.recorder.finished()
    jax.block_until_ready(out)
    return {
        "schedule": schedule.name,
        "stages": stages,
        "microbatches": microbatches,
        "bubble_on_paper_percent": round(100 * float(np.mean(paper.bubble)), 2),
        "bubble_as_it_ran_percent": round(100 * waited(ran, unit, schedule), 2),
        "alive": [alive(ran, s) for s in range(stages)],
        "alive_on_paper": paper.peak_microbatches.tolist(),
    }


def waited(ran: list[Ran], unit: float, schedule: Schedule) -> float:
    """The fraction of the time in which a stage has no task, averaged over all stages.

    The time goes from the begin of the first task to the end of the last one, without
    the update.
    """
    tasks = [r for r in ran if r.key.phase is not Phase.UPDATE]
    whole = max(r.end_s for r in tasks) - min(r.begin_s for r in tasks)
    by_stage: dict[int, float] = {}
    for r in tasks:
        by_stage[r.key.stage] = by_stage.get(r.key.stage, 0.0) + r.end_s - r.begin_s
    return float(np.mean([1 - busy / whole for busy in by_stage.values()]))


def alive(ran: list[Ran], stage: int) -> int:
    """The most microbatches of a stage whose forward pass has run and whose backward
    pass has not.
    """
    ends = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
    own = [r for r in ran if r.key.stage == stage]
    change = [(r.begin_s, 1) for r in own if r.key.phase is Phase.FORWARD]
    change += [(r.end_s, -1) for r in own if r.key.phase in ends]
    most = now = 0
    for _, by in sorted(change):
        now += by
        most = max(most, now)
    return most


if __name__ == "__main__":
    main()
