"""Tests removed strategies, links and nodes on examples that were solved by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from solver_graphs import graph_of, term

from autopar_solver.clock import Clock
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.reductions.pipeline import (
    drop_dominated,
    drop_infinite,
    drop_single,
    drop_unsupported,
    eliminate_low_degree,
    fold_followers,
    follows,
    reduce_graph,
    replacements,
    split_separable,
)

INF = np.inf
tables = st.integers(0, 10**6).map(
    lambda seed: np.random.default_rng(seed).integers(0, 4, (3, 4)) * 1.0
)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_what_replaces_another_stays(seed, size):
    """Replacements are among the kept, and only where one dominates the other."""
    random = np.random.default_rng(seed)
    rank = random.integers(0, 3, size)
    replaceable = rank[:, None] <= rank[None, :]
    instead = replacements(replaceable)
    for a, b in enumerate(instead):
        assert a == b or replaceable[b, a]
        assert instead[b] == b
    assert set(rank[np.unique(instead)]) == {rank.min()}


def test_no_strategy_dominates_where_neighbours_disagree():
    graph = graph_of([[0, 0], [0, 0]], {(0, 1): [[0, 9], [9, 0]]})
    drop_dominated(graph)
    assert graph.num_strategies == 4


def test_a_forbidden_pair_may_be_replaced_by_an_allowed_one():
    """The first row is never better: it is forbidden where the second costs 3."""
    graph = graph_of([[0, 0], [0, 0]], {(0, 1): [[INF, 1], [3, 1]]})
    drop_dominated(graph)
    choices = graph.expand(np.zeros(2, np.int64))
    assert choices[0] == 1


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(tables, st.integers(0, 10**6))
def test_sums_split_and_others_do_not(table, seed):
    """``u[a] + v[b]`` splits into parts that add up to it; a changed entry does not."""
    random = np.random.default_rng(seed)
    u, v = random.integers(0, 9, 3) * 1.0, random.integers(0, 9, 4) * 1.0
    rows, columns = split_separable(u[:, None] + v)
    assert (rows[:, None] + columns == u[:, None] + v).all()
    bent = u[:, None] + v
    bent[1, 1] += 1.0
    assert split_separable(bent) is None
    found = split_separable(table)
    if found is not None:
        assert (found[0][:, None] + found[1] == table).all()


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_followers_are_functions_of_their_leader(seed):
    random = np.random.default_rng(seed)
    finite = random.random((3, 3)) < 0.4
    table = np.where(finite, random.integers(0, 9, (3, 3)), INF)
    found = follows(table)
    assert (found is None) == bool((finite.sum(axis=1) > 1).any())
    if found is not None:
        for row in np.flatnonzero(finite.any(axis=1)):
            assert finite[row, found[row]]


def test_circles_of_followers_keep_a_leader():
    """Three nodes that must be equal become one with the sum of their costs."""
    same = [[0, INF], [INF, 0]]
    links = {(0, 1): same, (1, 2): same, (0, 2): same}
    graph = graph_of([[1, 2], [3, 4], [5, 6]], links)
    fold_followers(graph)
    (left,) = graph.costs
    assert graph.costs[left].tolist() == [9, 12]
    choices = np.zeros(3, np.int64)
    choices[left] = 1
    assert graph.expand(choices).tolist() == [1, 1, 1]


def test_infinite_costs_go_first():
    graph = graph_of([[INF, 1, INF, 2]], {})
    drop_infinite(graph)
    assert graph.costs[0].tolist() == [1, 2]
    assert graph.expand(np.array([1])).tolist() == [3]
    graph.costs[0] = np.array([INF, INF])
    with pytest.raises(ContradictionError):
        drop_infinite(graph)


def test_what_no_neighbour_allows_goes_all_along_a_path():
    """The end has one strategy; what it forbids travels back to the other end."""
    step = [[0, INF, INF], [INF, 0, INF], [INF, INF, 0]]
    links = {(0, 1): step, (1, 2): step, (2, 3): [[0], [INF], [INF]]}
    graph = graph_of([[0, 0, 0]] * 3 + [[0]], links)
    drop_unsupported(graph)
    assert [len(graph.costs[i]) for i in range(4)] == [1, 1, 1, 1]


def test_single_nodes_with_memory_stay():
    graph = graph_of([[3], [4]], {}, {1: term(0, 1, 2.0)}, [5.0])
    drop_single(graph)
    assert list(graph.costs) == [1]
    assert graph.constant == 3.0


def test_a_forbidden_single_strategy_is_a_contradiction():
    with pytest.raises(ContradictionError, match="only strategy of node 0"):
        drop_single(graph_of([[INF]], {}))


def test_a_path_is_eliminated_to_its_least_cost():
    """Four nodes in a row: nothing is left but the constant."""
    random = np.random.default_rng(1)
    costs = [random.integers(0, 9, 3) for _ in range(4)]
    links = {(k, k + 1): random.integers(0, 9, (3, 3)) for k in range(3)}
    graph = graph_of(costs, links)
    eliminate_low_degree(graph)
    assert graph.costs == {}

    def cost(choices):
        total = sum(float(own[k]) for own, k in zip(costs, choices, strict=True))
        pairs = itertools.pairwise(choices)
        return total + sum(
            float(links[e, e + 1][a, b]) for e, (a, b) in enumerate(pairs)
        )

    assert graph.constant == min(map(cost, np.ndindex(3, 3, 3, 3)))
    assert cost(graph.expand(np.zeros(4, np.int64)).tolist()) == graph.constant


def test_a_node_without_an_answer_is_a_contradiction():
    graph = graph_of([[0], [0]], {(0, 1): [[INF]]})
    with pytest.raises(ContradictionError, match="no answer"):
        eliminate_low_degree(graph)


def test_reports_add_up_to_what_is_gone():
    """Nodes, links and strategies before, less those removed, are those left."""
    same = [[0, INF], [INF, 0]]
    graph = graph_of([[1, 2], [3, 4], [5, 6]], {(0, 1): same, (1, 2): [[0, 1], [1, 0]]})
    before = len(graph.costs), graph.num_links, graph.num_strategies
    reports = reduce_graph(graph)
    removed = (
        sum(report.nodes for report in reports),
        sum(report.edges for report in reports),
        sum(report.strategies for report in reports),
    )
    after = len(graph.costs), graph.num_links, graph.num_strategies
    assert tuple(b - r for b, r in zip(before, removed, strict=True)) == after
    assert after == (0, 0, 0)
    assert graph.constant == 9.0


def test_a_deadline_that_is_past_only_tidies():
    graph = graph_of([[1, 2], [INF, 4]], {(0, 1): [[0, 1], [1, 0]]})
    reports = reduce_graph(graph, clock=Clock(0.0, -1.0))
    assert {report.name for report in reports if report.strategies} == {
        "forbidden strategies",
        "single-strategy nodes",
    }
    assert (graph.costs[0].tolist(), graph.constant) == ([2, 2], 4)
