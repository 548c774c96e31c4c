"""Layouts of the tables of a recommendation model, and the cost of DCT's messages.

    python benchmarks/embedding_tables.py                  # all rows
    python benchmarks/embedding_tables.py --only plans

Rows: ``plans`` prints the plan of `examples/recommendation.py` on some clusters,
  compared with the best plans in which all tables are whole, and in which all tables
  are split by rows. ``dct`` trains on 8 simulated hosts with the policy `Dct`, and with
  dense gradients, and prints bytes and held-out loss. ``batch`` trains with a batch
  size that follows the gradient noise, on simulated links; the loop also chooses
  between dense gradients and a codec, with suitable layouts. For comparison, one device
  trains with dense gradients on the same batches.

``dct`` has two layouts. In ``planned`` the planner splits the tables, so only the
gradients of the towers are sent. In ``whole`` every device has all tables, so the
gradient of a table is sent, too, although a batch changes few of its rows. Bytes are
those that one host sends for gradients in a step, including small gradients that are
sent dense.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import workloads

import autopar
from autopar.goodput import (
    NoiseOptions,
    ScaledState,
    progress,
    progress_ratio,
    scale_updates,
)
from autopar.goodput.following import Following, codecs_of
from autopar.goodput.loop import Loop
from autopar.goodput.rates import scaled_states

HOSTS = "8x1:cpu,network=1Gb/s"
WORKERS, LATENCY_S = 8, 5e-5
# Cluster -> options of the model; the model of the last one does not fit one device.
PLANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("8:cpu", {}),
    (HOSTS, {}),
    ("2x4:h100", {"batch": 65536, "rows": 1 << 20, "width": 64}),
    (
        "4x8:h100",
        {"batch": 65536, "rows": 1 << 25, "width": 128, "tables": 26, "hidden": 1024},
    ),
)
TABLES = "state/*/table_*/embedding"
HELD_OUT = 16
SECONDS = 10.0


def kind_of(spec: Any) -> str:
    """How a table is split: by columns, by rows, by both, or not at all."""
    parts = zip(("rows", "columns"), (*spec, None, None), strict=False)
    names = [word for word, axes in parts if axes]
    return " and ".join(names) or "whole"


def tables_of(plan: Any) -> dict[str, int]:
    """Split of a table (`kind_of`) -> number of parameters in such tables."""
    found: dict[str, int] = {}
    for name, spec in plan.inputs.items():
        if "params/table_" in name:
            kind = kind_of(spec)
            found[kind] = found.get(kind, 0) + 1
    return found


def towers_of(plan: Any) -> set[str]:
    """The splits of the towers' weights."""
    return {
        kind_of(spec) for name, spec in plan.inputs.items()
        if name.endswith("kernel") and "/params/" in name
    }  # fmt: skip


def plan_of(options: dict[str, Any], cluster: str, **limits: Any) -> Any:
    """A plan of the example; None if no plan fits."""
    step, args = workloads.arguments("recommendation", **options)
    try:
        return autopar.plan(step, *args, cluster=cluster, seconds=SECONDS, **limits)
    except autopar.InfeasibleError:
        return None


def plans_table() -> None:
    """Prints the layouts of tables and towers, and the seconds of other layouts."""
    workloads.row(
        "cluster", "options", "step", "tables", "towers", "memory a device",
        "all tables whole", "all split by rows",
    )  # fmt: skip
    workloads.row(*["---"] * 8)
    for cluster, given in PLANNED:
        options = {"batch": 4096, **given}
        best = plan_of(options, cluster)
        if best is None:
            workloads.row(cluster, given, "fits nowhere")
            continue
        towers = towers_of(best)
        every = tuple(best.mesh["axes"])
        others = [
            plan_of(options, cluster, pins={TABLES: jax.sharding.PartitionSpec(*spec)})
            for spec in ((), (every,))
        ]
        count = sorted(tables_of(best).items())
        workloads.row(
            cluster,
            " ".join(f"{k}={v}" for k, v in given.items()),
            f"{best.predicted.step_s * 1e3:.3g} ms",
            ", ".join(f"{n} {k}" for k, n in count),
            " or ".join(sorted(towers)),
            f"{best.predicted.peak_memory_bytes / 1e9:.3g} GB",
            *(
                "does not fit" if other is None
                else f"{other.predicted.step_s / best.predicted.step_s:.2f} x"
                for other in others
            ),
        )  # fmt: skip


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Area under the ROC curve: how often a click scores higher than a non-click."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    ones = clicks > 0
    count = int(ones.sum())
    below = ranks[ones].sum() - count * (count + 1) / 2
    return float(below / (count * (len(scores) - count)))


def held_out(run: Any, state: Any) -> tuple[float, float]:
    """Loss and area under the ROC curve on held-out batches."""
    state = jax.device_get(state)
    apply = jax.jit(lambda p, b: state.apply_fn({"params": p}, b["dense"], b["ids"]))
    found = list(itertools.islice(run.batches(seed=1 << 20), HELD_OUT))
    logits = np.concatenate([np.asarray(apply(state.params, b)) for b in found])
    clicks = np.concatenate([b["clicks"] for b in found])
    losses = np.logaddexp(0, logits) - clicks * logits
    return float(losses.mean()), auc(logits, clicks)


def trained(
    run: Any, steps: int, seed: int, pins: dict[str, Any], coded: dict[str, Any]
) -> tuple[Any, list[tuple[float, float]], Any]:
    """The last state; for each step, bytes sent and dense bytes; and the plan."""
    step = autopar.parallelize(
        run.step, cluster=HOSTS, pins=pins, axis_names=("data",), seconds=SECONDS,
        **coded,
    )  # fmt: skip
    state = step.init(run.create_state, jax.random.key(seed))
    sent: list[tuple[float, float]] = []
    for batch in itertools.islice(run.batches(seed=seed), steps):
        # If the programs of many steps run at once, simulated devices can wait for each
        # other for ever.
        state, _ = jax.block_until_ready(step(state, batch))
        reports = step.telemetry.values() if coded else ()
        sent.append(
            (sum(r.wire_bytes for r in reports), sum(r.dense_bytes for r in reports))
        )
    return state, sent, step.plan


def dct_table(steps: int, seeds: int, ratio: float, every: int) -> None:
    """Prints a training with the policy `Dct` and one with dense gradients."""
    from autopar.compression.policies import Dct

    whole = jax.sharding.PartitionSpec()
    layouts = {
        "planned": {},
        "whole": {TABLES: whole, "batch/*": jax.sharding.PartitionSpec("data")},
    }
    run = workloads.training("recommendation")
    print(f"\nDct on {HOSTS}, {steps} steps, {seeds} seeds, ratio {ratio}.\n")
    workloads.row(
        "tables", "gradients", "dense MB a step", "sent over dense", "most in a step",
        "held-out loss", "AUC",
    )  # fmt: skip
    workloads.row(*["---"] * 7)
    for name, pins in layouts.items():
        for way in ("dense", "Dct"):
            losses: list[float] = []
            areas: list[float] = []
            sent: list[tuple[float, float]] = []
            for seed in range(seeds):
                policy = Dct(ratio=ratio, refresh=every, every=every)
                codec = f"threshold:ratio={ratio},every={every}"
                coded = {"compression": codec, "policy": policy}
                state, found, plan = trained(
                    run, steps, seed, pins, coded if way == "Dct" else {}
                )
                sent += found
                loss, area = held_out(run, state)
                losses.append(loss)
                areas.append(area)
            kinds = ", ".join(f"{n} {k}" for k, n in tables_of(plan).items())
            dense = sum(d for _, d in sent)
            parts = [s / d for s, d in sent if d]
            workloads.row(
                f"{name} ({kinds})", way,
                f"{dense / len(sent) / 1e6:.2f}" if dense else "",
                f"{sum(s for s, _ in sent) / dense:.4f}" if dense else "",
                f"{max(parts):.4f}" if parts else "",
                _spread(losses), _spread(areas),
            )  # fmt: skip


def drawn(run: Any, position: int, rows: int) -> dict[str, np.ndarray]:
    """Draws samples from a position of an endless stream."""
    _, *others = run.batches.args
    return next(run.batches.func(rows, *others, seed=position))


def batch_table(
    steps: int, codec: str, mbit: float, options: dict[str, int], *, biased: bool
) -> None:
    """Prints a training whose batch size and codecs follow the gradient noise."""
    run = workloads.training("recommendation", **options)
    base = run.batch["clicks"].shape[0]
    tx = scale_updates(optax.adam(1e-2), "adascale-root", base_batch=base)
    create = functools.partial(run.create_state, jax.random.key(0), optimizer=tx)
    worth = measured_ratio(run, codec) if biased else None
    print(
        f"\nThe batch follows on {hosts(mbit)}, {steps} base batches of progress, "
        f"{options}."
    )
    if worth is not None:
        print(f"A row sent by {codec} counts as {worth:.3f} of one sent densely.")
    print()
    workloads.row(
        "most rows", "codecs", "seconds", "steps", "rows a step", "codec in use",
        "tables", "towers",
        "held-out loss", "AUC", "one device, the same batches", "AUC",
        "most apart, first 20 losses",
    )  # fmt: skip
    workloads.row(*["---"] * 13)
    for most, codecs in (
        (8 * base, {codec: worth}), (8 * base, {}), (base, {codec: worth}), (base, {})
    ):  # fmt: skip
        follows = Following(
            base_batch=base, max_batch=most, codecs=codecs_of(codecs, "none")
        )
        _adapted_row(run, create, follows, steps * base, tuple(codecs), mbit)


def _adapted_row(
    run: Any,
    create: Callable[[], Any],
    following: Following,
    samples: int,
    codecs: tuple[str, ...],
    mbit: float,
) -> None:
    step = autopar.parallelize(
        run.step, cluster=hosts(mbit), axis_names=("data",), seconds=SECONDS,
        noise_scale=NoiseOptions(
            base_batch=following.base_batch, decay=0.99, preconditioned=True
        ),
    )  # fmt: skip
    first = jax.tree.map(np.asarray, create())
    state = step.init(create, others=(run.batch,))
    state, seconds, losses, told = adapted(run, step, state, following, samples, mbit)
    alone, plain = replayed(run, first, told)
    sent = {g.codec for g in step.plan.gradients if g.codec} - {"dense"}
    pairs = zip(losses[:20], plain, strict=False)
    apart = max(abs(x - y) / abs(y) for x, y in pairs)
    (loss, area), (loss1, area1) = held_out(run, state), held_out(run, alone)
    workloads.row(
        following.max_batch, ", ".join(codecs) or "none", f"{seconds:.1f}", len(losses),
        " ".join(str(k) for k, _ in itertools.groupby(n for n, _ in told)),
        ", ".join(sorted(sent)) or "none",
        ", ".join(f"{n} {k}" for k, n in sorted(tables_of(step.plan).items())),
        " or ".join(sorted(towers_of(step.plan))), f"{loss:.4f}", f"{area:.4f}",
        f"{loss1:.4f}", f"{area1:.4f}", f"{apart:.1e}",
    )  # fmt: skip


def adapted(
    run: Any, step: Any, state: Any, following: Following, samples: int, mbit: float
) -> tuple[Any, float, list[float], list[tuple[int, float]]]:
    """Trains for a given number of base-batch rows.

    A step takes an eighth of the CPU seconds of all hosts, plus the seconds of the
    plan's bytes on the link. Planning and compiling cost all of their CPU seconds.

    Returns:
      The last state, seconds, losses, and rows and gain of each step.
    """
    rest_s = [samples / following.base_batch * step.plan.predicted.step_s]
    loop = Loop(step, following, horizon_s=lambda: rest_s[0], rest_s=lambda: rest_s[0])
    clock, position = 0.0, 0
    state = loop.begin(state, drawn(run, position, loop.batch_size))
    losses, told = list[float](), list[tuple[int, float]]()
    while progress(state) < samples:
        rows = loop.batch_size
        batch = drawn(run, position, rows)
        position += rows
        told.append((rows, float(scaled_states(state)[0].gain)))
        begin = time.process_time()
        state, loss = jax.block_until_ready(step(state, batch))
        ended = time.process_time()
        seconds = (ended - begin) / WORKERS + link_s(step.plan, mbit)
        worth = max(told[-1][1], 1e-9) * following.base_batch
        rest_s[0] = (samples - progress(state)) / worth * seconds
        state = loop.observe(state, batch, seconds=seconds, loss=loss)
        # The first step compiles in every kind of training, so it is not counted.
        clock += seconds + time.process_time() - ended if losses else 0.0
        losses.append(float(loss["loss"] if isinstance(loss, dict) else loss))
    return state, clock, losses, told


def hosts(mbit: float) -> str:
    """Eight hosts joined by links of a given rate."""
    return f"{WORKERS}x1:cpu,network={mbit:g}Mb/s"


def link_s(plan: autopar.Plan, mbit: float) -> float:
    """Seconds that a plan's messages need on a link."""
    buckets = {g.bucket for g in plan.gradients if g.codec}
    messages = 2 * max(1, len(buckets)) * (WORKERS - 1)
    return messages * LATENCY_S + 8e-6 * plan.predicted.communication_bytes / mbit


def replayed(
    run: Any, state: Any, told: list[tuple[int, float]]
) -> tuple[Any, list[float]]:
    """The last state and losses on one device with dense gradients and the same
    batches.
    """
    step, position, losses = jax.jit(run.step), 0, list[float]()

    def gained(node: Any, rows: int, gain: float) -> Any:
        if not isinstance(node, ScaledState):
            return node
        return node._replace(batch=np.float32(rows), gain=np.float32(gain))

    for rows, gain in told:
        state = jax.tree.map(
            functools.partial(gained, rows=rows, gain=gain),
            state,
            is_leaf=lambda x: isinstance(x, ScaledState),
        )
        state, loss = step(state, drawn(run, position, rows))
        position += rows
        losses.append(float(loss["loss"] if isinstance(loss, dict) else loss))
    return state, losses


def measured_ratio(run: Any, codec: str, steps: int = 100) -> float:
    """Measures the progress ratio of a codec, on other seeds (`progress_ratio`)."""
    curves: list[list[list[float]]] = []
    for compression in ("none", codec):
        step = autopar.parallelize(
            run.step, cluster=HOSTS, axis_names=("data",), seconds=SECONDS,
            compression=compression,
        )  # fmt: skip
        curves.append([])
        for seed in (101, 102):
            state, losses = step.init(run.create_state, jax.random.key(seed)), []
            for batch in itertools.islice(run.batches(seed=seed << 10), steps):
                state, loss = step(state, batch)
                losses.append(float(loss["loss"] if isinstance(loss, dict) else loss))
            width = np.ones(10) / 10
            curves[-1].append(np.convolve(losses, width, "valid").tolist())
    return progress_ratio(*curves).value


def _spread(found: list[float]) -> str:
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.fmean(found):.4f} ({deviation:.4f})"


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("plans", "dct", "batch"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--every", type=int, default=50, help="thresholds are kept")
    parser.add_argument("--codec", default="int8:rounding=stochastic", help="of batch")
    parser.add_argument("--thresholds", action="store_true", help="for batch, instead")
    parser.add_argument("--mbit", type=float, default=1000.0, help="for batch")
    parser.add_argument("--hidden", type=int, default=512, help="for batch")
    parser.add_argument("--rows", type=int, default=512, help="for batch")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if given.only in (None, "plans"):
        plans_table()
    if given.only in (None, "dct"):
        dct_table(given.steps, given.seeds, given.ratio, given.every)
    if given.only in (None, "batch"):
        codec = given.codec
        if given.thresholds:
            codec = f"threshold:ratio={given.ratio},every={given.every}"
        batch_table(
            given.steps,
            codec,
            given.mbit,
            {"batch": given.rows, "hidden": given.hidden},
            biased=given.thresholds,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
