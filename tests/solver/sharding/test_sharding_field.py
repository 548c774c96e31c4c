"""Tests fields: their flat arrays describe the same problem as the graph."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import problems, random_problem
from solver_fields import field_of, graph_of_problem, random_choices
from solver_graphs import graph_of, term

from autopar_solver import evaluate_choices
from autopar_solver.sharding.field import flatten, links_of

INF = np.inf


def three():
    """Three nodes with gaps in their numbers, a forbidden pair and two memory rows."""
    graph = graph_of(
        [[1, 2], [0], [3, 4, 5], [7, 8]], {(0, 2): [[0, INF, 1], [2, 3, 4]]}
    )
    del graph.costs[1], graph.links[1]
    graph.add_link(2, 3, np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]))
    graph.memory = {0: term(0, 2, 5.0, 6.0), 3: term(1, 2, 0.0, 9.0)}
    graph.rows, graph.room, graph.constant = np.arange(2), np.array([5.0, 12.0]), 10.0
    return flatten(graph)


def test_nodes_are_numbered_by_position():
    field = three()
    assert field.nodes == (0, 2, 3)
    assert field.sizes.tolist() == [2, 3, 2]
    assert field.offsets.tolist() == [0, 2, 5, 7]
    assert field.costs.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert field.edges == ((0, 1), (1, 2))
    assert field.owner().tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert (field.num_nodes, field.num_strategies, field.num_pairs) == (3, 7, 12)


def test_cost_includes_the_constant():
    field = three()
    assert field.cost(np.array([0, 2, 1])) == 10 + (1 + 5 + 8) + (1 + 5)
    assert field.cost(np.array([0, 1, 1])) == INF


def test_no_solution_reaches_the_forbidden_cost():
    """Not even the dearest one; so a finite number can stand for infinity."""
    field = three()
    finite = [
        field.cost(np.array(choices)) - field.constant
        for choices in np.ndindex(2, 3, 2)
        if field.cost(np.array(choices)) < INF
    ]
    assert max(finite) < field.forbidden < INF


def test_memory_by_row():
    field = three()
    used = [field.memory.usage_of(np.array(c)).tolist() for c in [(0, 0, 0), (1, 2, 1)]]
    assert used == [[5.0, 5.0], [6.0, 15.0]]
    assert field.memory.fits(np.array([0, 0, 0]))
    assert not field.memory.fits(np.array([1, 0, 0]))
    assert field.memory.at(1, field.num_strategies).tolist() == [5, 6, 0, 0, 0, 0, 9]


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6))
def test_cost_and_memory_are_the_problems(problem, seed):
    """Nothing but infinite strategies is gone from these fields."""
    graph = graph_of_problem(problem)
    field = flatten(graph)
    choices = random_choices(field, seed)
    found = evaluate_choices(problem, graph.expand(choices).tolist())
    assert field.cost(choices) == found.cost
    assert field.memory.fits(choices) == (found.peak <= problem.memory_limit)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6))
def test_prices_charge_the_usage(problem, seed):
    """What prices add to the chosen strategies is usage times price, row by row."""
    field = field_of(problem)
    choices = random_choices(field, seed)
    prices = np.random.default_rng(seed).integers(0, 5, len(field.memory.room)) * 1.0
    priced = field.memory.cost_at(prices, field.num_strategies)
    charged = priced[field.offsets[:-1] + choices].sum()
    assert charged == prices @ field.memory.usage_of(choices)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6))
def test_expected_usage_of_certain_choices_is_their_usage(problem, seed):
    field = field_of(problem)
    choices = random_choices(field, seed)
    chances = np.zeros(field.num_strategies)
    chances[field.offsets[:-1] + choices] = 1.0
    used = field.memory.usage_of(choices)
    assert field.memory.expected_usage(chances).tolist() == used.tolist()


def test_least_takes_the_first_of_equals():
    field = three()
    values = np.array([1.0, 1.0, 3.0, 2.0, 2.0, 0.0, -1.0])
    assert field.least(values).tolist() == [0, 1, 1]


def test_links_hold_both_directions_and_no_infinity():
    field = three()
    links = links_of(field)
    assert [[m for m, _ in own] for own in links] == [[1], [0, 2], [1]]
    table = links[0][0][1]
    assert table[0, 1] == field.forbidden
    assert links[1][0][1].tolist() == table.T.tolist()


def test_a_graph_without_nodes_is_an_empty_field():
    field = flatten(graph_of([], {}))
    assert (field.num_nodes, field.num_strategies, field.edges) == (0, 0, ())


def test_flattening_twice_gives_the_same():
    problem = random_problem(12, max_nodes=6)
    first, second = field_of(problem), field_of(problem)
    assert first.edges == second.edges
    assert first.costs.tolist() == second.costs.tolist()
