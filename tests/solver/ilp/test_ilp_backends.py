"""Tests both ILP back ends on small programs by brute force."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_solver.ilp.backends import backend_of, solve_cbc
from autopar_solver.ilp.highs import (
    IntegerProgram,
    StopCriteria,
    solve_highs,
    solve_without_integrality,
)

# PuLP 3.3 warns of its own way to start CBC.
pytestmark = pytest.mark.filterwarnings(
    "ignore:PULP_CBC_CMD is deprecated:DeprecationWarning"
)
BACKENDS = pytest.mark.parametrize("solver", [solve_highs, solve_cbc])
EXACT = StopCriteria(seconds=None, gap=1e-6)


def program_of(costs, equal, at_most, *, most=None, num_binary=None):
    """An integer program from dense rows ``(coefficients, right side)``."""
    rows = [*equal, *at_most]
    dense = [np.array(row, np.float64) for row, _ in rows]
    sides = np.array([side for _, side in rows], np.float64)
    lower = np.where(np.arange(len(rows)) < len(equal), sides, -np.inf)
    size = len(costs)
    return IntegerProgram(
        costs=np.array(costs, np.float64),
        most=np.ones(size) if most is None else np.array(most, np.float64),
        num_binary=size if num_binary is None else num_binary,
        starts=np.cumsum([0, *(np.count_nonzero(row) for row in dense)]),
        columns=np.concatenate([np.flatnonzero(row) for row in dense]),
        values=np.concatenate([row[row != 0] for row in dense]),
        lower=lower,
        upper=sides,
        names=tuple(f"limit_{r}" for r in range(len(at_most))),
    )


def random_program(seed):
    """Two or three groups with one choice of each, under one or two limits."""
    random = np.random.default_rng(seed)
    widths = random.integers(1, 4, random.integers(2, 4))
    size = int(widths.sum())
    group = np.repeat(np.arange(len(widths)), widths)
    equal = [((group == g) * 1.0, 1.0) for g in range(len(widths))]
    limits = [
        (random.integers(0, 6, size) * 1.0, float(random.integers(1, 12)))
        for _ in range(int(random.integers(1, 3)))
    ]
    most = (random.random(size) < 0.8) * 1.0
    costs = random.integers(-5, 10, size) * 1.0
    return program_of(costs, equal, limits, most=most)


def rows_of(program):
    """The constraint matrix ``A`` of a program as a dense matrix."""
    dense = np.zeros((program.num_rows, len(program.costs)))
    for row in range(program.num_rows):
        entries = slice(program.starts[row], program.starts[row + 1])
        dense[row, program.columns[entries]] = program.values[entries]
    return dense


def is_allowed(program, values, tolerance=1e-7):
    sums = rows_of(program) @ values
    return bool(
        (sums <= program.upper + tolerance).all()
        and (sums >= program.lower - tolerance).all()
        and (values >= -tolerance).all()
        and (values <= program.most + tolerance).all()
    )


def least_cost(program):
    """The least cost over all feasible 0-1 vectors."""
    best = math.inf
    for values in itertools.product((0.0, 1.0), repeat=len(program.costs)):
        if is_allowed(program, np.array(values)):
            best = min(best, float(np.array(values) @ program.costs))
    return best


def assert_best(program, answer):
    least = least_cost(program)
    assert answer.finished
    if math.isinf(least):
        assert answer.values is None
        assert answer.bound == math.inf
        return
    assert is_allowed(program, answer.values)
    assert float(answer.values @ program.costs) == pytest.approx(least, abs=1e-6)
    assert answer.bound <= least + 1e-9
    assert answer.bound == pytest.approx(least, abs=1e-5)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_highs_matches_brute_force(seed):
    program = random_program(seed)
    assert_best(program, solve_highs(program, EXACT, None))


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_reduced_program_matches_brute_force(seed):
    program = dataclasses.replace(random_program(seed), reduced=True)
    assert_best(program, solve_highs(program, EXACT, None))


@pytest.mark.parametrize("seed", range(25))
def test_cbc_matches_brute_force(seed):
    """Starting CBC takes a twentieth of a second: fewer programs."""
    program = random_program(seed)
    assert_best(program, solve_cbc(program, EXACT, None))


@BACKENDS
def test_a_variable_that_may_not_be_used_is_not(solver):
    """The first choice is cheapest, and forbidden by its bound alone."""
    program = program_of([-9.0, 1.0, 2.0], [([1, 1, 1], 1)], [], most=[0, 1, 1])
    answer = solver(program, EXACT, None)
    assert answer.values.tolist() == [0.0, 1.0, 0.0]


@BACKENDS
def test_nothing_allowed_is_an_infinite_bound(solver):
    program = program_of([1.0, 1.0], [([1, 1], 1)], [([2, 2], 1)])
    answer = solver(program, EXACT, None)
    assert (answer.values, answer.bound, answer.finished) == (None, math.inf, True)


@BACKENDS
def test_continuous_variables_may_be_fractions(solver):
    """One binary, one continuous; the limit stops the continuous one at a half."""
    program = program_of([-1.0, -1.0], [], [([1, 2], 2)], num_binary=1)
    answer = solver(program, EXACT, None)
    assert answer.values == pytest.approx([1.0, 0.5])
    whole = program_of([-1.0, -1.0], [], [([1, 2], 2)])
    assert sorted(solver(whole, EXACT, None).values.tolist()) == [0.0, 1.0]


@BACKENDS
@pytest.mark.parametrize("values", [[1, 0, 0, 1], [0, 1, 1, 0]])
def test_a_start_does_not_change_the_optimum(solver, values):
    """Neither the best values nor the worst, nor values that break the limit."""
    groups = [([1, 1, 0, 0], 1), ([0, 0, 1, 1], 1)]
    program = program_of([1.0, 2.0, 3.0, 5.0], groups, [([3, 1, 0, 2], 4)])
    assert_best(program, solver(program, EXACT, np.array(values, np.float64)))


@BACKENDS
def test_the_same_program_has_the_same_answer(solver):
    program = random_program(5)
    first, second = (solver(program, EXACT, None) for _ in range(2))
    assert first.bound == second.bound
    np.testing.assert_array_equal(first.values, second.values)


def test_nothing_is_below_a_cutoff_at_the_optimum():
    """HiGHS proves that no solution is cheaper than the cutoff."""
    program = program_of([3.0, 5.0], [([1, 1], 1)], [])
    stop = StopCriteria(seconds=None, gap=1e-6, cutoff=3.0 - 1e-3)
    answer = solve_highs(program, stop, None)
    assert answer.finished
    assert answer.values is None or float(answer.values @ program.costs) >= 3.0 - 1e-6
    assert answer.bound >= 3.0 - 1e-3 - 1e-6


def test_no_time_is_no_wrong_claim():
    program = random_program(2)
    stop = StopCriteria(seconds=0.0, gap=0.0)
    answer = solve_highs(program, stop, None)
    assert answer.bound <= least_cost(program) + 1e-9


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_relaxation_is_below_the_optimum(seed):
    """Fractions may only help, and satisfy every row."""
    program = random_program(seed)
    relaxed = solve_without_integrality(program)
    least = least_cost(program)
    if relaxed is None:
        assert math.isinf(least)
        return
    values, duals = relaxed
    assert is_allowed(program, values)
    assert float(values @ program.costs) <= least + 1e-7
    assert len(duals) == len(program.names)
    assert (duals >= -1e-9).all()


def test_duals_are_what_a_unit_less_would_cost():
    """Each unit under the limit of 3 saves 2: the cheap half is full."""
    loose = program_of([-2.0, -1.0], [], [([1, 1], 1.5)])
    tight = program_of([-2.0, -1.0], [], [([1, 1], 1.25)])
    (_, duals), (values, _) = map(solve_without_integrality, (loose, tight))
    assert duals == pytest.approx([1.0])
    assert values @ tight.costs == pytest.approx(-2.5 + 0.25 * duals[0])


def test_backends_by_name():
    assert backend_of("highs") is solve_highs
    assert backend_of("cbc") is solve_cbc
    with pytest.raises(ValueError, match=r"backend 'glop'.*\"highs\" and \"cbc\""):
        backend_of("glop")


def test_nothing_is_printed(capfd):
    """Also by the constructor, which prints in HiGHS 1.16."""
    solve_highs(random_program(3), EXACT, None)
    assert capfd.readouterr() == ("", "")
