"""Changes the devices of a running loop, in one process with 8 simulated devices.

    python benchmarks/elastic.py losses [gpt lstm gpt-nnx gpt-int8]
    python benchmarks/elastic.py warm [gpt llama lstm gpt-nnx]
    python benchmarks/elastic.py memory
    python benchmarks/elastic.py ahead [gpt 6:cpu 4:cpu 2:cpu]

``losses``: compares the losses of 8 -> 6 -> 4 -> 8 devices with those of an
  uninterrupted run. For scale, the table also has the losses of a run whose parameters
  are changed by one unit in the last place. ``warm``: compares a plan that starts from
  the last one with a plan from scratch.
``memory``: live bytes on devices and the size of the process, over 50 changes.
``ahead``: the time of a step while other clusters are prepared, in turns with the time
  of a step alone.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
import workloads

from autopar.runtime import state_mover

BATCH, STEPS = 24, 16
CHANGES = {4: "6:cpu", 8: "4:cpu", 12: "8:cpu"}
# Small examples, so that most of the time is not compilation.
SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "d_model": 128},
    "gpt-nnx": {"layers": 2, "d_model": 128, "dropout": 0.1},
    "lstm": {},
}


def main(words: list[str]) -> int:
    """Prints a table; returns 1 if a bar is missed."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    modes = {"losses": losses, "warm": warm, "memory": memory, "ahead": ahead}
    mode, *names = words or [""]
    if mode not in modes:
        print(__doc__)
        return 2
    return int(not modes[mode](names))


def started(name: str, steps: int, cluster: str = "8:cpu", **options: Any) -> Any:
    """Starts a run of an example; with ``-int8`` after its name, gradients are sent as
    int8.
    """
    import autopar

    base, _, codec = name.partition("-int")
    work = workloads.training(base, batch=BATCH, **SMALL.get(base, {}))
    batches = list(itertools.islice(work.batches(), STEPS))

    def source(position: int, rows: int) -> Any:
        return batches[position // rows % len(batches)]

    step = autopar.parallelize(
        work.step, cluster=cluster, compression="int8" if codec else "none"
    )
    create = options.pop("create", work.create_state)
    options.setdefault("ahead", False)
    args = (jax.random.key(0),)
    return autopar.elastic(
        step, create, source, batch=BATCH, steps=steps, args=args, **options
    )


def trained(run: Any, changes: dict[int, str]) -> list[float]:
    """The losses of a run whose cluster changes before the given steps."""
    found: list[float] = []
    for done in run:
        found.append(float(done.result))
        if done.step + 1 in changes:
            run.change(changes[done.step + 1])
    return found


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves of losses."""
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


def losses(names: list[str]) -> bool:
    """Whether losses under changes equal those of the uninterrupted run.

    With another number of workers, a codec rounds other parts of the gradients, so
    losses differ even without a change. Therefore the table also has the losses of
    uninterrupted runs on each number of devices.
    """
    workloads.row(
        "example", "difference", "one nudged ulp", "pauses s (plan, move)",
        "uninterrupted on 6 and 4 devices",
    )  # fmt: skip
    workloads.row(*["---"] * 5)
    good = True
    for name in names or ("gpt", "lstm", "gpt-nnx", "gpt-int8"):
        plain = trained(started(name, STEPS), {})
        base = name.partition("-int")[0]
        work = workloads.training(base, batch=BATCH, **SMALL.get(base, {}))
        nudged_state = functools.partial(nudged, work.create_state)
        nudge = difference(
            trained(started(name, STEPS, create=nudged_state), {}), plain
        )
        run = started(name, STEPS)
        found = difference(trained(run, CHANGES), plain)
        pauses = [x["measured"] for x in run.ledger.lines if x["kind"] == "replan"]
        good &= len(pauses) == len(CHANGES) and found <= max(1e-5, 3 * nudge)
        others = [
            difference(trained(started(name, STEPS, cluster), {}), plain)
            for cluster in ("6:cpu", "4:cpu")
        ]
        workloads.row(
            name, f"{found:.1e}", f"{nudge:.1e}",
            ", ".join(f"{p['plan_s']:.2f} + {p['move_s']:.2f}" for p in pauses),
            ", ".join(f"{x:.1e}" for x in others),
        )  # fmt: skip
    return good


def nudged(create_state: Any, key: Any) -> Any:
    """The first state, each float changed by about one unit in the last place."""
    from flax import nnx

    state = create_state(key)

    def change(path: Any, leaf: Any) -> Any:
        if not jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.numpy.floating):
            return leaf
        seed = sum(jax.tree_util.keystr(path).encode()) + leaf.size
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=leaf.shape)
        return (leaf * (1 + 1e-7 * signs)).astype(leaf.dtype)

    if type(state) is tuple and isinstance(state[0], nnx.Module):
        found = jax.tree_util.tree_map_with_path(change, nnx.state(state[0], nnx.Param))
        nnx.update(state[0], found)
        return state
    return jax.tree_util.tree_map_with_path(change, state)


def warm(names: list[str]) -> bool:
    """Whether warm plans take less than 2 s and cost at most 1.01 times a cold plan."""
    import autopar
    from autopar.planner.options import PlanOptions
    from autopar.planner.plan import plan_analysis
    from autopar.planner.warm import warm_plan
    from autopar.steps.analysis import analyse

    workloads.row("example", "to", "cold s", "warm s", "cost, of the cold plan's")
    workloads.row(*["---"] * 5)
    good = True
    for name in names or ("gpt", "llama", "lstm", "gpt-nnx"):
        step, args = workloads.arguments(name, batch=BATCH)
        analysis = analyse(step, args)
        clusters = [autopar.Cluster.parse(x) for x in ("8:cpu", "6:cpu", "4:cpu")]
        running = plan_analysis(analysis, clusters[0], PlanOptions())
        for cluster in (*clusters[1:], clusters[0]):
            begin = time.perf_counter()
            cold = plan_analysis(analysis, cluster, PlanOptions())
            middle = time.perf_counter()
            found = warm_plan(analysis, cluster, PlanOptions(), running)
            end = time.perf_counter()
            cost = found.predicted.step_s / cold.predicted.step_s
            good &= end - middle < 2.0 and cost <= 1.01
            workloads.row(
                name, cluster, f"{middle - begin:.2f}", f"{end - middle:.2f}",
                f"{cost:.4f}",
            )  # fmt: skip
            running = cold
    return good


def memory(names: list[str]) -> bool:
    """Whether live bytes stay equal over 50 changes, and memory grows by at most 6 MB
    each.
    """
    del names
    sizes = itertools.cycle((6, 4, 8, 2, 3))
    run = started("gpt", 10**6)
    seen: list[tuple[int, float, int]] = []
    for number in range(56):
        next(run)
        gc.collect()
        live = sum(x.nbytes for x in jax.live_arrays())
        seen.append((live, state_mover.resident_bytes() / 1e6, len(jax.live_arrays())))
        run.change(f"{next(sizes)}:cpu")
        if number % 10 == 0:
            print(number, run.plan.cluster.text, *seen[-1], flush=True)
    run.close()
    # Every fifth change returns to the same size. The first rounds compile and load
    # programs.
    first, last = seen[5], seen[55]
    grown = (last[1] - first[1]) / 50
    workloads.row("live bytes", "arrays", "MB a change")
    workloads.row(*["---"] * 3)
    workloads.row(
        f"{first[0]} -> {last[0]}", f"{first[2]} -> {last[2]}", f"{grown:.2f}"
    )
    return first[0] == last[0] and first[2] == last[2] and grown <= 6


def ahead(names: list[str]) -> bool:
    """Whether preparing other clusters slows a step by at most 5 %.

    Steps run in turns with and without the background thread; both times are medians.
    """
    run = started((names or ["gpt"])[0], 10**6)
    from autopar.elastic.replanning import Ahead

    for _ in range(5):
        next(run)
    alone: list[float] = []
    beside: list[float] = []
    for devices in names[1:] or ("6:cpu", "4:cpu", "2:cpu"):
        alone += [next(run).seconds for _ in range(100)]
        worker = Ahead(run._train_step, BATCH)
        worker.prepare([cluster_of(devices)])
        time.sleep(0.05)
        while worker._busy:
            beside.append(next(run).seconds)
        worker.close()
        worker.wait()
        alone += [next(run).seconds for _ in range(100)]
    run.close()
    ratio = statistics.median(beside) / statistics.median(alone)
    mean = statistics.fmean(beside) / statistics.fmean(alone)
    workloads.row("alone ms", "while preparing ms", "ratio", "of means", "steps")
    workloads.row(*["---"] * 5)
    workloads.row(
        f"{statistics.median(alone) * 1e3:.1f}",
        f"{statistics.median(beside) * 1e3:.1f}",
        f"{ratio:.3f}", f"{mean:.3f}", f"{len(alone)}, {len(beside)}",
    )  # fmt: skip
    return ratio <= 1.05


def cluster_of(text: str) -> Any:
    """The cluster that a text describes."""
    import autopar

    return autopar.Cluster.parse(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
