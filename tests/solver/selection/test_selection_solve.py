"""Tests codec selections by brute force, and that bounds never exceed the optimum."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from selection_problems import (
    all_costs,
    assert_best,
    best,
    exposed_by_definition,
    problems,
)

import autopar_solver.selection.solve as selection_solve
from autopar_solver import (
    CodecSelection,
    Status,
    recompute,
    solve_relaxation,
    solve_selection,
    wire_weights,
)
from autopar_solver.clock import Clock
from autopar_solver.selection.problem import check_selection, fits_budgets, options_of
from autopar_solver.selection.program import build_program, relax
from autopar_solver.selection.solve import descend, search_labels


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_matches_brute_force(problem):
    assert_best(problem, solve_selection(problem, gap=0.0))


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_integer_program_alone_matches_brute_force(problem):
    assert_best(problem, solve_selection(problem, gap=0.0, widths=()))


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_labels_alone_match_brute_force(problem):
    """As many labels as there are: nothing is left for the integer program."""

    def unused(*_):
        raise AssertionError("the integer program was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_solve, "backend_of", lambda _: unused)
        assert_best(problem, solve_selection(problem, gap=0.0, widths=(1024,)))


@settings(max_examples=examples(200), deadline=None)
@given(problems, st.integers(1, 3))
def test_few_labels_prove_a_true_bound(problem, width):
    """What was cut for the width is not better than the bound."""
    options = options_of(problem)
    if options is None:
        return
    relaxed = relax(problem, build_program(problem, options))
    if relaxed is None:
        return
    clock = Clock(0.0, None)
    answer = search_labels(
        problem, options, relaxed, cutoff_s=math.inf, width=width, clock=clock
    )
    assert answer is not None
    least = best(problem)
    assert answer.bound_s <= least + 1e-9
    if answer.chosen is not None:
        cost = recompute(problem, in_numbering(problem, options, answer.chosen))
        assert fits_budgets(problem, cost)
        assert least <= cost.cost_s + 1e-9


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_descent_stays_within_the_budgets_and_improves(problem):
    """From any choice that fits to one that no single change improves."""
    options = options_of(problem)
    possible = [choices for choices, _ in all_costs(problem)]
    if options is None or not possible:
        return
    kept = {
        in_numbering(problem, options, chosen): chosen
        for chosen in map(np.array, itertools.product(*parts(options)))
    }
    begin = next((choices for choices in possible if choices in kept), None)
    assert begin is not None
    chosen = descend(problem, options, kept[begin])
    reached = recompute(problem, in_numbering(problem, options, chosen))
    assert fits_budgets(problem, reached)
    assert reached.cost_s <= recompute(problem, begin).cost_s + 1e-9
    for place, own in enumerate(parts(options)):
        for option in own:
            other = chosen.copy()
            other[place] = option
            cost = recompute(problem, in_numbering(problem, options, other))
            assert (
                not fits_budgets(problem, cost) or cost.cost_s >= reached.cost_s - 1e-9
            )


def test_descent_exchanges_two():
    """Neither change alone helps: one breaks the budget, the other costs time."""
    problem = CodecSelection(
        wire_s=(np.array([1.0, 2.0]), np.array([5.0, 2.0])),
        local_s=(np.zeros(2),) * 2,
        error=(np.array([1.0, 0.0]), np.array([0.0, 1.0])),
        ready_s=(0.0, 0.0),
        backward_s=0.0,
        error_budget=1.0,
    )
    options = options_of(problem)
    assert options is not None
    assert descend(problem, options, np.array([0, 2])).tolist() == [1, 3]


def parts(options):
    """The indices of the options of each gradient, in the link's order."""
    return np.split(np.arange(len(options.gradient)), options.starts[1:-1])


def in_numbering(problem, options, chosen):
    """The codec of each gradient, in the problem's order."""
    codecs = dict(zip(problem.order, options.codec[chosen], strict=True))
    return tuple(int(codecs[index]) for index in range(len(codecs)))


@settings(max_examples=examples(100), deadline=None)
@given(problems)
def test_default_gap(problem):
    """Within 1e-4 of the step, and never a bound above the best."""
    result = solve_selection(problem)
    check_selection(problem, result)
    least = best(problem)
    assert math.isinf(least) == (result.status is Status.INFEASIBLE)
    if not math.isinf(least):
        step = problem.backward_s + least
        assert least <= result.cost_s + 1e-9 <= least + 1e-4 * step + 2e-9
        assert result.bound_s <= least + 1e-9


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_prices_prove_their_bound(problem):
    """The bound is the formula at the prices, and below the best."""
    relaxation = solve_relaxation(problem)
    least = best(problem)
    if relaxation.status is Status.INFEASIBLE:
        assert math.isinf(least)
        assert relaxation.wire_weights == ()
        return
    assert relaxation.bound_s <= least + 1e-9
    in_order = [relaxation.wire_weights[i] for i in problem.order]
    assert in_order == sorted(in_order)
    assert all(0.0 <= weight <= 1.0 for weight in in_order)
    assert min(relaxation.seconds_per_error, relaxation.seconds_per_byte) >= 0
    for choices, cost in all_costs(problem):
        assert lagrangian(problem, relaxation, choices) <= cost + 1e-7


def lagrangian(problem, relaxation, choices):
    """The Lagrangian of choices: their prices, less those of budgets and readiness."""
    priced = relaxation.option_prices(problem)
    total = sum(float(row[k]) for row, k in zip(priced, choices, strict=True))
    before = 0.0
    for index in problem.order:
        weight = relaxation.wire_weights[index]
        total += (weight - before) * (problem.ready_s[index] - problem.backward_s)
        before = weight
    if relaxation.seconds_per_error:
        total -= relaxation.seconds_per_error * problem.error_budget
    if relaxation.seconds_per_byte:
        total -= relaxation.seconds_per_byte * problem.memory_budget_bytes
    return total


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_exposed_time_is_the_definition(problem):
    """Running the link gives what the unrolled formula gives."""
    choices = tuple(size - 1 for size in problem.num_options)
    if not math.isfinite(recompute(problem, choices).wire_s):
        return
    exposed = exposed_by_definition(problem, choices)
    assert recompute(problem, choices).exposed_s == exposed


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_weights_are_derivatives(problem):
    """One more second of a gradient adds its weight, if a second passes no kink.

    Whole numbers have no kink within half a second above.
    """
    choices = (0,) * len(problem.wire_s)
    exposed = recompute(problem, choices).exposed_s
    for index, weight in enumerate(wire_weights(problem, choices)):
        slower = list(problem.wire_s)
        slower[index] = slower[index] + 0.5
        later = dataclasses.replace(problem, wire_s=tuple(slower))
        assert recompute(later, choices).exposed_s == exposed + 0.5 * weight


@settings(max_examples=examples(200), deadline=None)
@given(problems)
def test_reductions_keep_a_best_choice(problem):
    """Among the options that stay is one choice as good as any."""
    options = options_of(problem)
    least = best(problem)
    if options is None:
        assert math.isinf(least)
        return
    kept = [set[int]() for _ in problem.wire_s]
    for place, codec in zip(options.gradient, options.codec, strict=True):
        kept[problem.order[place]].add(int(codec))
    remaining = (
        cost
        for choices, cost in all_costs(problem)
        if all(choice in own for choice, own in zip(choices, kept, strict=True))
    )
    assert min(remaining, default=math.inf) == least
