"""Tests that every reduction keeps the optimum, and that solutions can be expanded."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import brute_force, problems
from solver_graphs import graph_of, term

from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.problem import evaluate_choices
from autopar_solver.sharding.reductions.pipeline import (
    REDUCTIONS,
    build_graph,
    drop_dominated,
    drop_oversized,
    drop_separable,
    drop_single,
    drop_unsupported,
    eliminate_low_degree,
    fold_followers,
    follows,
    reduce_graph,
    replaceable_by,
    split_separable,
)

INF = np.inf


def best_of_graph(graph, problem):
    """A reduced graph's optimum by brute force, with the costs of the full problem."""
    nodes = sorted(graph.costs)
    best = math.inf
    sizes = [len(graph.costs[i]) for i in nodes]
    for place in np.ndindex(*sizes):
        choices = np.zeros(len(problem.node_costs), np.int64)
        choices[nodes] = place
        found = evaluate_choices(problem, graph.expand(choices).tolist())
        limit = problem.memory_limit
        if limit is None or found.peak <= limit:
            best = min(best, found.cost)
    return best


@pytest.mark.parametrize(
    "name_and_reduction", REDUCTIONS, ids=[name for name, _ in REDUCTIONS]
)
@settings(max_examples=examples(40), deadline=None)
@given(
    problem=problems(max_nodes=5, max_strategies=3, max_edges=8),
    prefix=st.integers(0, len(REDUCTIONS)),
)
def test_each_keeps_the_optimum(name_and_reduction, problem, prefix):
    """Alone and after any number of the others."""
    graph = build_graph(problem)
    try:
        for _, other in REDUCTIONS[:prefix]:
            other(graph)
        name_and_reduction[1](graph)
        best = best_of_graph(graph, problem)
    except ContradictionError:
        best = math.inf
    assert best == brute_force(problem)


@settings(max_examples=examples(100), deadline=None)
@given(problems(max_nodes=6, max_strategies=3, max_edges=10))
def test_all_keep_the_optimum(problem):
    graph = build_graph(problem)
    try:
        reduce_graph(graph)
        best = best_of_graph(graph, problem)
    except ContradictionError:
        best = math.inf
    assert best == brute_force(problem)


@settings(max_examples=examples(100), deadline=None)
@given(problems(max_nodes=5, max_strategies=3), st.integers(0, 10**6))
def test_project_costs_no_more(problem, seed):
    """Valid choices map into what is left and come back at no higher cost."""
    random = np.random.default_rng(seed)
    choices = np.array([int(random.integers(s)) for s in problem.num_strategies])
    before = evaluate_choices(problem, choices.tolist())
    if before.cost == INF or before.peak > (problem.memory_limit or INF):
        return
    graph = build_graph(problem)
    reduce_graph(graph)
    after = evaluate_choices(problem, graph.expand(graph.project(choices)).tolist())
    assert after.cost <= before.cost
    assert after.peak <= (problem.memory_limit or INF)


def test_follows():
    assert follows(np.array([[INF, 1.0], [2.0, INF]])).tolist() == [1, 0]
    assert follows(np.array([[0.0, 1.0], [2.0, INF]])) is None
    assert follows(np.zeros((3, 1))).tolist() == [0, 0, 0]


def test_fold_moves_costs_links_and_memory():
    same = [[0.5, INF], [INF, 0.25]]
    chain = {(0, 1): same, (1, 2): same, (2, 3): [[1.0, 2.0], [3.0, 4.0]]}
    graph = graph_of([[1, 2], [10, 20], [100, 200], [0, 0]], chain)
    graph.memory = {i: term(i, i + 1, 5.0, 7.0) for i in range(3)}
    fold_followers(graph)
    left = next(i for i in graph.costs if i != 3)
    assert len(graph.costs) == 2
    assert graph.costs[left].tolist() == [112.0, 222.5]
    assert graph.links[left][3].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert graph.memory[left].usage.tolist() == [[5.0, 7.0]] * 3
    choices = np.zeros(4, np.int64)
    choices[left] = 1
    assert graph.expand(choices)[:3].tolist() == [1, 1, 1]


def test_parallel_links_add_up():
    graph = graph_of([[0, 0], [0, 0]], {(0, 1): [[1, 2], [3, 4]]})
    graph.add_link(1, 0, np.array([[10.0, 20.0], [30.0, 40.0]]))
    assert graph.links[0][1].tolist() == [[11, 32], [23, 44]]


def test_unsupported_propagates():
    forward = [[0, INF], [INF, 0]]
    graph = graph_of([[0, 0], [0, 0], [0]], {(0, 1): forward, (1, 2): [[INF], [0.0]]})
    drop_unsupported(graph)
    assert [len(graph.costs[i]) for i in range(3)] == [1, 1, 1]
    graph = graph_of([[0], [0]], {(0, 1): [[INF]]})
    with pytest.raises(ContradictionError):
        drop_unsupported(graph)


def test_single_becomes_cost():
    graph = graph_of([[3], [0, 0]], {(0, 1): [[1, 2]]})
    drop_single(graph)
    assert (graph.constant, graph.costs[1].tolist()) == (3.0, [1.0, 2.0])


def test_separable():
    u, v = np.array([1.0, 5.0, 2.0]), np.array([0.0, 7.0])
    parts = split_separable(u[:, None] + v)
    np.testing.assert_allclose(parts[0][:, None] + parts[1], u[:, None] + v)
    assert split_separable(np.array([[1.0, 0.0], [0.0, 1.0]])) is None
    assert split_separable(np.array([[INF, 0.0], [0.0, 1.0]])) is None
    graph = graph_of([[0, 0], [0, 0]], {(0, 1): [[1, 2], [3, 4]]})
    drop_separable(graph)
    assert graph.num_links == 0


def test_dominated_looks_at_memory():
    graph = graph_of([[1, 2], [0, 0]], {(0, 1): [[0, 5], [0, 5]]})
    frugal = graph.copy()
    frugal.memory = {0: term(0, 1, 9.0, 0.0)}
    drop_dominated(graph)
    drop_dominated(frugal)
    assert graph.costs[0].tolist() == [1.0]
    assert frugal.costs[0].tolist() == [1.0, 2.0]


@settings(max_examples=examples(80), deadline=None)
@given(
    problem=problems(max_nodes=4, max_strategies=4, max_edges=5),
    node=st.integers(0, 3),
)
def test_dominated_finds_every_replacement(problem, node):
    """A strategy goes exactly where another never costs more, by trying all."""
    graph = build_graph(problem)
    graph.memory.clear()
    nodes = sorted(graph.costs)
    i = nodes[node % len(nodes)]
    if not np.isfinite(graph.costs[i]).all():
        return
    found = replaceable_by(graph, i)
    for b, a in itertools.product(range(len(found)), repeat=2):
        total = graph.costs[i][b] - graph.costs[i][a]
        for table in graph.links[i].values():
            finite = table[a] < INF
            if finite.any():
                total += (table[b, finite] - table[a, finite]).max()
        assert found[b, a] == (a == b or total <= 0), (a, b, total)


def test_low_degree_answers_neighbours():
    tables = {(0, 1): [[0, 9], [5, 1]], (1, 2): [[0, 4], [2, 0]]}
    graph = graph_of([[0, 0], [1, 1], [0, 0]], tables)
    graph.memory = {0: term(0, 1, 1.0, 0.0), 2: term(0, 1, 1.0, 0.0)}
    eliminate_low_degree(graph)
    assert sorted(graph.costs) == [0, 2]
    expected = [[1.0, 5.0], [4.0, 2.0]]
    assert graph.links[0][2].tolist() == expected
    choices = np.array([1, 0, 1])
    assert graph.expand(choices).tolist() == [1, 1, 1]


def test_low_degree_respects_memory():
    """A node whose best answer needs memory stays."""
    graph = graph_of([[0, 5]], {}, {0: term(0, 1, 3.0, 0.0)}, [10.0])
    eliminate_low_degree(graph)
    assert 0 in graph.costs


def test_oversized():
    memory = {0: term(1, 3, 0.0, 5.0, 6.0), 1: term(0, 4, 0.0, 5.0)}
    graph = graph_of([[0, 0, 0], [0, 0]], {}, memory, [9.0, 5.0, 9.0, 4.0])
    drop_oversized(graph)
    assert [len(graph.costs[i]) for i in range(2)] == [2, 1]
