"""Compares intermediate figures of the allocation solver with golden files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from figures import arrays_of, digest, row
from golden import assert_golden

from autopar_solver import AllocationProblem, Status, solve_allocation
from autopar_solver.allocation import solve as rounds
from autopar_solver.ilp.backends import BackendName, backend_of
from autopar_solver.ilp.highs import Backend, IntegerProgram, ProgramAnswer


def problem_of(seed: int) -> AllocationProblem:
    """Jobs with options on up to three kinds of devices; some jobs are required."""
    random = np.random.default_rng(seed)
    kinds, jobs = int(random.integers(1, 4)), int(random.integers(2, 14))
    rows = [
        [
            (float(random.uniform(-1, 20)), int(random.integers(kinds)), 2**k)
            for k in range(int(random.integers(1, 5)))
        ]
        for _ in range(jobs)
    ]
    required = [bool(random.random() < 0.2) for _ in rows]
    budgets = random.integers(2, 3 * jobs, kinds).tolist()
    return AllocationProblem.of(rows, budgets, required)


def lines_of(problem: AllocationProblem, gap: float) -> Iterator[str]:
    """Lines of each tried threshold, of the bound proved at it, and of the result."""
    log: list[tuple[float, float]] = []
    run = rounds._Rounds._with_open

    def noted(self: Any, lost: np.ndarray, threshold: float, found: Any) -> Any:
        answer = run(self, lost, threshold, found)
        log.append((threshold, answer[1]))
        return answer

    programs: list[str] = []

    def noted_backend(name: BackendName) -> Backend:
        solve = backend_of(name)

        def run(program: IntegerProgram, *given: Any) -> ProgramAnswer:
            programs.append(row("program", arrays_of(program)))
            return solve(program, *given)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds._Rounds, "_with_open", noted)
        patch.setattr(rounds, "backend_of", noted_backend)
        found = solve_allocation(problem, gap=gap, seconds=None)
    yield row(
        "solution",
        status=found.status.name,
        value=found.value,
        bound=found.bound,
        gap=found.gap if found.choices else 0.0,
        choices=found.choices,
    )
    yield from programs
    if log:
        yield row("thresholds", each=[x for pair in log for x in pair])


def test_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_CORE_JOBS", 2)
    lines: list[str] = []
    for seed in range(40):
        problem = problem_of(seed)
        priced = rounds.relax(rounds.Segments(problem))
        lines += ["", f"problem {seed}"]
        lines.append(
            row(
                "relaxed",
                bound=priced.bound,
                prices=list(priced.prices),
                left=digest(priced.left),
                best=digest(priced.best),
            )
        )
        lines += lines_of(problem, 1e-4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "_MOST_CELLS", -1)
            lines += lines_of(problem, 1e-9)
            patch.setattr(rounds, "_WHOLE", -1)
            lines += lines_of(problem, 0.02)

    assert_golden("\n".join(lines).strip(), "searches/allocation.txt")


def test_thresholds_rise_until_nothing_better_is_left_out() -> None:
    """Without a choice up to the largest loss; with one to where none is better."""
    problem = problem_of(0)
    priced = rounds.relax(rounds.Segments(problem))
    run = rounds._Rounds(problem, priced, backend_of("highs"), 0.1, None)
    lost = np.array([0.0, 2.0, 5.0])
    none = rounds._none(Status.UNKNOWN)
    found = dataclasses.replace(none, choices=(0,), value=80.0)

    assert run._raise_threshold(1.0, none, 100.0, lost) == 3.0
    assert run._raise_threshold(0.0, none, 100.0, lost) == pytest.approx(1e-4)
    assert run._raise_threshold(5 / 3, none, 100.0, lost) == pytest.approx(5.0)
    assert run._raise_threshold(2.0, none, 100.0, lost) == np.inf
    # From 20 on no choice is better, from 12.8 on by no more than the gap.
    assert run._raise_threshold(1.0, found, 100.0, lost) == 4.0
    assert run._raise_threshold(4.0, found, 100.0, lost) == pytest.approx(12.8)
    assert run._raise_threshold(12.8, found, 100.0, lost) == pytest.approx(20.0)
    assert run._raise_threshold(20.0, found, 100.0, lost) == np.inf
