"""Codecs of stage cuts: bytes and seconds of a step over a slow link, and the loss.

    python benchmarks/network/cut_codecs.py --rates 100 --steps 0
    python benchmarks/network/cut_codecs.py --rates --steps 2000 --batch 16 --add

A GPT and an LSTM with two layers learn the text of Python's own sources
(`language_model.py`), in two pipeline stages of one layer each. A recommendation model
(`examples/recommendation.py`) learns the clicks of a planted teacher, with a batch of
as many rows as the others have characters. A way is ``none`` (all values are sent
exactly), ``auto`` or codecs as text (``cut_codecs=``).

``--rates``: two hosts, which are network namespaces, have one stage each. For each rate
of the link in Mbit/s, the seconds of a step are measured, and the bytes that hosts
send. Besides the plan's own prediction, the rows have the predicted seconds of hosts
whose devices compute ``--faster`` times as fast.

``--steps``: the held-out loss after so many steps, unshaped, with two simulated devices
of one process. It is the loss of a program without codecs. The row also has the mean
loss of the last ``--last`` training steps, with codecs. Clicks are drawn anew for each
step, so that this is the loss of data that the model has not seen. Of the way ``none``,
all ``--seeds`` are trained, on one device, for the spread of the loss; of the other
ways the first ``--coded-seeds`` of them.

``--compare N``: the ways with codecs are compared with exact training after every N
steps (``comparison=``), which makes codecs milder where they cost progress:

    python benchmarks/network/cut_codecs.py --rates --steps 2000 --batch 16 --add \\
        --compare 300 --models gpt lstm --ways int8 int4:block=64 \\
        eden:levels=32/eden:levels=6
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import bed
import clusters
import jax
import language_model
import lstm
import optax
import recommendation
import worker

import autopar
from autopar.reports.staged import bind_stages, links
from autopar.runtime.comparing import Comparison
from autopar.steps.analysis import analyse

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ("gpt", "lstm", "recommendation")
EXACT = "none"
WAYS = (EXACT, "auto", "int8", "eden:levels=32/eden:levels=6")
LAYERS, HOSTS = 2, 2
# Steps that are not measured, and steps that are.
WARM, MEASURED = 3, 12


# Rows of the largest table, number of tables, and dense features of a click.
ROWS, TABLES, DENSE = 4096, 8, 13
# Clicks of which the held-out loss is the mean; no training has this seed.
HELD_OUT, HELD_OUT_SEED = 16384, 1 << 20


def clicks_workload(options: argparse.Namespace, seed: int) -> Any:
    """The recommendation model, with the tower of each side on a stage of its own."""
    tables = tuple(max(ROWS >> t, 64) for t in range(TABLES))
    width = options.d_model
    net = recommendation.Recommender(
        sizes=tables, width=width, bottom=(2 * width,), top=(2 * width, 2 * width)
    )
    count = options.batch * options.seq
    sizes = language_model.Sizes(
        batch=count,
        learning_rate=options.learning_rate,
        decay_steps=max(options.steps, 400),
    )
    optimizer = optax.adam(language_model.schedule(sizes))

    def step(state: Any, data: Any) -> Any:
        state, loss = recommendation.train_step(state, data)
        return state, {"loss": loss}

    def batch(number: int, rank: int = 0, processes: int = 1) -> Any:
        own = (seed << 24) + number
        data = next(
            recommendation.example_data.click_batches(count, tables, DENSE, own)
        )
        rows = count // processes
        return jax.tree.map(lambda x: x[rank * rows : (rank + 1) * rows], data)

    def eval_loss(params: Any, data: Any) -> Any:
        logits = net.apply({"params": params}, data["dense"], data["ids"])
        return optax.sigmoid_binary_cross_entropy(logits, data["clicks"]).mean()

    def create() -> Any:
        key = jax.random.key(seed)
        return recommendation.create_state(key, net, optimizer, DENSE)

    return language_model.Workload(sizes, step, create, batch, eval_loss)


def held_out_batch(model: str, workload: Any) -> Any:
    """Data that no training sees, for the held-out loss."""
    if model != "recommendation":
        return language_model.evaluation_batch(workload.sizes)
    tables = tuple(max(ROWS >> t, 64) for t in range(TABLES))
    return next(
        recommendation.example_data.click_batches(
            HELD_OUT, tables, DENSE, HELD_OUT_SEED
        )
    )


def workload_of(model: str, options: argparse.Namespace, seed: int) -> Any:
    """The model, its data and its optimizer."""
    if model == "recommendation":
        return clicks_workload(options, seed)
    sizes = language_model.Sizes(
        layers=LAYERS,
        d_model=options.d_model,
        heads=4,
        seq=options.seq,
        batch=options.batch,
        learning_rate=options.learning_rate,
        decay_steps=max(options.steps, 400),
    )
    made = language_model.build(seed, sizes)
    if model == "gpt":
        return made
    net = lstm.CharLSTM(
        layers=LAYERS,
        d_model=options.d_model,
        vocab=language_model.VOCAB,
        dtype="float32",
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(language_model.schedule(sizes))
    )

    def create() -> Any:
        return lstm.create_state(jax.random.key(seed), net, optimizer)

    return made._replace(
        create=create,
        eval_loss=functools.partial(language_model.loss_of, net.apply),
    )


def staged(
    workload: Any,
    way: str,
    cluster: autopar.Cluster,
    options: argparse.Namespace,
    comparison: Comparison | None = None,
) -> Any:
    """The step in two stages."""
    return autopar.parallelize(
        workload.step,
        cluster=cluster,
        stages=HOSTS,
        schedule="1f1b",
        microbatches=options.microbatches,
        cut_codecs=way,
        cut_error_budget=options.budget if way == "auto" else None,
        comparison=comparison,
        seconds=2.0,
    )


def start(step: Any, workload: Any) -> Any:
    """The state of step 0."""
    example = jax.eval_shape(lambda: workload.batch(0))
    return step.init(workload.create, batch=example)


# Seconds and bytes on hosts.


def pace(options: argparse.Namespace, rate_mbit: float, idle: Any) -> None:
    """Measures the seconds and bytes of a step of each model and way at a rate."""
    for model in options.models:
        workload = workload_of(model, options, 0)
        for way in options.ways:
            cluster = clusters.described(rate_mbit, HOSTS, clusters.load(None))
            step = staged(workload, way, cluster, options)
            state = start(step, workload)
            worker.set_rate(rate_mbit)
            state, *_ = run(step, state, workload, 0, WARM)
            times: list[float] = []
            work = functools.partial(measured, step, state, workload, times)
            sent, _ = worker.measure(work, idle)
            worker.set_rate(None)
            data = step.plan.pipeline
            worker.say(
                f"{rate_mbit:g} Mbit/s: {model} {way} {statistics.median(times)}"
            )
            worker.report(
                {
                    "kind": "seconds",
                    "model": model,
                    "way": way,
                    "rate": rate_mbit,
                    "step_s": statistics.median(times),
                    "bytes": sent.scaled(1 / len(times)).data_bytes,
                    "predicted_s": step.plan.predicted.step_s,
                    "codecs": [data.activation_codecs, data.cotangent_codecs],
                    "decided": list(step.plan.decided),
                }
            )


def run(
    step: Any, state: Any, workload: Any, first: int, count: int
) -> tuple[Any, list[float], list[float]]:
    """Runs steps; returns the state, and the seconds and the loss of each."""
    times, found = list[float](), list[float]()
    for number in range(first, first + count):
        data = workload.batch(number, jax.process_index(), jax.process_count())
        if jax.process_count() > 1:
            worker.barrier()
        begin = time.perf_counter()
        state, metrics = step(state, data)
        found.append(float(metrics["loss"]))
        times.append(time.perf_counter() - begin)
    return state, times, found


def measured(step: Any, state: Any, workload: Any, times: list[float]) -> None:
    """Runs the measured steps, and adds their seconds to ``times``."""
    times += run(step, state, workload, WARM, MEASURED)[1]


def inside(options: argparse.Namespace) -> None:
    """The work of every worker."""
    worker.start()
    worker.set_rate(None)
    idle = worker.background()
    for rate in options.rates:
        pace(options, rate, idle)


def with_faster_devices(cluster: autopar.Cluster, faster: float) -> autopar.Cluster:
    """A cluster with the same links, whose devices compute so many times as fast."""
    device = clusters.with_scaled_rates(cluster.device, faster)
    latency_s = device.kernel_latency_s / faster
    device = dataclasses.replace(device, kernel_latency_s=latency_s)
    return dataclasses.replace(cluster, device=device)


def predicted_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted seconds of a step, and bytes at the cut in both directions.

    Also for hosts whose devices compute faster, with the same link.
    """
    rows: list[dict[str, Any]] = []
    for model in options.models:
        workload = workload_of(model, options, 0)
        for rate in options.rates:
            for faster in (1.0, options.faster):
                cluster = clusters.described(rate, HOSTS, clusters.load(None))
                cluster = with_faster_devices(cluster, faster)
                for way in options.ways:
                    row = {"kind": "predicted", "model": model, "way": way}
                    row |= {"rate": rate, "faster": faster}
                    rows.append(row | _predicted(workload, way, cluster, options))
    return rows


def _predicted(
    workload: Any, way: str, cluster: autopar.Cluster, options: argparse.Namespace
) -> dict[str, Any]:
    args = (
        jax.eval_shape(workload.create),
        jax.eval_shape(lambda: workload.batch(0)),
    )
    plan = autopar.plan(
        workload.step, *args, cluster=cluster, stages=HOSTS, schedule="1f1b",
        microbatches=options.microbatches, cut_codecs=way, seconds=2.0,
        cut_error_budget=options.budget if way == "auto" else None,
    )  # fmt: skip
    (link,) = links(bind_stages(analyse(workload.step, args), plan, cluster))
    return {
        "step_s": plan.predicted.step_s,
        "activation_bytes": plan.microbatches * link.activation_bytes,
        "cotangent_bytes": plan.microbatches * link.cotangent_bytes,
        "codecs": [plan.pipeline.activation_codecs, plan.pipeline.cotangent_codecs],
    }


# Losses in one process.


Trained = Callable[[str, str, int, argparse.Namespace], dict[str, Any]]
"""Trains a model in a way and with a seed, and returns the row of its losses."""


def losses(options: argparse.Namespace, trained: Trained, exact: str) -> None:
    """Trains each model and way for ``--steps`` steps, and saves held-out losses.

    Args:
      options: of the benchmark.
      trained: trains once.
      exact: the way that is trained with all ``--seeds``.
    """
    for model in options.models:
        for way in options.ways:
            seeds = options.seeds
            if way != exact:
                seeds = seeds[: options.coded_seeds]
            for seed in seeds:
                begin = time.perf_counter()
                row = trained(model, way, seed, options)
                row["seconds"] = time.perf_counter() - begin
                print(json.dumps(row), flush=True)
                save(options, [row])


def _trained(
    model: str, way: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    workload = workload_of(model, options, seed)
    evaluate = jax.jit(workload.eval_loss)
    held_out = held_out_batch(model, workload)
    row: dict[str, Any] = {
        "kind": "loss", "model": model, "way": way, "seed": seed,
        "steps": options.steps, "points": [],
    }  # fmt: skip
    if way == EXACT:
        step: Callable[..., Any] = jax.jit(workload.step, donate_argnums=0)
        state = jax.jit(workload.create)()
    else:
        rate = options.plan_rate
        cluster = clusters.described(rate, HOSTS, clusters.load(None))
        compared = Comparison(every=options.compare) if options.compare else None
        step = staged(workload, way, cluster, options, compared)
        state = start(step, workload)
    seen: list[float] = []
    for first in range(0, options.steps, options.turn):
        count = min(options.turn, options.steps - first)
        state, _, found = run(step, state, workload, first, count)
        seen += found
        params = jax.device_get(state.params)
        row["points"].append((first + count, float(evaluate(params, held_out))))
    row["last"] = statistics.fmean(seen[-options.last :])
    if way != EXACT:
        data = step.plan.pipeline
        row["codecs"] = [data.activation_codecs, data.cotangent_codecs]
    if options.compare and way != EXACT:
        row["kind"] = "compared"
        row["comparisons"] = [dataclasses.asdict(x) for x in step.comparisons]
    return row


def save(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Adds rows to the data of ``--out``."""
    script = f"benchmarks/network/{pathlib.Path(sys.argv[0]).name}"
    command = " ".join(["python", script, *sys.argv[1:]])
    old: dict[str, Any] = {"commands": [], "records": []}
    if options.out.exists():
        old = json.loads(options.out.read_text())
    commands = list(dict.fromkeys([*old["commands"], command]))
    made = {"commands": commands, "records": [*old["records"], *rows]}
    options.out.write_text(json.dumps(made, indent=1) + "\n")


def measure_on_hosts(script: str, hosts: int, options: argparse.Namespace) -> int:
    """Runs a benchmark on hosts, if it has rates, and saves the rows of the slowest.

    Args:
      script: path of the benchmark.
      hosts: number of hosts.
      options: of the benchmark; without ``--add``, earlier data are removed.

    Returns:
      The exit code.
    """
    if not options.add and options.out.exists():
        options.out.unlink()
    if not options.rates:
        return 0
    found, code = bed.run_inside(script, hosts, options.timeout)
    if not code:
        slowest = [
            max(same, key=lambda row: row["step_s"])
            for same in zip(*found, strict=True)
        ]
        save(options, slowest)
        for row in slowest:
            print(json.dumps(row))
    return code


def options_of(description: str, data: str) -> argparse.ArgumentParser:
    """The options of benchmarks of codecs; a benchmark sets more defaults.

    Args:
      description: the docstring of the benchmark.
      data: name of its data file.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--rates", type=float, nargs="*")
    add("--models", nargs="+")
    add("--ways", nargs="+")
    add("--steps", type=int, default=0, help="of a training; 0: no losses")
    add("--turn", type=int, default=500, help="steps between losses")
    add("--seeds", type=int, nargs="*", default=[0, 1, 2])
    add("--coded-seeds", type=int, default=1)
    add("--d-model", type=int)
    add("--seq", type=int, default=32)
    add("--batch", type=int)
    add("--learning-rate", type=float)
    add("--plan-rate", type=float, help="of the plans of --steps")
    add("--timeout", type=float, default=1800.0)
    add("--out", type=pathlib.Path, default=ROOT / "docs" / "data" / data)
    add("--add", action="store_true", help="to the data of --out")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = options_of(__doc__ or "", "cut_codecs.json")
    parser.add_argument("--budget", type=float, help="cut_error_budget of auto")
    parser.add_argument(
        "--last", type=int, default=200, help="steps with a mean training loss"
    )
    parser.add_argument("--compare", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--faster", type=float, default=20.0)
    parser.set_defaults(
        rates=[100.0], models=list(MODELS), ways=list(WAYS), d_model=64, batch=32,
        learning_rate=2e-3, plan_rate=100.0,
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        inside(options)
        return 0
    code = measure_on_hosts(__file__, HOSTS, options)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", HOSTS)
    if options.rates:
        rows = predicted_rows(options)
        save(options, rows)
        for row in rows:
            print(json.dumps(row))
    if options.steps:
        losses(options, _trained, EXACT)
    return code


if __name__ == "__main__":
    bed.exit_with(main)
