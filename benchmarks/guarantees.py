"""Guaranteed jobs under our policy and Rubick's, for the table in docs/scheduling.md.

    python benchmarks/guarantees.py [--seeds 0,1,2] [--out docs/data/guarantees.json]

Traces: The traces are the published workload with guarantees, and traces whose jobs and
  arrival times are drawn by seed from the published workload without guarantees. In the
  drawn traces 20 or 50 % of the jobs are guaranteed. The price of guarantees was chosen
  on the published workload with guarantees, and on seeds from 100 on. Seeds below 100
  were not used for this choice.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
from typing import Annotated

# SciPy's fits have few parameters, so threads of linear algebra mostly wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import simulate
from autopar.scheduler.simulator.metrics import Metrics, metrics
from autopar.scheduler.simulator.traces import rubick

ROOT = pathlib.Path(__file__).resolve().parent
DEFAULT = pathlib.Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent.parent / "shared"))
OUT = ROOT.parent / "docs" / "data" / "guarantees.json"
CLUSTER = "8x8"
SHARES = (0.2, 0.5)
# The bars: seconds on the published workload, and ratios to Rubick's policy on the
# other traces.
MOST_S = {"average": 2400.0, "guaranteed": 2328.0}
MOST_RATIO = 0.9

Rows = list[tuple[str, Job]]


def run(
    shared: Annotated[pathlib.Path, typer.Option(help="Public traces.")] = DEFAULT,
    seeds: Annotated[str, typer.Option(help="Of the drawn traces.")] = "0,1,2",
    out: Annotated[pathlib.Path, typer.Option(help="What is written.")] = OUT,
) -> None:
    """Prints a row for each trace, and writes all rows."""
    folder = shared / "scheduling" / "rubick"
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not there; name the folder of traces")
    numbers = [int(seed) for seed in seeds.split(",")]
    published = rubick.read_jobs(folder / "workloads" / "workload-base.csv")
    traces = {"workload-mt": rubick.read_jobs(folder / "workloads" / "workload-mt.csv")}
    for seed in numbers:
        for share in SHARES:
            traces[f"seed {seed}, {share:.0%}"] = drawn(published, seed, share)
    columns = "trace", "Rubick s", "guaranteed s", "ours s", "ratio", "guaranteed s"
    print(f"| {' | '.join(columns)} | ratio | moves | reached |\n" + "| --- " * 9 + "|")
    found = [_row(name, rows, folder / "traces") for name, rows in traces.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {"cluster": CLUSTER, "bars": {**MOST_S, "ratio": MOST_RATIO}, "rows": found}
    out.write_text(json.dumps(data, indent=1) + "\n")


def drawn(published: Rows, seed: int, share: float) -> Rows:
    """As many jobs and arrival times as published, drawn with replacement; a fraction
    of the jobs is guaranteed.
    """
    generator, count = random.Random(seed), len(published)
    picked = [generator.choice(published)[1] for _ in range(count)]
    at_s = sorted(generator.choice(published)[1].submitted_s for _ in range(count))
    promised = set(generator.sample(range(count), round(share * count)))
    return [
        (
            f"seed {seed}: job {number}",
            dataclasses.replace(
                job,
                name=f"{job.application}-{number}",
                submitted_s=at_s[number],
                guaranteed=number in promised,
            ),
        )
        for number, job in enumerate(picked)
    ]


def _row(name: str, rows: Rows, tables: pathlib.Path) -> dict[str, object]:
    theirs, ours = (_figures(rows, tables, policy) for policy in ("rubick", "goodput"))
    assert theirs.guaranteed_s is not None
    assert ours.guaranteed_s is not None
    ratio = ours.average_s / theirs.average_s
    guaranteed_ratio = ours.guaranteed_s / theirs.guaranteed_s
    if name == "workload-mt":
        reached = [
            ours.average_s <= MOST_S["average"],
            ours.guaranteed_s <= MOST_S["guaranteed"],
        ]
    else:
        reached = [ratio <= MOST_RATIO, guaranteed_ratio <= MOST_RATIO]
    words = "both" if all(reached) else "one" if any(reached) else "none"
    print(
        f"| {name} | {theirs.average_s:.1f} | {theirs.guaranteed_s:.1f} | "
        f"{ours.average_s:.1f} | {ratio:.3f} | {ours.guaranteed_s:.1f} | "
        f"{guaranteed_ratio:.3f} | {ours.restarts} | {words} |",
        flush=True,
    )
    return {
        "trace": name,
        "jobs": ours.submitted,
        "guaranteed_jobs": ours.guaranteed,
        "rubick_s": theirs.average_s,
        "rubick_guaranteed_s": theirs.guaranteed_s,
        "ours_s": ours.average_s,
        "ours_guaranteed_s": ours.guaranteed_s,
        "ratio": ratio,
        "guaranteed_ratio": guaranteed_ratio,
        "moves": ours.restarts,
        "bars_reached": words,
    }


def _figures(rows: Rows, tables: pathlib.Path, policy: str) -> Metrics:
    """The figures of a policy; an error if a job was lost."""
    made, names = policy_of(policy), [job.application for _, job in rows]
    times = rubick.read_plan_times(tables, names)
    jobs = rubick.running(rows, times, ghosts=policy == "rubick")
    found = metrics(simulate(jobs, Nodes.parse(CLUSTER), made))
    assert not found.failed, found.failed
    return found


if __name__ == "__main__":
    typer.run(run)
