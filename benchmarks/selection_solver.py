"""Chooses a codec per gradient with L-GreCo's program, an exact one, and ours.

python benchmarks/selection_solver.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import workloads

from autopar_solver import (
    CodecSelection,
    LGreCoProblem,
    Status,
    check_selection,
    solve_lgreco,
    solve_lgreco_ilp,
    solve_relaxation,
    solve_selection,
)

LAYERS = (11, 50, 200)
SEEDS = range(5)
TURNS = 3
LIMIT_S = 20.0
# Gap of the exact solver, relative to what the sizes of all layers can change; it is
# far smaller than the differences in the table.
EXACT_GAP = 1e-5
# L-GreCo's range of ranks around the reference rank, gamma = 1/2 to beta = 2.
REFERENCE_RANK = 12
RANKS = np.arange(6, 25)
LINKS_BYTES_PER_S = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}


def shapes(random: np.random.Generator, layers: int) -> list[tuple[int, int]]:
    """Rows and columns of random matrices, each from 64 to 4096."""
    return [(int(r), int(c)) for r, c in 2 ** random.integers(6, 13, (layers, 2))]


def spectrum(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Squared singular values that decay as a power law; the norms of gradients vary
    widely.
    """
    decay = random.uniform(0.4, 1.2)
    squares = np.arange(1.0, min(rows, columns) + 1) ** (-2 * decay)
    return squares / squares.sum() * random.lognormal(sigma=1.5)


def lgreco_problem(seed: int, layers: int) -> LGreCoProblem:
    """Choices of PowerSGD's rank: the tail of the spectrum is lost, and (rows +
    columns) rank elements are sent.
    """
    random = np.random.default_rng(seed)
    errors, sizes = [], []
    for rows, columns in shapes(random, layers):
        squares = spectrum(random, rows, columns)
        tails = np.append(np.cumsum(squares[::-1])[::-1], 0.0)
        errors.append(np.sqrt(tails[RANKS]))
        sizes.append((rows + columns) * RANKS.astype(float))
    reference = (int(np.flatnonzero(RANKS == REFERENCE_RANK)[0]),) * layers
    return LGreCoProblem(error=tuple(errors), size=tuple(sizes), reference=reference)


# For each codec: bits per element, fraction of the energy that is lost, and nanoseconds
# per element to encode and decode. The codecs are dense, two 16-bit formats, six
# quantisers, four codecs that send 25 to 1 % of the elements, and then PowerSGD.
FIXED = np.array(
    [
        [32.0, 0.0, 0.0],
        [16.0, 3e-6, 0.2],
        [8.06, 1e-4, 0.4],
        [6.06, 1.5e-3, 0.5],
        [4.06, 2.5e-2, 0.45],
        [4.06, 1.6e-2, 1.2],
        [3.06, 0.1, 0.5],
        [1.06, 0.4, 0.3],
        [8.0, 9e-3, 1.0],
        [3.2, 3.7e-2, 0.9],
        [1.6, 7.8e-2, 0.8],
        [0.32, 0.22, 0.7],
    ]
)
LOW_RANKS = np.array([1, 2, 4, 8, 16, 32])


def selection_problem(seed: int, gradients: int, link: float) -> CodecSelection:
    """18 codecs per gradient; the budget is the error of 4 bits for all gradients."""
    random = np.random.default_rng(seed)
    wire, local, error, elements, energies = [], [], [], [], []
    for rows, columns in shapes(random, gradients):
        squares = spectrum(random, rows, columns)
        size, energy = rows * columns, squares.sum()
        tails = np.append(np.cumsum(squares[::-1])[::-1], 0.0)
        lost = FIXED[:, 1] * random.lognormal(sigma=0.3) * energy
        low = (rows + columns) * LOW_RANKS * 32.0
        nanoseconds = np.append(FIXED[:, 2], 0.5 + 0.1 * LOW_RANKS)
        # A ring or two-shot sum over 4 workers sends 2 (4 - 1) / 4 of the payload.
        wire.append(np.append(FIXED[:, 0] * size, low) / 8 * 1.5 / link)
        local.append(nanoseconds * 1e-9 * size)
        error.append(np.append(lost, tails[np.minimum(LOW_RANKS, len(squares))]))
        elements.append(size)
        energies.append(energy)
    backward = 2e-8 * sum(elements)
    done = np.cumsum(elements[::-1])[::-1] / sum(elements)
    return CodecSelection(
        name=f"{gradients} gradients, {link:g} B/s, {seed}",
        wire_s=tuple(wire),
        local_s=tuple(local),
        error=tuple(error),
        ready_s=tuple((done * backward).tolist()),
        backward_s=backward,
        error_budget=2.5e-2 * sum(energies),
    )


def in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, tuple[Any, float]]:
    """The result and the median time of each call; the calls run in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Any] = {}
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            results[name] = call()
            times[name].append(time.perf_counter() - start)
    return {name: (results[name], statistics.median(times[name])) for name in calls}


def milliseconds(seconds: list[float]) -> str:
    """The median and the maximum over several instances, as text."""
    return f"{statistics.median(seconds) * 1e3:.0f} ({max(seconds) * 1e3:.0f})"


def lgreco_row(layers: int) -> None:
    """Medians over the seeds, maxima in brackets; sizes relative to the exact ones."""
    over, bound, programme_s, exact_s, proved = [], [], [], [], 0
    for seed in SEEDS:
        problem = lgreco_problem(seed, layers)
        tighter = problem.error_budget * (1 - layers / problem.buckets)
        found = in_turns(
            {
                "programme": lambda p=problem: solve_lgreco(p),
                "exact": lambda p=problem: solve_lgreco_ilp(
                    p, seconds=LIMIT_S, gap=EXACT_GAP
                ),
            }
        )
        exact = found["exact"][0]
        upper = solve_lgreco_ilp(
            problem, error_budget=tighter, seconds=LIMIT_S, gap=EXACT_GAP
        )
        proved += exact.status is upper.status is Status.OPTIMAL
        over.append(found["programme"][0].size / exact.size - 1)
        bound.append(upper.size / exact.size - 1)
        programme_s.append(found["programme"][1])
        exact_s.append(found["exact"][1])
    workloads.row(
        layers,
        f"{statistics.median(over):.2%} ({max(over):.2%})",
        f"{statistics.median(bound):.2%} ({max(bound):.2%})",
        milliseconds(programme_s),
        milliseconds(exact_s),
        f"{proved} of {len(SEEDS)}",
    )


def selection_row(link: str, gradients: int) -> None:
    """Medians over the seeds, maxima in brackets; gaps as fractions of the step."""
    times: dict[str, list[float]] = {"prices": [], "1e-3": [], "1e-4": []}
    gaps, statuses = [], []
    for seed in SEEDS:
        problem = selection_problem(seed, gradients, LINKS_BYTES_PER_S[link])
        found = in_turns(
            {
                "prices": lambda p=problem: solve_relaxation(p),
                "1e-3": lambda p=problem: solve_selection(p, seconds=LIMIT_S, gap=1e-3),
                "1e-4": lambda p=problem: solve_selection(p, seconds=LIMIT_S, gap=1e-4),
            }
        )
        for name in times:
            times[name].append(found[name][1])
        result = found["1e-4"][0]
        check_selection(problem, result)
        step = problem.backward_s + result.cost_s
        gaps.append((result.cost_s - found["prices"][0].bound_s) / step)
        statuses.append(result.status.name == "OPTIMAL")
    workloads.row(
        link,
        gradients,
        f"{statistics.median(gaps):.1e} ({max(gaps):.1e})",
        *(milliseconds(seconds) for seconds in times.values()),
        f"{sum(statuses)} of {len(statuses)}",
    )


def main() -> int:
    """Prints both tables; times in milliseconds."""
    workloads.row(
        "layers",
        "L-GreCo over exact",
        "proved to be at most",
        "L-GreCo ms",
        "exact ms",
        "proved exact",
    )
    workloads.row(*["---"] * 6)
    for layers in LAYERS:
        lgreco_row(layers)
    print()
    workloads.row(
        "link",
        "gradients",
        "cost over the prices' bound",
        "prices ms",
        "solve to 1e-3 ms",
        "solve to 1e-4 ms",
        "proved to 1e-4",
    )
    workloads.row(*["---"] * 7)
    for link in LINKS_BYTES_PER_S:
        for gradients in LAYERS:
            selection_row(link, gradients)
    return 0


if __name__ == "__main__":
    sys.exit(main())
