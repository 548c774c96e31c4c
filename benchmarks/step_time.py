"""Measured step time on 8 simulated devices: our plan and every expert plan.

    python benchmarks/step_time.py [--profile FILE] [--rounds 30] [example ...]

The plans are made for the local machine (from its saved profile, if there is one), and
run in turns. The time of a plan is the median of its turns. The 95 % interval of the
ratio of our plan to the best expert plan comes from 2,000 resamples of whole rounds,
because a round that was slow for one plan was slow for all. A pair of plans whose times
differ by more than 10 % is misordered if the slower plan was predicted to be faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping

import jax
import numpy as np
import workloads

from autopar.cluster import Cluster
from autopar.planner.candidate import SearchResult
from autopar.planner.experts import expert_plans
from autopar.planner.record import make_plan
from autopar.planner.search import search
from autopar.plans import Plan
from autopar.runtime.timing import timed_turns
from autopar.steps.analysis import Analysis, analyse

OURS = "autopar"
RESAMPLES = 2000
APART = 1.1


def plans_of(
    analysis: Analysis, cluster: Cluster, seconds: float
) -> Iterator[tuple[str, Plan]]:
    """Yields our plan first, then the experts' plans that fit."""
    experts = expert_plans(analysis, cluster, seconds=seconds)
    starts = [e.candidate for e in experts if e.candidate is not None]
    result = search(analysis, cluster, seconds=seconds, starts=starts)
    yield OURS, make_plan(analysis, result)
    for expert in experts:
        if expert.candidate is not None:
            mesh = expert.candidate.pricer.mesh
            found = SearchResult(expert.candidate, ((mesh, expert.candidate),), 0.0)
            yield f"{expert.name}, {expert.mesh}", make_plan(analysis, found)


def interval(ours: np.ndarray, best: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the ratio of two medians over the same rounds."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(ours), (RESAMPLES, len(ours)))
    ratios = np.median(ours[chosen], axis=1) / np.median(best[chosen], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def misordered(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> tuple[list[tuple[str, str]], int]:
    """The misordered pairs, the faster plan first, and the number of pairs."""
    wrong, pairs = [], 0
    for one, other in itertools.combinations(measured, 2):
        fast, slow = sorted((one, other), key=lambda name: measured[name])
        if measured[slow] < APART * measured[fast]:
            continue
        pairs += 1
        if predicted[fast] > predicted[slow]:
            wrong.append((fast, slow))
    return wrong, pairs


def main() -> int:
    """Prints the table; returns 1 if our plan takes more than 1.03 of the best expert
    plan.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--profile", default=None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--out", type=pathlib.Path, help="all turns, as JSON lines")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    cluster = Cluster.from_toml(options.profile) if options.profile else Cluster.local()
    workloads.row(
        "example", "plan", "predicted ms", "measured ms", "measured: ours / this one"
    )
    workloads.row(*["---"] * 5)
    over, wrong, pairs = 0, 0, 0
    said = []
    for name in options.examples or workloads.EXAMPLES:
        analysis = analyse(*workloads.arguments(name))
        plans = dict(plans_of(analysis, cluster, options.seconds))
        turns = timed_turns(
            analysis, plans, repeats=options.rounds, steps=options.steps
        )
        took = {plan: float(np.median(found)) for plan, found in turns.items()}
        expected = {plan: found.predicted.step_s for plan, found in plans.items()}
        for plan, seconds in sorted(took.items(), key=lambda item: item[1]):
            workloads.row(
                name, plan, f"{expected[plan] * 1e3:.2f}",
                f"{seconds * 1e3:.2f}", f"{took[OURS] / seconds:.3f}",
            )  # fmt: skip
        best = min((p for p in took if p != OURS), key=lambda plan: took[plan])
        low, high = interval(np.array(turns[OURS]), np.array(turns[best]))
        found, number = misordered(expected, took)
        over, wrong, pairs = over + (low > 1.03), wrong + len(found), pairs + number
        ratio = took[OURS] / took[best]
        said.append((name, best, ratio, low, high, f"{len(found)} of {number}"))
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                line = {"example": name, "predicted": expected, "turns": turns}
                file.write(json.dumps(line) + "\n")
    print()
    workloads.row(
        "example", "best expert", "ours / best", "95 % interval", "wrong pairs"
    )
    workloads.row(*["---"] * 5)
    for name, best, ratio, low, high, share in said:
        workloads.row(name, best, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", share)
    print(f"\n{wrong} of {pairs} pairs that are over 10 % apart are misordered.")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
