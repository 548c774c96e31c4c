"""Scheduling policies on small clusters with short jobs, in the simulator.

    python benchmarks/small_clusters.py --first 100 --seeds 60

A seed draws a cluster of 4 to 8 nodes with one device each, 5 to 12 jobs of one or
three programs, how well they scale, and when they arrive. In half of the cases a node
leaves and comes back. Jobs last 60, 200 or 600 s on one device in the mean, and a start
takes 5 or 15 % of that. A change of devices takes a part of the seconds of a start,
``--changes``. The table has the average completion time of each policy over that of
`goodput`, as geometric mean over seeds. In the row "steps stated", the policy is told
how many steps jobs run. Its constants for this were chosen on seeds 0 to 39. No other
constant of a policy was chosen on these jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import workloads

from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.policies.goodput import Goodput, Settings
from autopar.scheduler.simulator.engine import NodeEvent, Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves
from autopar.scheduler.simulator.metrics import metrics

BATCH, INTERVAL_S, REACT_S = 24, 10.0, 2.0

STATED = "steps stated"
POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "goodput": Goodput,
    STATED: Goodput,
    "least = 0": lambda: Goodput(Settings(least=0.0)),
    "known_s = 200": lambda: Goodput(Settings(known_s=200.0)),
    "events_s = 240": lambda: Goodput(Settings(events_s=240.0)),
    "events_s = 4000": lambda: Goodput(Settings(events_s=4000.0)),
    **{name: lambda name=name: policy_of(name) for name in ("sia", "fair", "fifo")},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A cluster, its options, and a function that creates its jobs."""

    nodes: Nodes
    options: Options
    jobs: Callable[[], list[CurveJob]]


def curve_of(one_s: float, most: int, power: float) -> CurveTable:
    """A step on n devices takes 1 / n**power of the seconds on one device."""
    points = [
        CurvePoint(
            cluster=f"{n}x1:cpu", kind="cpu", nodes=n, devices=n, batch=BATCH,
            step_s=one_s / n**power, goodput=BATCH * n**power / one_s,
        )
        for n in range(1, most + 1)
    ]  # fmt: skip
    return CurveTable(points=tuple(points), base_batch=BATCH)


def case_of(seed: int, changes: float, *, states_steps: bool = False) -> Case:
    """Draws a case.

    Args:
      seed: of the draws.
      changes: seconds of a change of devices over those of a start.
      states_steps: whether owners state how many steps their jobs run.
    """
    draw = np.random.default_rng(seed)
    nodes, count = int(draw.choice([4, 6, 8])), int(draw.choice([5, 8, 12]))
    mean_s, programs = float(draw.choice([60, 200, 600])), int(draw.choice([1, 3]))
    load, power = float(draw.choice([0.7, 1.2])), float(draw.choice([0.6, 0.85, 0.95]))
    at_s = np.cumsum([0.0, *draw.exponential(mean_s / nodes / load, count - 1)])
    whole_s = mean_s * np.exp(0.8 * draw.standard_normal(count))
    one_s = mean_s / 100 * draw.uniform(0.5, 2.0, count)
    start_s = mean_s * float(draw.choice([0.05, 0.15]))
    moves = Moves(start_s=start_s, join_s=0.4 * start_s, change_s=changes * start_s)
    asks = draw.choice([1, 2, 4], count)
    events: tuple[NodeEvent, ...] = ()
    if draw.random() < 0.5:
        times = (0.6 * mean_s, 1.4 * mean_s)
        events = tuple(
            NodeEvent(at_s=INTERVAL_S + s, node=1, away=away)
            for s, away in zip(times, (True, False), strict=True)
        )

    def jobs() -> list[CurveJob]:
        return [
            CurveJob(
                Job(
                    name=f"job{k}", application=f"program{k % programs}",
                    submitted_s=INTERVAL_S + float(at_s[k]), devices=int(asks[k]),
                    batch=BATCH, steps=max(5, int(whole_s[k] / one_s[k])),
                ),
                curve_of(one_s[k], nodes, power).on("cpu"), nodes, moves,
                states_steps=states_steps,
            )
            for k in range(count)
        ]  # fmt: skip

    options = Options(interval_s=INTERVAL_S, react_s=REACT_S, events=events)
    return Case(Nodes.parse(f"{nodes}x1:cpu"), options, jobs)


def average_s(case: Case, policy: SchedulingPolicy) -> float:
    """The average completion time of a case's jobs."""
    history = simulate(case.jobs(), case.nodes, policy, case.options)
    found = metrics(history)
    assert not found.failed
    return found.average_s


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES)[1:])
    parser.add_argument("--changes", type=float, nargs="+", default=[0.15, 1.0])
    given = parser.parse_args()
    workloads.row("policy", *(f"changes {x:g}" for x in given.changes))
    workloads.row(*["---"] * (1 + len(given.changes)))
    ours: dict[float, list[float]] = {}
    for name in ("goodput", *given.policies):
        make = POLICIES[name]
        cells: list[str] = []
        for changes in given.changes:
            seeds = range(given.first, given.first + given.seeds)
            states = name == STATED
            cases = [case_of(seed, changes, states_steps=states) for seed in seeds]
            found = [average_s(case, make()) for case in cases]
            base = ours.setdefault(changes, found)
            cells.append(f"{np.exp(np.mean(np.log(np.divide(found, base)))):.3f}")
        workloads.row(name, *cells)


if __name__ == "__main__":
    main()
