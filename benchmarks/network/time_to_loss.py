"""Seconds of training over real links until the final loss of the dense run.

    python benchmarks/network/time_to_loss.py --rates 100 1000 --steps 300 \\
        --compression dense int8 --seeds 0 1 2 --out runs.json

For every rate and seed, the configurations of ``--compression`` train the language
model on four hosts. They run a few steps each in turns, so that other load of the
machine affects all of them. "dense" is data parallel with dense gradients. "auto" or
the name of a codec has the same layouts, with ``compression=``. With "plan:auto" and
"plan:none" the planner also chooses the layouts for these links. "hand:int8" is data
parallelism with int8, written by hand (`handwritten.py`). ``--profile`` measures hosts
and links at each rate, as ``autopar profile --distributed`` does, and plans with the
result. The clock runs only during steps, not while programs are compiled, batches are
made, or evaluation losses are measured. The seconds of a step are those of the slowest
process.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import bed
import clusters
import handwritten
import jax
import language_model
import numpy as np
import summaries
import worker
from jax.sharding import PartitionSpec

import autopar
from autopar.profiling import profile

DENSE = "dense"
HANDWRITTEN = "hand:int8"
PLANNED = "plan:"
WARM_STEPS = 2
DECAY_STEPS = 100  # the minimum, so that a short trial run is possible
TIMEOUT_S = 3600.0


@dataclasses.dataclass(slots=True)
class Run:
    """A training in one configuration.

    Attributes:
      compression: configuration, as on the command line.
      step: the planned step.
      state: training state, as global arrays.
      sent: bytes that this process sends in one step.
      done: steps taken.
      step_s: seconds of each step.
      cpu_s: CPU seconds of this process in each step.
      losses: training loss of each step.
      evaluations: (step, evaluation loss).
    """

    compression: str
    step: Any
    state: Any
    sent: worker.Traffic
    done: int = 0
    step_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Evaluator:
    """The evaluation loss of a state, computed by all processes together."""

    def __init__(self, workload: language_model.Workload, rows: int = 256) -> None:
        """Distributes the held-out windows over the processes."""
        mesh = jax.make_mesh(
            (jax.device_count(),), ("all",), (jax.sharding.AxisType.Auto,)
        )
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        data = language_model.evaluation_batch(workload.sizes, rows)
        part = rows // worker.count()
        mine = slice(worker.rank() * part, (worker.rank() + 1) * part)
        self._data = {
            name: jax.make_array_from_process_local_data(split, array[mine])
            for name, array in data.items()
        }
        self._whole = whole
        self._loss = jax.jit(workload.eval_loss, out_shardings=whole)

    def __call__(self, state: Any) -> float:
        """The loss of the parameters of a state, which are gathered first if they are
        sharded.
        """
        params = jax.device_put(state.params, self._whole)
        return float(self._loss(params, self._data))


def data_parallel_plan(workload: language_model.Workload) -> autopar.Plan:
    """A data-parallel plan, chosen without regard to the links.

    For links as slow as these and a model as small as this, the planner may find that
    communication does not pay, so that every host computes the whole batch. Therefore
    this plan is made for links that cost almost nothing, and all state is pinned to be
    whole on every host.
    """
    fast = autopar.Cluster.parse(
        f"{worker.count()}x1:cpu,network=1000Gb/s,network_latency=1us"
    )
    pins = {
        "state/params/*": PartitionSpec(),
        "state/opt_state/*": PartitionSpec(),
        "data/*": PartitionSpec("data"),
    }
    state = jax.eval_shape(workload.create)
    data = jax.eval_shape(lambda: workload.batch(0))
    return autopar.plan(
        workload.step,
        state,
        data,
        cluster=fast,
        pins=pins,
        seconds=None,
        stages=1,
        microbatches=1,
        remat=0,
    )


def parallel_step(
    workload: language_model.Workload, name: str, cluster: autopar.Cluster
) -> Any:
    """The step of one configuration; see the module."""
    if name == HANDWRITTEN:
        return handwritten.HandwrittenStep(workload)
    free, _, mode = name.rpartition(PLANNED)
    if free or name.startswith(PLANNED):
        return autopar.parallelize(workload.step, cluster=cluster, compression=mode)
    state = jax.eval_shape(workload.create)
    data = jax.eval_shape(lambda: workload.batch(0))
    plan = autopar.plan(
        workload.step,
        state,
        data,
        cluster=cluster,
        compression="none" if name == DENSE else name,
        layouts=data_parallel_plan(workload),
    )
    return autopar.parallelize(workload.step, plan=plan)


def start_run(
    workload: language_model.Workload, compression: str, step: Any, idle: Any
) -> Run:
    """Compiles, counts the bytes of a step, and starts again from the initial state."""
    example = jax.eval_shape(lambda: workload.batch(0))
    state = step.init(workload.create, batch=example)
    for k in range(WARM_STEPS):
        state, metrics = step(state, rows(workload, k))
        jax.block_until_ready((state, metrics))
    data = rows(workload, WARM_STEPS)
    sent, _ = worker.measure(lambda: jax.block_until_ready(step(state, data)), idle)
    return Run(compression, step, step.init(workload.create, batch=example), sent)


def rows(workload: language_model.Workload, step: int) -> Any:
    """This process's rows of the batch of a step."""
    return workload.batch(step, worker.rank(), worker.count())


def advance(run: Run, workload: language_model.Workload, steps: int) -> None:
    """Runs some steps, and times each of them."""
    for _ in range(steps):
        data = rows(workload, run.done)
        worker.barrier()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        run.state, metrics = run.step(run.state, data)
        jax.block_until_ready((run.state, metrics))
        run.step_s.append(time.perf_counter() - started_s)
        run.cpu_s.append(time.process_time() - started_cpu_s)
        run.losses.append(float(metrics["loss"]))
        run.done += 1


def record(run: Run, rate_mbit: float, seed: int) -> dict[str, Any]:
    """The results of a run, as JSON."""
    plan = run.step.plan
    sent = run.sent
    planned: dict[str, Any] = {}
    if plan is not None:
        planned = {
            "predicted_step_s": plan.predicted.step_s,
            "predicted_bytes": plan.predicted.communication_bytes,
            "reason": plan.compression.reason,
            "codecs": dict(collections.Counter(g.codec for g in plan.gradients)),
            "mesh": plan.mesh,
            "table": str(plan) if worker.rank() == 0 else "",
        }
    return {
        "rate_mbit": rate_mbit,
        "seed": seed,
        "compression": run.compression,
        "step_s": run.step_s,
        "cpu_s": run.cpu_s,
        "losses": run.losses,
        "evaluations": run.evaluations,
        "sent_bytes": sent.sent_bytes,
        "data_bytes": sent.data_bytes,
        "wire_bytes": sent.wire_bytes,
        **planned,
    }


def measured(rate_mbit: float) -> autopar.Cluster:
    """Measures the hosts and links at a rate, in all processes together."""
    worker.set_rate(rate_mbit or None)
    settings = dataclasses.replace(profile.CPU_SETTINGS, dtypes=("float32",), rounds=3)
    found = profile.run(settings=settings)
    worker.say(str(found))
    return found.cluster


def train(options: argparse.Namespace, rate_mbit: float, seed: int) -> None:
    """Trains all configurations at one rate with one seed, in turns."""
    sizes = language_model.Sizes(
        batch=options.batch, decay_steps=max(options.steps, DECAY_STEPS)
    )
    workload = language_model.build(seed, sizes)
    if options.profile:
        cluster = measured(rate_mbit)
    else:
        fits = clusters.load(options.links)
        cluster = clusters.described(rate_mbit or None, worker.count(), fits)
    evaluate = Evaluator(workload)
    worker.set_rate(None)  # Work that is not timed runs without a limit of the rate.
    idle = worker.background()
    runs: list[Run] = []
    for name in options.compression:
        step = parallel_step(workload, name, cluster)
        runs.append(start_run(workload, name, step, idle))
        worker.say(f"{rate_mbit:g} Mbit/s, seed {seed}: compiled {name}")
    for turn, start in enumerate(range(0, options.steps, options.turn)):
        steps = min(options.turn, options.steps - start)
        worker.set_rate(rate_mbit or None)
        order = runs[turn % len(runs) :] + runs[: turn % len(runs)]
        for run in order:
            advance(run, workload, steps)
        worker.set_rate(None)
        for run in runs:
            run.evaluations.append((run.done, evaluate(run.state)))
        worker.say(f"step {runs[0].done}: {_progress(runs)}")
    go_on(runs, workload, evaluate, rate_mbit, options)
    for run in runs:
        worker.report(record(run, rate_mbit, seed))


def go_on(
    runs: Sequence[Run],
    workload: language_model.Workload,
    evaluate: Evaluator,
    rate_mbit: float,
    options: argparse.Namespace,
) -> None:
    """Trains configurations further whose loss is above the dense run's last loss."""
    target = runs[0].evaluations[-1][1]
    for run in runs[1:]:
        most = run.done + options.further
        while run.done < most and summaries.reached(run.evaluations, target) is None:
            worker.set_rate(rate_mbit or None)
            advance(run, workload, min(options.turn, most - run.done))
            worker.set_rate(None)
            run.evaluations.append((run.done, evaluate(run.state)))
            worker.say(f"step {run.done}: {_progress([run])}")


def _progress(runs: Sequence[Run]) -> str:
    return ", ".join(
        f"{run.compression} {run.evaluations[-1][1]:.3f} "
        f"({1e3 * float(np.median(run.step_s)):.0f} ms)"
        for run in runs
    )


def inside(options: argparse.Namespace) -> None:
    """The work of every worker."""
    worker.start()
    for rate, seed in itertools.product(options.rates, options.seeds):
        train(options, rate, seed)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0],
                        help="Mbit/s; 0: unshaped")  # fmt: skip
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--further", type=int, default=0,
                        help="steps more for a configuration that has not reached "
                        "the dense run's last loss by then")  # fmt: skip
    parser.add_argument("--batch", type=int, default=language_model.Sizes().batch,
                        help="rows over all hosts")  # fmt: skip
    parser.add_argument("--turn", type=int, default=20,
                        help="steps of one configuration before the next one's, and "
                        "between evaluations")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--compression", nargs="+", default=[DENSE],
                        help="dense first, the measure of the others")  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--links", type=pathlib.Path,
                        help="a file of collectives.py, to plan with")  # fmt: skip
    parser.add_argument("--profile", action="store_true",
                        help="measure hosts and links, and plan with them")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds")
    parser.add_argument("--out", type=pathlib.Path, help="everything, as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compression[0] != DENSE:
        parser.error(f"--compression must begin with {DENSE}.")
    return options


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        inside(options)
        return 0
    results, code = bed.run_inside(__file__, options.hosts, options.timeout)
    records = summaries.merged(results)
    print(summaries.table(records))
    if options.out:
        found = {"records": records, "machine": clusters.machine()}
        options.out.write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    bed.exit_with(main)
