"""Tests options, program and prices of a selection against their definitions."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from property_tests import examples
from selection_problems import all_costs, best, problems, realistic

from autopar_solver import (
    CodecSelection,
    recompute,
    solve_relaxation,
    solve_selection,
)
from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import StopCriteria
from autopar_solver.selection.problem import fits_budgets, options_of
from autopar_solver.selection.program import (
    blocks_of,
    build_program,
    link_finishes,
    relax,
)
from autopar_solver.selection.solve import SelectionIncumbent

few = settings(max_examples=examples(100), deadline=None, derandomize=True)


def options_or_reject(problem):
    options = options_of(problem)
    if options is None:
        reject()
    return options


def chosen_in_turn(options):
    """All choices of one option per gradient, as indices into the array of options."""
    own = np.split(np.arange(len(options.gradient)), options.starts[1:-1])
    return map(np.array, itertools.product(*own))


def choices_of(problem, options, chosen):
    choices = np.empty(len(chosen), np.int64)
    choices[list(problem.order)] = options.codec[chosen]
    return tuple(choices.tolist())


@few
@given(problems)
def test_options_are_the_problems(problem):
    """Every option left has the numbers of the codec that it names, in link order."""
    options = options_or_reject(problem)
    assert options.num_gradients == len(problem.wire_s)
    for at, (place, codec) in enumerate(
        zip(options.gradient, options.codec, strict=True)
    ):
        index = problem.order[place]
        assert options.wire[at] == problem.wire_s[index][codec]
        assert options.local[at] == problem.local_s[index][codec]
        assert options.error[at] == problem.error[index][codec]
        assert options.memory[at] == problem.memory[index][codec]


@few
@given(problems)
def test_options_keep_a_best_choice(problem):
    """What is dropped is in no choice that fits, or replaced at no loss."""
    options = options_of(problem)
    least = best(problem)
    if options is None:
        assert math.isinf(least)
        return
    costs = (
        recompute(problem, choices_of(problem, options, chosen))
        for chosen in chosen_in_turn(options)
    )
    kept = min((c.cost_s for c in costs if fits_budgets(problem, c)), default=math.inf)
    assert kept == least


@few
@given(problems, st.integers(0, 10**6))
def test_columns_by_gradient(problem, seed):
    """Least, most and first marked, gradient by gradient."""
    options = options_or_reject(problem)
    random = np.random.default_rng(seed)
    values = random.integers(0, 9, len(options.gradient))
    own = np.split(values, options.starts[1:-1])
    assert options.least(values).tolist() == [part.min() for part in own]
    assert options.most(values).tolist() == [part.max() for part in own]
    first = options.first(values == options.least(values)[options.gradient])
    starts = options.starts[:-1].tolist()
    expected = [s + int(part.argmin()) for s, part in zip(starts, own, strict=True)]
    assert first.tolist() == expected
    assert (options.above(values) >= 0).all()


@few
@given(problems)
def test_keeping_everything_changes_nothing(problem):
    options = options_or_reject(problem)
    again = options.keep(np.ones(len(options.gradient), bool))
    for field in dataclasses.fields(options):
        left, right = getattr(options, field.name), getattr(again, field.name)
        assert left.tolist() == right.tolist()


@few
@given(problems)
def test_blocks_finish_between_fastest_and_slowest(problem):
    """Whatever is chosen, every block ends between its two extremes."""
    options = options_or_reject(problem)
    blocks = blocks_of(problem, options)
    ready = np.array(sorted(problem.ready_s))
    last = np.append(np.flatnonzero(np.diff(blocks.block)), len(ready) - 1)
    for chosen in itertools.islice(chosen_in_turn(options), 64):
        ends = link_finishes(ready, options.wire[chosen])[last]
        assert (ends >= blocks.earliest - 1e-9).all()
        assert (ends <= blocks.latest + 1e-9).all()
        wire = np.bincount(blocks.block, options.wire[chosen])
        np.testing.assert_allclose(link_finishes(blocks.ready, wire), ends)


@few
@given(problems)
def test_program_has_the_cost_of_the_best_choice(problem):
    """Solved alone: its cost in seconds, with what every choice costs."""
    options = options_or_reject(problem)
    built = build_program(problem, options)
    stop = StopCriteria(seconds=None, gap=1e-6)
    answer = backend_of("highs")(built.program, stop, None)
    least = best(problem)
    if answer.values is None:
        assert math.isinf(least)
        return
    cost = float(answer.values @ built.program.costs)
    assert cost * built.unit_s + built.constant_s == pytest.approx(least, abs=1e-6)


@few
@given(problems)
def test_relaxation_is_below_every_choice_with_each_option(problem):
    """``bound + rises`` of an option bounds whatever is chosen with it."""
    options = options_or_reject(problem)
    relaxed = relax(problem, build_program(problem, options))
    if relaxed is None:
        assert math.isinf(best(problem))
        return
    for chosen in chosen_in_turn(options):
        cost = recompute(problem, choices_of(problem, options, chosen))
        if fits_budgets(problem, cost):
            most = relaxed.bound_s + relaxed.rises[chosen].max()
            assert most <= cost.cost_s + 1e-7


@few
@given(problems)
def test_relaxation_optimum_and_any_choice_are_in_order(problem):
    relaxation, result = solve_relaxation(problem), solve_selection(problem, gap=0.0)
    assert relaxation.bound_s <= result.cost_s + 1e-9
    for _, cost in all_costs(problem):
        assert result.cost_s <= cost + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_the_relaxation_are_nearly_choices(seed):
    """They add up to one for each gradient, and few gradients are split."""
    problem = realistic(seed, 20, ready_s=(0.0,) * 20)
    options = options_of(problem)
    relaxed = relax(problem, build_program(problem, options))
    shares = np.add.reduceat(relaxed.shares, options.starts[:-1])
    np.testing.assert_allclose(shares, 1.0, atol=1e-7)
    split = np.add.reduceat(
        (relaxed.shares > 1e-7) & (relaxed.shares < 1 - 1e-7), options.starts[:-1]
    )
    # As many as there are rows that bind: the link's and the budget's.
    assert np.count_nonzero(split) <= 2


def two():
    return CodecSelection(
        wire_s=(np.array([4.0, 1.0]),),
        local_s=(np.array([0.0, 0.5]),),
        error=(np.array([0.0, 1.0]),),
        ready_s=(0.0,),
        backward_s=0.0,
        error_budget=0.5,
    )


def test_the_incumbent_takes_what_fits_and_is_better():
    incumbent = SelectionIncumbent(None, math.inf, 0.0)
    assert incumbent.offer(two(), (1,)) is incumbent, "over the budget"
    taken = incumbent.offer(two(), (0,))
    assert (taken.choices, taken.cost_s) == ((0,), 4.0)
    assert taken.offer(two(), (0,)) is taken
    assert taken.prove(3.0).bound_s == 3.0
    assert taken.prove(3.0).prove(1.0).bound_s == 3.0
    assert taken.prove(9.0).bound_s == 4.0
