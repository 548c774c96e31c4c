"""Tests the costs of single changes and pairs of changes in codec selections."""

import itertools
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from property_tests import examples
from selection_problems import problems

from autopar_solver import recompute
from autopar_solver.selection.problem import fits_budgets, options_of
from autopar_solver.selection.solve import _changes, descend

few = settings(max_examples=examples(120), deadline=None)


def fitting_start(problem, options, seed):
    """A random choice within the budgets, in the link's order, or None if none fits."""
    random = np.random.default_rng(seed)
    parts = np.split(np.arange(len(options.gradient)), options.starts[1:-1])
    for _ in range(30):
        chosen = np.array([random.choice(part) for part in parts])
        if fits_budgets(problem, cost_of(problem, options, chosen)):
            return chosen
    return None


def cost_of(problem, options, chosen):
    """The cost of a choice, computed by simulating the link."""
    choices = [0] * len(chosen)
    for place, option in enumerate(chosen):
        choices[problem.order[place]] = int(options.codec[option])
    return recompute(problem, choices)


def changed(options, chosen, *moves):
    other = chosen.copy()
    for move in moves:
        other[options.gradient[move]] = move
    return other


@few
@given(problems, st.integers(0, 99))
def test_every_single_change_costs_what_running_the_link_says(problem, seed):
    options = options_of(problem)
    assume(options is not None)
    chosen = fitting_start(problem, options, seed)
    assume(chosen is not None)
    ready = np.array(sorted(problem.ready_s))
    added, fitting = _changes(problem, options, ready, chosen)
    before = cost_of(problem, options, chosen).cost_s
    for move in range(len(options.gradient)):
        after = cost_of(problem, options, changed(options, chosen, move))
        assert math.isclose(added[move], after.cost_s - before, abs_tol=1e-9)
        assert fitting[move] == fits_budgets(problem, after)


@few
@given(problems, st.integers(0, 99))
def test_no_exchange_of_two_improves_where_a_descent_ends(problem, seed):
    """One saves time and breaks a budget, the other makes room for it."""
    options = options_of(problem)
    assume(options is not None)
    chosen = fitting_start(problem, options, seed)
    assume(chosen is not None)
    reached = descend(problem, options, chosen)
    cost = cost_of(problem, options, reached)
    assert fits_budgets(problem, cost)
    for first, second in itertools.permutations(range(len(options.gradient)), 2):
        if options.gradient[first] == options.gradient[second]:
            continue
        alone = cost_of(problem, options, changed(options, reached, first))
        if alone.cost_s >= cost.cost_s - 1e-9 or fits_budgets(problem, alone):
            continue
        both = cost_of(problem, options, changed(options, reached, first, second))
        assert not fits_budgets(problem, both) or both.cost_s >= cost.cost_s - 1e-9


@few
@given(problems, st.integers(0, 99))
def test_a_descent_from_its_own_end_stays_there(problem, seed):
    options = options_of(problem)
    assume(options is not None)
    chosen = fitting_start(problem, options, seed)
    assume(chosen is not None)
    start = chosen.copy()
    reached = descend(problem, options, chosen)
    assert (chosen == start).all()
    assert descend(problem, options, reached).tolist() == reached.tolist()
