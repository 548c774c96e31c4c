"""Tests subproblems in which the other nodes of the field keep their choices."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import problems
from solver_fields import binding_field, random_choices, solvable_field
from solver_graphs import graph_of

from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import StopCriteria
from autopar_solver.sharding.field import flatten, links_of
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.moves.neighbourhood import Position, part_graph, solve_part

HIGHS = backend_of("highs")
EXACT = StopCriteria(seconds=None, gap=1e-9)


def position_of(field, choices):
    return Position(field, choices, links_of(field))


def some_members(field, seed):
    random = np.random.default_rng(seed)
    chosen = np.flatnonzero(random.random(field.num_nodes) < 0.6)
    return chosen if len(chosen) else np.arange(min(1, field.num_nodes))


def best_of_part(field, choices, members, kept):
    """The least cost of choices that change members to kept strategies only."""
    best = math.inf
    for place in np.ndindex(*field.sizes[members].tolist()):
        trial = choices.copy()
        trial[members] = place
        allowed = kept[field.offsets[members] + trial[members]].all()
        if allowed and field.memory.fits(trial):
            best = min(best, field.cost(trial))
    return best


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(problems(max_nodes=5, max_strategies=3), st.integers(0, 10**6))
def test_matches_brute_force(problem, seed):
    """Any members, any of their strategies, from any choices that fit."""
    field = solvable_field(problem)
    choices = random_choices(field, seed)
    if not field.num_nodes or not field.memory.fits(choices):
        return
    if field.cost(choices) == math.inf:
        return
    members = some_members(field, seed)
    kept = np.random.default_rng(seed + 1).random(field.num_strategies) < 0.8
    answer = solve_part(position_of(field, choices), members, kept, HIGHS, EXACT)
    least = best_of_part(field, choices, members, kept)
    assert answer.finished
    if math.isinf(least):
        assert answer.choices is None
        return
    assert field.memory.fits(answer.choices)
    assert field.cost(answer.choices) == pytest.approx(least)
    assert answer.bound <= least + 1e-6
    others = np.setdiff1d(np.arange(field.num_nodes), members)
    assert (answer.choices[others] == choices[others]).all()


def test_the_whole_field_is_a_part():
    field = binding_field(4, length=3)
    start = next(
        np.array(choices)
        for choices in np.ndindex(*field.sizes.tolist())
        if field.memory.fits(np.array(choices))
    )
    everything = np.ones(field.num_strategies, bool)
    members = np.arange(field.num_nodes)
    answer = solve_part(position_of(field, start), members, everything, HIGHS, EXACT)
    least = best_of_part(field, start, members, everything)
    assert field.cost(answer.choices) == pytest.approx(least)


def test_links_to_the_rest_become_costs():
    links = {(0, 1): [[1.0, 2.0], [3.0, 4.0]], (1, 2): [[5.0, 6.0], [7.0, 8.0]]}
    field = flatten(graph_of([[0, 0], [10, 20], [0, 0]], links))
    position = position_of(field, np.array([1, 0, 1]))
    graph = part_graph(position, np.array([1]), np.ones(6, bool))
    # Node 0 chose its second row, node 2 its second column.
    assert graph.costs[1].tolist() == [10 + 3 + 6, 20 + 4 + 8]
    assert graph.num_links == 0


def test_memory_of_the_rest_is_gone_from_the_room():
    field = binding_field(1, length=3)
    choices = np.zeros(field.num_nodes, np.int64)
    position = position_of(field, choices)
    members = np.array([0, 3])
    graph = part_graph(position, members, np.ones(field.num_strategies, bool))
    used = np.zeros(len(graph.room))
    for node in (0, 3):
        own = graph.memory[node]
        for start, end, usage in zip(own.starts, own.ends, own.usage, strict=True):
            used[start:end] += usage[choices[node]]
    whole = field.memory.room - field.memory.usage_of(choices)
    assert (graph.room - used).tolist() == whole.tolist()


def test_a_member_without_strategies_is_a_contradiction():
    field = flatten(graph_of([[0.0, 1.0], [0.0]], {}))
    position = position_of(field, np.array([0, 0]))
    nothing = np.zeros(3, bool)
    with pytest.raises(ContradictionError):
        part_graph(position, np.array([0]), nothing)
    stop = StopCriteria(seconds=None, gap=0.0, cutoff=7.0)
    answer = solve_part(position, np.array([0]), nothing, HIGHS, stop)
    assert (answer.choices, answer.bound, answer.finished) == (None, 7.0, True)


def test_nothing_under_the_cutoff_is_no_answer():
    field = binding_field(2, length=3)
    members = np.arange(field.num_nodes)
    everything = np.ones(field.num_strategies, bool)
    start = np.zeros(field.num_nodes, np.int64)
    position = position_of(field, start)
    least = best_of_part(field, start, members, everything)
    stop = StopCriteria(seconds=None, gap=1e-9, cutoff=least - 0.01)
    answer = solve_part(position, members, everything, HIGHS, stop)
    assert answer.choices is None or field.cost(answer.choices) >= least - 1e-9
    assert answer.bound >= stop.cutoff - 1e-6
