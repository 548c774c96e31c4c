"""Tests allocations by brute force, and the proved gap on larger instances."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_solver import (
    AllocationProblem,
    Status,
    check_allocation,
    solve_allocation,
)
from autopar_solver.allocation import solve as rounds
from autopar_solver.ilp.highs import Backend, StopCriteria


def brute_force(problem: AllocationProblem) -> float:
    """The best value over all choices; minus infinity if no choice is feasible."""
    ways = [
        [*np.flatnonzero(problem.jobs == job), *([] if problem.required[job] else [-1])]
        for job in range(problem.num_jobs)
    ]
    best = -np.inf
    for choices in itertools.product(*ways):
        chosen = [int(option) for option in choices if option >= 0]
        used = np.bincount(
            problem.kinds[chosen], problem.counts[chosen], len(problem.budgets)
        )
        if np.all(used <= problem.budgets):
            best = max(best, float(problem.values[chosen].sum()))
    return best


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    kinds = draw(st.integers(1, 3))
    option = st.tuples(
        st.integers(-2, 30).map(float), st.integers(0, kinds - 1), st.integers(1, 5)
    )
    rows = draw(st.lists(st.lists(option, max_size=4), max_size=5))
    budgets = draw(st.lists(st.integers(0, 8), min_size=kinds, max_size=kinds))
    required = [bool(row) and draw(st.booleans()) for row in rows]
    return AllocationProblem.of(rows, budgets, required)


@settings(max_examples=examples(150), deadline=None)
@given(problems(), st.sampled_from(["table", "whole", "thresholds"]))
def test_the_value_is_that_of_brute_force(problem: AllocationProblem, way: str):
    """All three ways: the table of one kind, one program, and growing programs."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "table":
            patch.setattr(rounds, "_MOST_CELLS", -1)
        if way == "thresholds":
            patch.setattr(rounds, "_WHOLE", -1)
        solution = solve_allocation(problem, gap=1e-9)
    best = brute_force(problem)
    if best == -np.inf:
        assert solution.status is Status.INFEASIBLE
        assert not solution.choices
        return
    assert check_allocation(problem, solution) == pytest.approx(best)
    assert solution.bound >= best - 1e-6
    assert solution.status is Status.OPTIMAL


def instance(seed: int, jobs: int, budgets: list[int]) -> AllocationProblem:
    random = np.random.default_rng(seed)
    counts = np.array([1, 2, 4, 8, 16])
    rows = []
    for _ in range(jobs):
        speeds, power = random.lognormal(0.0, 0.7, len(budgets)), random.uniform(0.3, 1)
        rows.append(
            [
                (float(speed * count**power), kind, int(count))
                for kind, speed in enumerate(speeds)
                for count in counts
            ]
        )
    return AllocationProblem.of(rows, budgets)


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
@pytest.mark.parametrize("seed", range(3))
def test_the_gap_of_a_large_instance_is_certified(seed: int):
    problem = instance(seed, 150, [96, 96, 64])
    solution = solve_allocation(problem, gap=1e-4)
    check_allocation(problem, solution)
    assert solution.status is Status.OPTIMAL
    assert solution.gap <= 1e-4
    # Another back end proves another solution: each is below the other's bound.
    exact = solve_allocation(problem, gap=1e-4, backend="cbc")
    assert exact.value <= solution.bound + 1e-9
    assert solution.value <= exact.bound + 1e-9


def test_a_later_program_starts_from_what_was_found(monkeypatch: pytest.MonkeyPatch):
    """The start is a choice of the open options that keeps what is fixed."""
    starts: list[np.ndarray] = []
    solve_core = rounds.solve_core

    def watched(
        problem: AllocationProblem,
        options: np.ndarray,
        budgets: np.ndarray,
        backend: Backend,
        stop: StopCriteria,
        start: np.ndarray | None = None,
    ) -> tuple[np.ndarray | None, float]:
        if start is not None:
            chosen = options[np.isin(options, start)]
            starts.append(problem.jobs[chosen])
            used = np.bincount(
                problem.kinds[chosen], problem.counts[chosen], len(budgets)
            )
            assert np.all(used <= budgets)
        return solve_core(problem, options, budgets, backend, stop, start)

    monkeypatch.setattr(rounds, "solve_core", watched)
    monkeypatch.setattr(rounds, "_CORE_JOBS", 4)
    for seed in range(4):
        problem = instance(seed, 150, [96, 96, 64])
        solution = solve_allocation(problem, gap=1e-7)
        check_allocation(problem, solution)
        assert solution.gap <= 1e-7
    assert starts
    assert all(len(set(jobs)) == len(jobs) for jobs in starts)


def test_the_same_problem_has_the_same_choices():
    problem = instance(7, 60, [40, 24])
    assert solve_allocation(problem).choices == solve_allocation(problem).choices


def test_a_required_job_gets_an_option_that_is_worth_less():
    rows = [[(1.0, 0, 4)], [(9.0, 0, 4)]]
    free = solve_allocation(AllocationProblem.of(rows, [4]))
    held = solve_allocation(AllocationProblem.of(rows, [4], [True, False]))
    assert (free.choices, held.choices) == ((-1, 1), (0, -1))


def test_required_jobs_that_do_not_fit_are_infeasible():
    rows = [[(1.0, 0, 3)], [(1.0, 0, 3)]]
    for budgets in ([5], [5, 9]):
        problem = AllocationProblem.of(rows, budgets, [True, True])
        assert solve_allocation(problem).status is Status.INFEASIBLE


@pytest.mark.parametrize(
    ("options", "budgets", "words"),
    [
        ([[(float("nan"), 0, 1)]], [1], "option 0 of job 0 is worth nan"),
        ([[(1.0, 2, 1)]], [1], "kinds go from 0 to 0"),
        ([[(1.0, 0, 0)]], [1], "at least 1 device"),
    ],
)
def test_wrong_arrays_are_refused(
    options: list[list[tuple[float, int, int]]], budgets: list[int], words: str
):
    with pytest.raises(ValueError, match=words):
        AllocationProblem.of(options, budgets)
