"""Tests that a reduced graph maps its choices to choices of the problem."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from solver_graphs import graph_of, term

from autopar_solver.sharding.graph import (
    ContradictionError,
    Eliminate,
    Follow,
    Restrict,
)

INF = np.inf


def square():
    """Two nodes of two strategies with a link; one of the nodes has memory."""
    graph = graph_of([[1, 2], [3, 4]], {(0, 1): [[10, 20], [30, 40]]})
    graph.memory = {0: term(0, 1, 5.0, 7.0)}
    return graph


def test_links_are_seen_from_both_ends():
    graph = square()
    assert graph.links[0][1].tolist() == [[10, 20], [30, 40]]
    assert graph.links[1][0].tolist() == [[10, 30], [20, 40]]
    assert (graph.num_links, graph.num_strategies) == (1, 4)


def test_parallel_links_add_up():
    graph = square()
    graph.add_link(1, 0, np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert graph.links[0][1].tolist() == [[11, 23], [32, 44]]
    assert graph.links[1][0].tolist() == graph.links[0][1].T.tolist()


def test_dropped_links_are_gone_at_both_ends():
    graph = square()
    graph.drop_link(1, 0)
    assert graph.links == {0: {}, 1: {}}


def test_restricting_narrows_costs_links_and_memory():
    graph = square()
    graph.restrict(0, np.array([1]))
    assert graph.costs[0].tolist() == [2]
    assert graph.links[0][1].tolist() == [[30, 40]]
    assert graph.links[1][0].tolist() == [[30], [40]]
    assert graph.memory[0].usage.tolist() == [[7.0]]
    assert graph.expand(np.array([0, 1])).tolist() == [1, 1]


def test_nothing_kept_is_a_contradiction():
    with pytest.raises(ContradictionError, match="node 1 has no strategy left"):
        square().restrict(1, np.array([], np.int64))


def test_dropping_a_node_takes_its_links_and_memory():
    graph = square()
    graph.drop_node(0, Eliminate(0, (1,), np.array([1, 0])))
    assert list(graph.costs) == [1]
    assert graph.links == {1: {}}
    assert graph.memory == {}
    assert graph.expand(np.array([9, 0])).tolist() == [1, 0]
    assert graph.expand(np.array([9, 1])).tolist() == [0, 1]


def test_a_copy_changes_on_its_own():
    graph = square()
    other = graph.copy()
    other.restrict(0, np.array([0]))
    other.drop_link(0, 1)
    other.constant += 3.0
    assert graph.costs[0].tolist() == [1, 2]
    assert graph.num_links == 1
    assert (graph.constant, len(graph.trail)) == (0.0, 0)
    assert len(other.trail) == 1


def test_steps_undo_in_the_opposite_order():
    """Restricted, then folded: the follower's strategy is that of the old numbering."""
    graph = square()
    graph.restrict(0, np.array([1]))
    graph.drop_node(1, Follow(1, 0, np.array([1])))
    graph.restrict(0, np.array([0]))
    assert graph.expand(np.array([0, 0])).tolist() == [1, 1]


def test_project_takes_only_later_steps():
    graph = square()
    graph.restrict(0, np.array([1]))
    later = len(graph.trail)
    graph.restrict(1, np.array([1]))
    assert graph.project(np.array([1, 1])).tolist() == [0, 0]
    assert graph.project(np.array([0, 1]), later).tolist() == [0, 0]


def test_replaced_strategies_project_to_what_replaces_them():
    step = Restrict(0, kept=np.array([1, 3]), instead=np.array([1, 1, 3, 3]))
    for old, new in [(0, 0), (1, 0), (2, 1), (3, 1)]:
        choices = np.array([old])
        step.redo(choices)
        assert choices.tolist() == [new]


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_projecting_what_was_expanded_changes_nothing(seed):
    """Any restrictions: choices now -> choices before -> the same choices now."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, 4)
    graph = graph_of([np.zeros(size) for size in sizes], {})
    for _ in range(3):
        node = int(random.integers(4))
        size = len(graph.costs[node])
        kept = np.flatnonzero(random.random(size) < 0.7)
        if len(kept):
            graph.restrict(node, kept)
    now = np.array([int(random.integers(len(graph.costs[i]))) for i in range(4)])
    before = graph.expand(now)
    assert (before < sizes).all()
    assert graph.project(before).tolist() == now.tolist()
    assert graph.expand(graph.project(before)).tolist() == before.tolist()
