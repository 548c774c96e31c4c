"""Tests reductions of memory: constant terms, slack rows and strategies too large."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from solver_graphs import graph_of, term

from autopar_solver.sharding.graph import ContradictionError, NodeMemory
from autopar_solver.sharding.reductions.pipeline import (
    _range_min,
    _range_minima,
    drop_loose_rows,
    drop_oversized,
    settle_memory,
)


def used_by_row(graph, choices):
    used = np.zeros(len(graph.room))
    for node, own in graph.memory.items():
        for start, end, usage in zip(own.starts, own.ends, own.usage, strict=True):
            used[start:end] += usage[choices[node]]
    return used


def random_graph(seed):
    """Nodes with memory on some rows and no links; the smallest strategies fit."""
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 7))
    sizes = random.integers(1, 4, random.integers(1, 5))
    graph = graph_of([np.zeros(size) for size in sizes], {})
    least = np.zeros(rows)
    for node, size in enumerate(sizes):
        count = int(random.integers(0, 3))
        starts = random.integers(0, rows, count)
        ends = starts + random.integers(1, rows + 1 - starts)
        usage = random.integers(0, 6, (count, size)) * 1.0
        if count:
            graph.memory[node] = NodeMemory(starts, ends, usage)
        for start, end, own in zip(starts, ends, usage, strict=True):
            least[start:end] += own.min()
    graph.rows = np.arange(rows)
    graph.room = least + random.integers(0, 9, rows)
    return graph


def fitting(graph, sizes):
    """All choices that are within the limit of every row."""
    return {
        choices
        for choices in np.ndindex(*sizes)
        if (used_by_row(graph, choices) <= graph.room + graph.slack).all()
    }


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_each_keeps_what_fits(seed):
    """The same choices fit before and after; oversized strategies fitted nowhere."""
    graph = random_graph(seed)
    sizes = [len(graph.costs[i]) for i in sorted(graph.costs)]
    before = fitting(graph, sizes)
    settle_memory(graph)
    assert fitting(graph, sizes) == before
    drop_loose_rows(graph)
    assert fitting(graph, sizes) == before
    try:
        drop_oversized(graph)
    except ContradictionError:
        assert not before
        return
    left = [len(graph.costs[i]) for i in sorted(graph.costs)]
    after = fitting(graph, left)
    assert {tuple(graph.expand(np.array(c)).tolist()) for c in after} == before


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_settled_memory_starts_at_nothing(seed):
    """Every term has a strategy that uses nothing and one that uses something."""
    graph = random_graph(seed)
    settle_memory(graph)
    for own in graph.memory.values():
        assert (own.usage.min(axis=1) == 0).all()
        assert (own.usage.max(axis=1) > 0).all()


def test_settling_too_much_is_a_contradiction():
    graph = graph_of([[0.0, 0.0]], {}, {0: term(0, 2, 4.0, 5.0)}, [9.0, 3.0])
    with pytest.raises(ContradictionError, match="least memory is over"):
        settle_memory(graph)


def test_slack_forgives_rounding():
    graph = graph_of([[0.0, 0.0]], {}, {0: term(0, 1, 4.0, 5.0)}, [4.0 - 1e-9])
    graph.slack = 1e-8
    settle_memory(graph)
    assert graph.memory[0].usage.tolist() == [[0.0, 1.0]]


def test_terms_that_span_many_rows_look_at_all_of_them():
    """The tightest of seven rows decides, wherever it lies."""
    for tight in range(7):
        room = np.full(7, 9.0)
        room[tight] = 2.0
        graph = graph_of([[0.0, 0.0]], {}, {0: term(0, 7, 0.0, 3.0)}, room)
        drop_oversized(graph)
        assert len(graph.costs[0]) == 1


def test_loose_rows_go_and_terms_are_renumbered():
    memory = {0: term(0, 4, 0.0, 5.0), 1: term(2, 3, 0.0, 3.0)}
    graph = graph_of([[0, 0], [0, 0]], {}, memory, [5.5, 4.0, 7.0, 6.0])
    drop_loose_rows(graph)
    assert graph.rows.tolist() == [1, 2]
    assert graph.room.tolist() == [4.0, 7.0]
    assert (graph.memory[0].starts[0], graph.memory[0].ends[0]) == (0, 2)
    assert (graph.memory[1].starts[0], graph.memory[1].ends[0]) == (1, 2)


def test_memory_on_loose_rows_alone_is_forgotten():
    graph = graph_of([[0, 0]], {}, {0: term(0, 1, 0.0, 5.0)}, [9.0])
    drop_loose_rows(graph)
    assert (len(graph.rows), graph.memory) == (0, {})


def test_what_is_over_by_rounding_still_fits():
    """Neither a strategy goes nor a row, where sums differ by rounding alone."""
    memory = {0: term(0, 1, 0.0, 4.0), 1: term(0, 1, 0.0, 0.5)}
    graph = graph_of([[0, 0], [0, 0]], {}, memory, [4.0 - 1e-9])
    graph.slack = 1e-8
    drop_oversized(graph)
    assert len(graph.costs[0]) == 2
    drop_loose_rows(graph)
    assert len(graph.rows) == 1
    graph.slack = 0.0
    drop_oversized(graph)
    assert len(graph.costs[0]) == 1


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_least_of_any_stretch(seed):
    random = np.random.default_rng(seed)
    values = random.integers(0, 99, random.integers(1, 40)).astype(float)
    starts = random.integers(0, len(values), 12)
    ends = starts + random.integers(1, len(values) + 1 - starts)
    found = _range_min(_range_minima(values), starts, ends)
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    assert found.tolist() == [values[low:high].min() for low, high in pairs]
