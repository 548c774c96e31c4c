"""Solves allocations of devices to jobs, and prints seconds and gaps.

    python benchmarks/allocation.py [--seeds 5]

The problems are random, drawn by seed. The goodput of each job is a concave function of
its devices, with a different speed on each of three kinds of devices. A configuration
is a power of two of devices inside a node of 8, or a number of whole nodes. Seconds are
the median and the maximum over the seeds; the gap is the maximum.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer

from autopar_solver import AllocationProblem, check_allocation, solve_allocation

PER_NODE = 8
KINDS = 3
# Number of devices, number of jobs, and limit of CPU seconds for a solve.
SIZES = ((64, 32, 0.1), (1024, 512, 0.3), (4096, 2048, 2.0))


def instance(devices: int, jobs: int, seed: int) -> AllocationProblem:
    """One problem; each kind has a third of the devices."""
    random = np.random.default_rng(seed)
    budget = devices // KINDS // PER_NODE * PER_NODE
    budgets = [budget, budget, devices - 2 * budget]
    # A job gets at most 8 nodes of a kind.
    counts = np.array([1, 2, 4, *range(PER_NODE, 9 * PER_NODE, PER_NODE)])
    counts = counts[counts <= max(budgets)]
    rows: list[list[tuple[float, int, int]]] = []
    for _ in range(jobs):
        speed = random.lognormal(0.0, 0.7, KINDS)
        power, weight = random.uniform(0.3, 0.95), random.lognormal(0.0, 1.0)
        noise = random.uniform(0.95, 1.05, (KINDS, len(counts)))
        worth = weight * speed[:, None] * counts**power * noise
        rows.append(
            [
                (float(worth[k, c]), k, int(counts[c]))
                for k in range(KINDS)
                for c in range(len(counts))
                if counts[c] <= budgets[k]
            ]
        )
    return AllocationProblem.of(rows, budgets)


def run(seeds: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """Prints a row for each size."""
    print("| devices | jobs | options | CPU s | most | limit s | gap |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for devices, jobs, limit in SIZES:
        spent: list[float] = []
        gaps: list[float] = []
        options = 0
        for seed in range(seeds):
            problem = instance(devices, jobs, seed)
            begin = time.process_time()
            solution = solve_allocation(problem)
            spent.append(time.process_time() - begin)
            check_allocation(problem, solution)
            gaps.append(solution.gap)
            options = len(problem.jobs)
        print(
            f"| {devices:,} | {jobs:,} | {options:,} | {np.median(spent):.3f} | "
            f"{max(spent):.3f} | {limit:g} | {max(gaps):.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(run)
