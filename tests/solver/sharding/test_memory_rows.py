"""Tests that choices fit on the rows of memory exactly if they fit at all times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import problems, random_problem
from solver_graphs import term

from autopar_solver import MemoryTerm, ShardingProblem, evaluate_choices
from autopar_solver.sharding.graph import NodeMemory, find_rows, sum_memories


def used_on_rows(rows, memory, choices):
    """The usage of each row above the minimum, in plain loops over rows and terms."""
    used = np.zeros(len(rows))
    for node, own in memory.items():
        for start, end, usage in zip(own.starts, own.ends, own.usage, strict=True):
            for row in range(start, end):
                used[row] += usage[choices[node]]
    return used


def allowed_choices(problem, random):
    return [
        int(random.choice(np.flatnonzero(np.isfinite(costs))))
        for costs in problem.node_costs
    ]


def used_at(problem, choices, time):
    """The sum of all memory that is live at a time, computed from the problem."""
    live = [t for t in problem.memory if t.start <= time < t.end]
    fixed = [f for f in problem.fixed_memory if f[0] <= time < f[1]]
    used = sum(float(t.usage[choices[t.node]]) for t in live)
    return used + sum(f[2] for f in fixed)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6))
def test_rows_decide_like_all_times(problem, seed):
    rows, memory = find_rows(problem)
    random = np.random.default_rng(seed)
    for _ in range(5):
        choices = allowed_choices(problem, random)
        fits = bool((used_on_rows(rows, memory, choices) <= rows.room).all())
        peak = evaluate_choices(problem, choices).peak
        assert fits == (peak <= problem.memory_limit)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6))
def test_room_is_what_the_limit_leaves(problem, seed):
    """At the time of each row, room and usage above the least add up to the limit."""
    rows, memory = find_rows(problem)
    choices = allowed_choices(problem, np.random.default_rng(seed))
    used = used_on_rows(rows, memory, choices)
    for time, room, above in zip(rows.times, rows.room, used, strict=True):
        whole = used_at(problem, choices, time)
        assert problem.memory_limit - room + above == whole


def test_times_that_cannot_break_the_limit_have_no_row():
    usage = np.array([3.0, 4.0])
    problem = ShardingProblem(
        name="loose",
        node_costs=(np.zeros(2),) * 2,
        memory=(
            MemoryTerm(node=0, start=0, end=4, usage=usage),
            MemoryTerm(node=1, start=2, end=6, usage=usage),
        ),
        memory_limit=7.0,
    )
    rows, memory = find_rows(problem)
    # Together they need 6 to 8 over [2, 4); alone at most 4.
    assert rows.times.tolist() == [2]
    assert rows.room.tolist() == [1.0]
    assert memory[0].usage.tolist() == [[0.0, 1.0]]


def test_negative_room_is_kept():
    """What no choice can mend is still a row, so that someone notices."""
    problem = ShardingProblem(
        name="tight",
        node_costs=(np.zeros(1),),
        memory=(MemoryTerm(node=0, start=0, end=1, usage=np.array([3.0])),),
        memory_limit=1.0,
        fixed_memory=((0, 1, 1.0),),
    )
    rows, memory = find_rows(problem)
    assert rows.room.tolist() == [-3.0]
    assert memory == {}


@pytest.mark.parametrize("limit", [None, 1e9])
def test_no_rows_without_a_limit_that_binds(limit):
    problem = random_problem(3)
    free = ShardingProblem(
        name="free",
        node_costs=problem.node_costs,
        memory=problem.memory,
        memory_limit=limit,
    )
    rows, memory = find_rows(free)
    assert (len(rows), memory) == (0, {})


@pytest.mark.parametrize(("amount", "slack"), [(1.0, 0.0), (0.1, 1e-12 * 2.0)])
def test_slack_is_for_fractions_only(amount, slack):
    """Sums of whole numbers are exact; those of fractions round."""
    problem = ShardingProblem(
        name="fractions",
        node_costs=(np.zeros(2),),
        memory=(MemoryTerm(node=0, start=0, end=2, usage=np.array([0.0, 5.0])),),
        memory_limit=2.0,
        fixed_memory=((0, 1, amount),),
    )
    assert find_rows(problem)[0].slack == slack


def test_forbidden_strategies_do_not_lower_the_least():
    problem = ShardingProblem(
        name="forbidden",
        node_costs=(np.array([np.inf, 0.0, 0.0]),),
        memory=(MemoryTerm(node=0, start=0, end=1, usage=np.array([1.0, 5.0, 9.0])),),
        memory_limit=6.0,
    )
    rows, memory = find_rows(problem)
    assert rows.room.tolist() == [1.0]
    assert memory[0].usage.tolist() == [[0.0, 0.0, 4.0]]


def test_sum_of_memories_joins_equal_intervals():
    parts = [term(0, 2, 1.0, 2.0), term(1, 3, 5.0, 5.0), term(0, 2, 10.0, 20.0)]
    total = sum_memories(parts)
    spans = list(zip(total.starts.tolist(), total.ends.tolist(), strict=True))
    assert spans == [(0, 2), (1, 3)]
    assert total.usage.tolist() == [[11.0, 22.0], [5.0, 5.0]]


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_sum_of_memories_is_the_sum_at_every_row(seed):
    random = np.random.default_rng(seed)
    parts = []
    for _ in range(int(random.integers(1, 5))):
        starts = random.integers(0, 5, 2)
        ends = starts + random.integers(1, 4, 2)
        usage = random.integers(0, 9, (2, 3)) * 1.0
        parts.append(NodeMemory(starts, ends, usage))
    total = sum_memories(parts)
    for row in range(9):
        single = [part.at(row) for part in parts]
        live = [usage for usage in single if usage is not None]
        summed = total.at(row)
        if summed is None:
            assert not live
        else:
            assert summed.tolist() == sum(live).tolist()


def test_taking_strategies_renumbers_them():
    memory = term(0, 1, 1.0, 2.0, 3.0).take(np.array([2, 0, 2]))
    assert memory.usage.tolist() == [[3.0, 1.0, 3.0]]
    assert memory.at(0).tolist() == [3.0, 1.0, 3.0]
    assert memory.at(1) is None
