"""Tests single moves: exact costs, repaired choices that fit, and descent."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import problems
from solver_fields import UNLIMITED, binding_field, random_choices, solvable_field
from solver_graphs import graph_of, term

from autopar_solver.sharding.field import flatten, links_of
from autopar_solver.sharding.moves.neighbourhood import Position, mend, polish

few = settings(max_examples=examples(80), deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)


def position_of(field, choices):
    return Position(field, choices, links_of(field))


def finite_cost(field, choices):
    """The cost, with a finite price in place of the infinite one of forbidden pairs."""
    own = field.costs[field.offsets[:-1] + choices].sum()
    shared = (
        min(float(table[choices[k], choices[m]]), field.forbidden)
        for (k, m), table in zip(field.edges, field.tables, strict=True)
    )
    return float(own) + sum(shared)


@few
@given(problems(max_nodes=5), seeds)
def test_losses_are_what_a_move_costs(problem, seed):
    """For every node and strategy: the cost after the move less the cost before."""
    field = solvable_field(problem)
    choices = random_choices(field, seed)
    position = position_of(field, choices)
    losses, before = position.losses(), finite_cost(field, choices)
    for k, size in enumerate(field.sizes):
        for a in range(size):
            other = choices.copy()
            other[k] = a
            expected = finite_cost(field, other) - before
            assert losses[field.offsets[k] + a] == expected


@few
@given(problems(max_nodes=5), seeds)
def test_moves_keep_costs_and_usage_up_to_date(problem, seed):
    """After any moves the position is the one built from the choices."""
    field = solvable_field(problem)
    position = position_of(field, random_choices(field, seed))
    random = np.random.default_rng(seed)
    for _ in range(6):
        if not field.num_nodes:
            return
        node = int(random.integers(field.num_nodes))
        strategy = int(random.integers(field.sizes[node]))
        added = position.change(node, strategy)
        before = position.used.copy()
        position.move(node, strategy)
        assert (position.used == before + added).all()
    fresh = position_of(field, position.choices)
    assert position.local.tolist() == fresh.local.tolist()
    assert position.used.tolist() == fresh.used.tolist()
    assert position.fits == field.memory.fits(position.choices)


@few
@given(problems(max_nodes=5), seeds)
def test_polishing_never_worsens_and_stays_within_memory(problem, seed):
    field = solvable_field(problem)
    choices = random_choices(field, seed)
    position = position_of(field, choices)
    fitted, before = position.fits, finite_cost(field, choices)
    polish(position)
    assert finite_cost(field, position.choices) <= before + 1e-9
    assert position.fits or not fitted


@few
@given(problems(max_nodes=5), seeds)
def test_no_single_move_improves_polished_choices(problem, seed):
    field = solvable_field(problem)
    position = position_of(field, random_choices(field, seed))
    if not position.fits:
        return
    polish(position, passes=100)
    before = finite_cost(field, position.choices)
    for k, size in enumerate(field.sizes):
        for a in range(size):
            other = position.choices.copy()
            other[k] = a
            fits = field.memory.fits(other)
            assert not fits or finite_cost(field, other) >= before - 1e-6


@few
@given(problems(max_nodes=6), seeds)
def test_mending_succeeds_only_with_choices_that_fit(problem, seed):
    """What fits is left alone."""
    field = solvable_field(problem)
    position = position_of(field, random_choices(field, seed))
    fitted, before = position.fits, position.choices.copy()
    mended = mend(position, field.costs, 50)
    assert mended == field.memory.fits(position.choices)
    if fitted:
        assert mended
        assert position.choices.tolist() == before.tolist()


def test_mending_finds_room_where_there_is_plenty():
    """From the most wasteful choices of a ladder that a fifth of choices respect."""
    for seed in range(10):
        field = binding_field(seed, length=4)
        usage = np.zeros(field.num_strategies)
        for row in range(len(field.memory.room)):
            usage += field.memory.at(row, field.num_strategies)
        position = position_of(field, field.least(-usage))
        assert not position.fits
        assert mend(position, field.costs, UNLIMITED)
        assert position.over <= 0.0


def test_mending_takes_the_cheapest_per_unit():
    """Node 1 saves the same two units for less."""
    memory = {0: term(0, 1, 2.0, 0.0), 1: term(0, 1, 2.0, 0.0)}
    graph = graph_of([[0.0, 5.0], [0.0, 3.0]], {}, memory, [2.0])
    position = position_of(flatten(graph), np.array([0, 0]))
    assert mend(position, position.field.costs, 10)
    assert position.choices.tolist() == [0, 1]


def test_prices_change_what_is_mended():
    """Costs given to mending count, not the field's own alone."""
    memory = {0: term(0, 1, 2.0, 0.0), 1: term(0, 1, 2.0, 0.0)}
    graph = graph_of([[0.0, 5.0], [0.0, 3.0]], {}, memory, [2.0])
    position = position_of(flatten(graph), np.array([0, 0]))
    assert mend(position, np.array([0.0, 5.0, 0.0, 9.0]), 10)
    assert position.choices.tolist() == [1, 0]


def test_mending_gives_up_without_moves_or_hope():
    graph = graph_of([[0.0, 1.0]], {}, {0: term(0, 1, 9.0, 6.0)}, [5.0])
    position = position_of(flatten(graph), np.array([0]))
    assert not mend(position, position.field.costs, 0)
    assert position.choices.tolist() == [0]
    assert not mend(position, position.field.costs, 10)
    assert position.choices.tolist() == [1]


def test_a_position_owns_its_choices():
    field = flatten(graph_of([[0.0, 1.0]], {}))
    choices = np.array([1])
    position = position_of(field, choices)
    position.move(0, 0)
    assert choices.tolist() == [1]
    assert position.over == -np.inf


def test_savings_of_less_than_a_unit_count():
    """Bytes are scaled: what a move saves may be a small number."""
    memory = {0: term(0, 1, 0.5, 0.25), 1: term(0, 1, 0.5, 0.25)}
    graph = graph_of([[0.0, 5.0], [0.0, 3.0]], {}, memory, [0.75])
    position = position_of(flatten(graph), np.array([0, 0]))
    assert mend(position, position.field.costs, 10)
    assert position.choices.tolist() == [0, 1]


def test_only_as_much_is_moved_as_is_needed():
    """Three of six nodes save what a row lacks, the cheapest ones."""
    memory = {k: term(0, 1, 2.0, 1.0) for k in range(6)}
    costs = [[0.0, float(cost)] for cost in (6, 1, 5, 2, 4, 3)]
    position = position_of(
        flatten(graph_of(costs, {}, memory, [9.0])), np.zeros(6, int)
    )
    assert mend(position, position.field.costs, UNLIMITED)
    assert position.choices.tolist() == [0, 1, 0, 1, 0, 1]
