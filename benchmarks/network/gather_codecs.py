"""Codecs of gathers: bytes and seconds of an FSDP step over a slow link, and the loss.

    python benchmarks/network/gather_codecs.py --rates 1000 --steps 0
    python benchmarks/network/gather_codecs.py --rates --steps 2000 --batch 16 --add

A GPT and an LSTM with two layers learn the text of Python's own sources
(`language_model.py`). Parameters and optimizer state are sharded over all hosts by
pins. The ways are:

- ``free``: the fastest plan without codecs, in any layouts of the rest of the step;
- ``exact``: the layouts of ``int8``, with exact gathers and sums;
- ``gathers``: the same layouts, gathers as int8 (``gather_codecs=``) and exact sums;
- ``int8``: gathers and sums of gradients as int8 (``compression=``);
- ``auto``: both chosen by the planner within one error budget.

``--rates``: for each rate of the links between ``--hosts`` hosts (network namespaces
with one device each) in Mbit/s, the seconds of a step are measured, and the bytes that
hosts send. The rows have the plan's own predictions.

``--steps``: the held-out loss after so many steps, with as many simulated devices in
one process. Of the way ``exact``, all ``--seeds`` are trained, on one device, for the
spread of the loss; of the other ways the first ``--coded-seeds`` of them.

``--faster``: the predicted seconds of a step at these rates, for hosts whose devices
compute so many times as fast, without a run:

    python benchmarks/network/gather_codecs.py --rates 1000 --faster 1 4 16 \\
        --models gpt --ways exact int8 --batch 4 --add
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import bed
import clusters
import cut_codecs
import jax
import language_model
import worker
from jax.sharding import PartitionSpec

import autopar

MODELS = ("gpt", "lstm")
FREE, EXACT = "free", "exact"
# Way -> the codecs of gathers and of sums.
CODECS = {
    FREE: ("none", "none"),
    EXACT: ("none", "none"),
    "gathers": ("int8", "none"),
    "int8": ("int8", "int8"),
    "auto": ("auto", "auto"),
}
AXIS = "data"


def asked(way: str, cluster: autopar.Cluster) -> dict[str, Any]:
    """The options of a plan that shards the state."""
    gathers, sums = CODECS[way]
    return {
        "cluster": cluster,
        "axis_names": (AXIS,),
        "pins": {
            "state/params/*": PartitionSpec(AXIS),
            "state/opt_state/*/mu/*": PartitionSpec(AXIS),
            "state/opt_state/*/nu/*": PartitionSpec(AXIS),
            "data/*": PartitionSpec(AXIS),
        },
        "stages": 1,
        "microbatches": 1,
        "remat": 0,
        "seconds": 2.0,
        "gather_codecs": gathers,
        "compression": sums,
    }


def plan_of(workload: Any, options: dict[str, Any]) -> autopar.Plan:
    """The plan of a step."""
    args = (
        jax.eval_shape(workload.create),
        jax.eval_shape(lambda: workload.batch(0)),
    )
    return autopar.plan(workload.step, *args, **options)


def way_options(
    way: str, cluster: autopar.Cluster, layouts: autopar.Plan | None
) -> dict[str, Any]:
    """The options of a way.

    Args:
      way: the way.
      cluster: the hosts.
      layouts: a plan of the way ``int8``, for the ways that have its layouts.
    """
    options = asked(way, cluster)
    if way not in (EXACT, "gathers"):
        return options
    codecs = {k: options[k] for k in ("gather_codecs", "compression")}
    return {"cluster": cluster, "layouts": layouts, "stages": 1, **codecs}


def planned(workload: Any, way: str, cluster: autopar.Cluster) -> Any:
    """The step under the plan of a way."""
    layouts = None
    if way in (EXACT, "gathers"):
        layouts = plan_of(workload, asked("int8", cluster))
    return autopar.parallelize(workload.step, **way_options(way, cluster, layouts))


# Seconds and bytes on hosts.


def pace(options: argparse.Namespace, rate_mbit: float, idle: Any) -> None:
    """Measures the seconds and bytes of a step of each model and way at a rate."""
    for model in options.models:
        workload = cut_codecs.workload_of(model, options, 0)
        for way in options.ways:
            cluster = clusters.described(rate_mbit, options.hosts, ())
            step = planned(workload, way, cluster)
            state = cut_codecs.start(step, workload)
            worker.set_rate(rate_mbit)
            state, _, _ = cut_codecs.run(step, state, workload, 0, cut_codecs.WARM)
            times: list[float] = []
            work = functools.partial(cut_codecs.measured, step, state, workload, times)
            sent, _ = worker.measure(work, idle)
            worker.set_rate(None)
            seconds = statistics.median(times)
            worker.say(f"{rate_mbit:g} Mbit/s: {model} {way} {seconds}")
            predicted = step.plan.predicted
            worker.report(
                {
                    "kind": "seconds", "model": model, "way": way, "rate": rate_mbit,
                    "hosts": options.hosts, "step_s": seconds,
                    "bytes": sent.scaled(1 / len(times)).data_bytes,
                    "predicted_s": predicted.step_s,
                    "predicted_bytes": predicted.communication_bytes,
                    "scheme": step.plan.worth.scheme,
                    "gathers": sum(bool(g.codec) for g in step.plan.stage.gathers),
                    "decided": list(step.plan.decided),
                }
            )  # fmt: skip


def inside(options: argparse.Namespace) -> None:
    """The work of every worker."""
    worker.start()
    worker.set_rate(None)
    idle = worker.background()
    for rate in options.rates:
        pace(options, rate, idle)


def predicted_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The predicted seconds and bytes of a step, and the speedup over ``exact``."""
    rows: list[dict[str, Any]] = []
    for model in options.models:
        workload = cut_codecs.workload_of(model, options, 0)
        for rate, faster in itertools.product(options.rates, options.faster):
            cluster = clusters.described(rate, options.hosts, ())
            cluster = cut_codecs.with_faster_devices(cluster, faster)
            layouts: autopar.Plan | None = None
            for way in options.ways:
                if way in (EXACT, "gathers"):
                    layouts = layouts or plan_of(workload, asked("int8", cluster))
                plan = plan_of(workload, way_options(way, cluster, layouts))
                layouts = plan if way == "int8" else layouts
                rows.append(
                    {
                        "kind": "predicted", "model": model, "way": way, "rate": rate,
                        "hosts": options.hosts, "faster": faster,
                        "d_model": options.d_model, "batch": options.batch,
                        "seq": options.seq, "step_s": plan.predicted.step_s,
                        "compute_s": plan.predicted.compute_s,
                        "bytes": plan.predicted.communication_bytes,
                        "gathers": sum(bool(g.codec) for g in plan.stage.gathers),
                        "sums": len(plan.gradients), "scheme": plan.worth.scheme,
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


# Losses in one process.


def _trained(
    model: str, way: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    workload = cut_codecs.workload_of(model, options, seed)
    evaluate = jax.jit(workload.eval_loss)
    held_out = language_model.evaluation_batch(workload.sizes)
    row: dict[str, Any] = {
        "kind": "loss", "model": model, "way": way, "seed": seed,
        "steps": options.steps, "points": [],
    }  # fmt: skip
    if way in (FREE, EXACT):
        step: Callable[..., Any] = jax.jit(workload.step, donate_argnums=0)
        state = jax.jit(workload.create)()
    else:
        cluster = clusters.described(options.plan_rate, options.hosts, ())
        planned_step = planned(workload, way, cluster)
        step, state = planned_step, cut_codecs.start(planned_step, workload)
    for first in range(0, options.steps, options.turn):
        count = min(options.turn, options.steps - first)
        state, _, _ = cut_codecs.run(step, state, workload, first, count)
        params = jax.device_get(state.params)
        row["points"].append((first + count, float(evaluate(params, held_out))))
    if way not in (FREE, EXACT):
        plan = planned_step.plan
        row["gathers"] = sum(bool(g.codec) for g in plan.stage.gathers)
        row["scheme"] = plan.worth.scheme
    return row


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = cut_codecs.options_of(__doc__ or "", "gather_codecs.json")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--faster", type=float, nargs="+", help="only predictions")
    parser.set_defaults(
        rates=[1000.0], models=list(MODELS), ways=list(CODECS), d_model=384, batch=16,
        learning_rate=1e-3, plan_rate=1000.0,
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        inside(options)
        return 0
    if options.faster:
        jax.config.update("jax_platforms", "cpu")
        cut_codecs.save(options, predicted_rows(options))
        return 0
    code = cut_codecs.measure_on_hosts(__file__, options.hosts, options)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.hosts)
    if options.steps:
        cut_codecs.losses(options, _trained, EXACT)
    return code


if __name__ == "__main__":
    bed.exit_with(main)
