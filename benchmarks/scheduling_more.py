"""Our policy on synthetic kinds of devices, without single abilities, and its fairness.

    python benchmarks/scheduling_more.py [--only kinds] [--shared ../shared]

Rows: ``kinds`` (compared with Sia's policy on three kinds of devices), ``ablation``
  (without plans, batches, codecs, or costs of moves per pair, on slower networks),
  ``fairness`` (finish-time fairness, compared with Pollux's policy on its workloads;
  takes long), ``plans`` (models of steps on Rubick's tables). The jobs of the first two
  rows are drawn by seed (`synthetic_jobs.py`), and the speed of codecs is modelled.
"""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Iterable
from typing import Annotated

# must be first, because it sets the number of threads of linear algebra
import scheduling

# isort: split
import numpy as np
import plan_models
import synthetic_jobs as synthetic
import typer

from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import Options, simulate
from autopar.scheduler.simulator.metrics import finish_time_ratios, metrics
from autopar.scheduler.simulator.traces.recorded import jobs_of

# Sia's cluster: 64 devices of three kinds.
THREE = (("t4", 6, 4), ("rtx", 3, 8), ("a100", 2, 8))
ONE = (("t4", 16, 4),)
SEEDS = (0, 1, 2, 3, 4)
JOBS = {"0.5": 60, "1.0": 120, "2.0": 240}


def run(
    only: Annotated[str | None, typer.Option(help="One row.")] = None,
    shared: Annotated[
        pathlib.Path, typer.Option(help="Public traces.")
    ] = scheduling.DEFAULT,
    loads: Annotated[str, typer.Option(help="Of the row fairness.")] = "0.5,1.0",
    seeds: Annotated[str, typer.Option(help="Of the row kinds.")] = "0,1,2",
) -> None:
    """Prints a table for each row."""
    if only in (None, "kinds"):
        kinds([int(seed) for seed in seeds.split(",")])
    if only in (None, "ablation"):
        ablation()
    if only in (None, "plans"):
        plan_models.table(shared / "scheduling" / "rubick" / "traces")
    if only in (None, "fairness"):
        fairness(shared / "scheduling" / "pollux", loads.split(","))


def _text(kinds: tuple[tuple[str, int, int], ...]) -> str:
    return "+".join(f"{nodes}x{per}:{kind}" for kind, nodes, per in kinds)


def kinds(seeds: Iterable[int]) -> None:
    """Our policy and Sia's policy on the same jobs, which were not used for tuning.

    Both policies decide in rounds, and then also at events.
    """
    print(
        "| load | seed | ours, rounds s | Sia s | ratio | ours, events s | Sia s | "
        "ratio |\n" + "| --- " * 8 + "|"
    )
    all_ratios: list[list[float]] = []
    for (load, count), seed in itertools.product(JOBS.items(), seeds):
        cells, ratios = [load, f"{seed}"], list[float]()
        for options in (scheduling.ROUNDS, scheduling.EVENTS):
            both = [_of_kinds(seed, count, p, options) for p in ("goodput", "sia")]
            ratios.append(both[0] / both[1])
            cells += [*(f"{s:.1f}" for s in both), f"{ratios[-1]:.4f}"]
        all_ratios.append(ratios)
        print(f"| {' | '.join(cells)} |", flush=True)
    for name, column in zip(("rounds", "events"), np.array(all_ratios).T, strict=True):
        print(f"\n{name}: mean {column.mean():.4f}, worst {column.max():.4f}")


def _of_kinds(seed: int, count: int, policy: str, options: Options) -> float:
    jobs = synthetic.jobs(seed, THREE, count=count)
    nodes = Nodes.parse(_text(THREE))
    return metrics(simulate(jobs, nodes, policy_of(policy), options)).average_s


def ablation() -> None:
    """Mean completion time without each ability, divided by that with all abilities."""
    without = {
        "all": synthetic.ALL,
        "plan": synthetic.Abilities(plan=False),
        "batch": synthetic.Abilities(batch=False),
        "compression": synthetic.Abilities(compression=False),
        "pairs": synthetic.Abilities(pairs=False),
    }
    print("| network | without | average s | over all | most over all |")
    print("| --- " * 5 + "|")
    nodes = Nodes.parse(_text(ONE))
    for slower in (1, 4, 16):
        base: list[float] = []
        for name, can in without.items():
            spent = [
                _averaged(seed, nodes, synthetic.FAR / slower, can) for seed in SEEDS
            ]
            base = base or spent
            ratios = np.array(spent) / np.array(base)
            print(
                f"| /{slower} | {name} | {np.mean(spent):.0f} | {ratios.mean():.3f} | "
                f"{ratios.min():.3f} to {ratios.max():.3f} |",
                flush=True,
            )


def _averaged(seed: int, nodes: Nodes, far: float, can: synthetic.Abilities) -> float:
    jobs = synthetic.jobs(seed, ONE, far=far, can=can)
    return metrics(simulate(jobs, nodes, policy_of("goodput"))).average_s


def fairness(folder: pathlib.Path, loads: list[str]) -> None:
    """The worst finish-time ratios of our policy and of Pollux's search."""
    print("| load | workload | policy | average s | worst | 99 % | over 1 | CPU s |")
    print("| --- " * 8 + "|")
    nodes = Nodes.parse("16x4")
    for load in loads:
        for workload in scheduling.WORKLOADS:
            trace = folder / scheduling.LOADS[load] / f"{workload}.csv"
            for name in ("goodput", "pollux"):
                begin, policy = time.process_time(), policy_of(name)
                history = simulate(jobs_of(trace, None, nodes, policy), nodes, policy)
                # Both policies must have the same jobs and the same model, or else the
                # shares differ.
                fresh = jobs_of(trace, None, nodes, policy_of("goodput"))
                ratios = np.array(list(finish_time_ratios(history, fresh).values()))
                cells = (
                    f"{metrics(history).average_s:.1f}",
                    f"{ratios.max():.2f}",
                    f"{np.quantile(ratios, 0.99):.2f}",
                    f"{np.mean(ratios > 1):.0%}",
                    f"{time.process_time() - begin:.0f}",
                )
                row = " | ".join((load, workload, name, *cells))
                print(f"| {row} |", flush=True)


if __name__ == "__main__":
    typer.run(run)
