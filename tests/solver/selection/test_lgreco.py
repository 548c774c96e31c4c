"""Tests that the dynamic programme is L-GreCo's, and within its proved error."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar_solver import LGreCoProblem, Status, solve_lgreco, solve_lgreco_ilp
from autopar_solver.selection.lgreco import rounded_errors


def random_problem(seed: int) -> LGreCoProblem:
    """A problem of integers, so that sums and comparisons in the tests are exact."""
    random = np.random.default_rng(seed)
    widths = random.integers(1, 5, random.integers(1, 5))
    return LGreCoProblem(
        error=tuple(random.integers(0, 12, w).astype(float) for w in widths),
        size=tuple(random.integers(0, 9, w).astype(float) for w in widths),
        reference=tuple(int(random.integers(0, w)) for w in widths),
        alpha=float(random.choice([0.0, 0.5, 1.0, 2.0])),
        buckets=int(random.integers(1, 40)),
    )


def power_sgd(seed: int, layers: int, **options) -> LGreCoProblem:
    """Ranks 1 to 18 of layers whose singular values decay by a power law."""
    random = np.random.default_rng(seed)
    errors, sizes = [], []
    for _ in range(layers):
        singular = random.lognormal() * np.arange(1, 129.0) ** -random.uniform(0.3, 1.5)
        errors.append(np.sqrt(np.cumsum(singular[::-1] ** 2)[::-1])[1:19])
        sizes.append(np.arange(1, 19.0) * random.integers(256, 4096))
    return LGreCoProblem(
        error=tuple(errors), size=tuple(sizes), reference=(7,) * layers, **options
    )


problems = st.integers(0, 10**6).map(random_problem)


def sums(problem, rows):
    """Yields ``(choices, sum of rows)`` for every combination of choices."""
    for choices in itertools.product(*(range(len(row)) for row in problem.error)):
        yield choices, sum(row[k] for row, k in zip(rows, choices, strict=True))


def least(problem, budget):
    """The least size whose errors are within a budget, by brute force."""
    sizes = dict(sums(problem, problem.size))
    fitting = (c for c, error in sums(problem, problem.error) if error <= budget)
    return min((sizes[c] for c in fitting), default=math.inf)


def check(problem, result, budget):
    """Checks that the result's size and error are the sums over its choices."""
    if result.status is Status.INFEASIBLE:
        assert (result.choices, result.size) == ((), math.inf)
        return
    assert result.status is Status.OPTIMAL
    chosen = list(enumerate(result.choices))
    assert result.size == math.fsum(problem.size[i][k] for i, k in chosen)
    assert result.error == math.fsum(problem.error[i][k] for i, k in chosen)
    assert result.error_budget == budget
    assert result.error <= budget * (1 + 1e-9)


def published(problem):
    """The choices by the published code's tables; None if the tables contain none.

    As in that code, the first layer needs more buckets than its error. Errors are
    clipped.
    """
    layers, top = len(problem.error), problem.buckets + 1
    q = rounded_errors(problem)
    table = np.full((layers, top), np.inf)
    taken = np.full((layers, top), -1)
    for layer in range(layers):
        for e, k in itertools.product(range(top), range(len(q[layer]))):
            cost = q[layer][k]
            if layer == 0:
                below = 0.0 if e > cost else np.inf
            else:
                below = table[layer - 1, e - cost] if e >= cost else np.inf
            if below + problem.size[layer][k] < table[layer, e]:
                table[layer, e] = below + problem.size[layer][k]
                taken[layer, e] = k
    e = int(np.argmin(table[-1]))
    if table[-1, e] == np.inf:
        return None
    choices = []
    for layer in reversed(range(layers)):
        choices.append(int(taken[layer, e]))
        e -= int(q[layer][choices[-1]])
    return tuple(reversed(choices))


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_choices_are_the_published_ones(problem):
    """Ties included."""
    result = solve_lgreco(problem)
    check(problem, result, problem.error_budget)
    assert (result.choices or None) == published(problem)


@settings(max_examples=examples(300), deadline=None)
@given(problems)
def test_between_two_exact_optima(problem):
    """The statement of the module's docstring."""
    budget, layers = problem.error_budget, len(problem.error)
    part = budget / problem.buckets
    below = solve_lgreco(problem)
    assert below.size >= least(problem, budget)
    if layers < problem.buckets:
        assert below.size <= least(problem, budget - layers * part)
    whole = solve_lgreco(problem, whole_budget=True)
    check(problem, whole, budget)
    assert least(problem, budget) <= whole.size <= below.size
    if layers <= problem.buckets:
        assert whole.size <= least(problem, budget - (layers - 1) * part)


@settings(max_examples=examples(60), deadline=None)
@given(problems)
def test_one_layer_is_exact(problem):
    """L - 1 = 0: with the whole budget, rounding costs one layer nothing."""
    one = dataclasses.replace(
        problem,
        error=problem.error[:1],
        size=problem.size[:1],
        reference=problem.reference[:1],
    )
    result = solve_lgreco(one, whole_budget=True)
    assert result.size == least(one, one.error_budget)


@settings(max_examples=examples(150), deadline=None)
@given(problems)
def test_ilp_matches_brute_force(problem):
    result = solve_lgreco_ilp(problem)
    check(problem, result, problem.error_budget)
    assert result.size == least(problem, problem.error_budget)


@pytest.mark.parametrize("seed", range(3))
def test_realistic_layers(seed):
    """Between the exact optima of the two budgets, on layers of 18 ranks."""
    problem = power_sgd(seed, layers=12, buckets=500)
    result = solve_lgreco(problem)
    check(problem, result, problem.error_budget)
    exact = solve_lgreco_ilp(problem)
    tighter = problem.error_budget * (1 - 12 / 500)
    upper = solve_lgreco_ilp(problem, error_budget=tighter)
    check(problem, upper, tighter)
    assert exact.size <= result.size <= upper.size
    assert exact.size < upper.size


# PuLP 3.3 warns of its own way to start CBC, which `autopar_solver.ilp.backends` uses.
@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
def test_cbc_agrees():
    problem = power_sgd(5, layers=6)
    exact = solve_lgreco_ilp(problem)
    assert solve_lgreco_ilp(problem, backend="cbc").size == exact.size


def test_more_buckets_than_needed_change_nothing():
    """With 10,000 buckets three layers of the example are solved exactly."""
    problem = power_sgd(1, layers=3)
    assert solve_lgreco(problem).size == solve_lgreco_ilp(problem).size


def test_rounded_errors_follow_the_formula():
    problem = LGreCoProblem(
        error=(np.array([0.0, 0.05, 1.0, 3.0, 9.0, np.inf]), np.array([3.0])),
        size=(np.ones(6), np.ones(1)),
        reference=(2, 0),
        buckets=10,
    )
    # E = 1 + 3 = 4; 10 parts of 0.4: 0 and 0.05 take 1, 1 takes ceil(2.5) = 3, 3 takes
    # ceil(7.5) = 8, 9 and inf are clipped to 10.
    first, second = rounded_errors(problem)
    assert first.tolist() == [1, 1, 3, 8, 10, 10]
    assert second.tolist() == [8]


def test_clipped_errors_are_not_chosen():
    """A layer over the budget alone takes all buckets, and one always stays unused."""
    problem = LGreCoProblem(
        error=(np.array([9.0, 1.0]),),
        size=(np.array([1.0, 5.0]),),
        reference=(1,),
        alpha=2.0,
        buckets=4,
    )
    assert rounded_errors(problem)[0].tolist() == [4, 2]
    for whole in (False, True):
        assert solve_lgreco(problem, whole_budget=whole).choices == (1,)


def test_the_reference_may_be_over_its_own_budget():
    """Two layers of 1/2 E take 5 + 5 of 10 buckets: one too many for the code."""
    problem = LGreCoProblem(
        error=(np.ones(1), np.ones(1)),
        size=(np.ones(1), np.ones(1)),
        reference=(0, 0),
        buckets=10,
    )
    assert solve_lgreco(problem).status is Status.INFEASIBLE
    assert solve_lgreco(problem, whole_budget=True).choices == (0, 0)
    assert solve_lgreco_ilp(problem).choices == (0, 0)


def test_more_layers_than_buckets_have_no_solution():
    problem = LGreCoProblem(
        error=(np.zeros(1),) * 5,
        size=(np.ones(1),) * 5,
        reference=(0,) * 5,
        buckets=4,
    )
    assert solve_lgreco(problem, whole_budget=True).status is Status.INFEASIBLE


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_no_budget_leaves_what_is_exact(alpha):
    """E = 0, by alpha or because the reference loses nothing."""
    problem = LGreCoProblem(
        error=(np.array([1.0, 0.0, 0.0]), np.array([2.0, 0.0])),
        size=(np.array([1.0, 4.0, 3.0]), np.array([1.0, 2.0])),
        reference=(1, 1) if alpha else (0, 0),
        alpha=alpha,
    )
    assert problem.error_budget == 0.0
    assert solve_lgreco(problem).choices == (2, 1)
    assert solve_lgreco_ilp(problem).choices == (2, 1)
    lossy = dataclasses.replace(
        problem,
        error=(problem.error[0], np.ones(2)),
        alpha=0.0,
    )
    assert solve_lgreco(lossy).status is Status.INFEASIBLE
    assert solve_lgreco_ilp(lossy).status is Status.INFEASIBLE


def test_ties_take_the_first_parameter_and_the_least_error():
    problem = LGreCoProblem(
        error=(np.array([3.0, 1.0, 1.0]),),
        size=(np.array([2.0, 2.0, 2.0]),),
        reference=(0,),
        alpha=4.0,
        buckets=12,
    )
    assert solve_lgreco(problem).choices == (1,)


@pytest.mark.parametrize("gap", [1e-1, 1e-3])
def test_gap_is_a_share_of_what_choices_change(gap):
    problem = power_sgd(3, layers=15)
    span = sum(float((row - row.min()).sum()) for row in problem.size)
    exact, near = solve_lgreco_ilp(problem), solve_lgreco_ilp(problem, gap=gap)
    check(problem, near, problem.error_budget)
    assert exact.size <= near.size <= exact.size + gap * span


def test_no_time_is_no_answer():
    """Out of time is not infeasible."""
    problem = power_sgd(0, layers=120)
    result = solve_lgreco_ilp(problem, seconds=0.0)
    assert result.status in (Status.UNKNOWN, Status.FEASIBLE)


GOOD = {
    "error": (np.array([1.0, 0.0]),),
    "size": (np.array([1.0, 2.0]),),
    "reference": (0,),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": ()}, "must name the same layers"),
        ({"error": (), "size": (), "reference": ()}, "at least one"),
        ({"alpha": -1.0}, "alpha must be finite and not negative, got -1.0"),
        ({"alpha": math.nan}, "alpha"),
        ({"buckets": 0}, "buckets must be positive, got 0"),
        ({"error": (np.zeros(3),)}, r"layer 0: .* shapes \(3,\) and \(2,\)"),
        ({"error": (np.array([1.0, -1.0]),)}, "layer 0: errors must be numbers"),
        ({"error": (np.array([1.0, math.nan]),)}, "layer 0: errors must be numbers"),
        ({"size": (np.array([1.0, math.inf]),)}, "sizes finite"),
        ({"reference": (2,)}, "the reference must name .* got 2"),
        ({"error": (np.array([math.inf, 0.0]),)}, "parameter of finite error, got 0"),
    ],
)
def test_bad_problems_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        LGreCoProblem(**{**GOOD, **change})


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend 'glop'"):
        solve_lgreco_ilp(LGreCoProblem(**GOOD), backend="glop")
