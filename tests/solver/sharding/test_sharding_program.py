"""Tests that the integer program of a field has the field's costs and constraints."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import ladder, problems
from solver_fields import binding_field, field_of, random_choices, solvable_field
from solver_graphs import graph_of, term

from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import ProgramAnswer, StopCriteria
from autopar_solver.sharding.exact import (
    broken_rows,
    build_program,
    exclusion_cut,
    memory_cut,
    solve_field,
)
from autopar_solver.sharding.field import flatten

EXACT = StopCriteria(seconds=None, gap=1e-9)


def values_of(field, choices):
    """The values of all variables of the program that encode some choices."""
    values = []
    for k, size in enumerate(field.sizes):
        values += [float(a == choices[k]) for a in range(size)]
    for (k, m), table in zip(field.edges, field.tables, strict=True):
        for a in range(table.shape[0]):
            for b in range(table.shape[1]):
                values.append(float(a == choices[k] and b == choices[m]))
    return np.array(values)


def sums_of(program, values):
    return np.array(
        [
            program.values[start:end] @ values[program.columns[start:end]]
            for start, end in zip(program.starts, program.starts[1:], strict=False)
        ]
    )


def least_cost(field):
    """The least cost of all choices that fit, and how many choices have that cost."""
    best = math.inf
    for choices in np.ndindex(*field.sizes.tolist()):
        choices = np.array(choices)
        if field.memory.fits(choices):
            best = min(best, field.cost(choices))
    return best


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(problems(max_nodes=5), st.integers(0, 10**6), st.sampled_from([1.0, 8.0]))
def test_program_says_what_the_field_says(problem, seed, scale):
    """Choices satisfy the equalities; cost, forbidden pairs and rows agree."""
    field = field_of(problem)
    choices = random_choices(field, seed)
    rows = range(len(field.memory.room))
    cuts = [memory_cut(field, row) for row in rows]
    program = build_program(field, scale, cuts)
    values = values_of(field, choices)
    sums = sums_of(program, values)
    first = program.num_rows - len(cuts)
    np.testing.assert_array_equal(sums[:first], program.upper[:first])
    np.testing.assert_array_equal(program.lower[:first], program.upper[:first])
    cost = field.cost(choices) - field.constant
    if (values <= program.most).all():
        assert values @ program.costs == pytest.approx(cost / scale)
    else:
        assert cost == np.inf
    used = field.memory.usage_of(choices)
    for cut, total, usage, room in zip(
        cuts, sums[first:], used, field.memory.room, strict=True
    ):
        assert cut.upper == room
        assert total * (room if room > 0 else 1.0) == pytest.approx(usage)


def test_rows_have_the_names_of_the_docstring():
    field = binding_field(0, length=2, strategies=3)
    cuts = [memory_cut(field, 0), exclusion_cut(field, 0, np.zeros(4, np.int64))]
    program = build_program(field, 1.0, cuts)
    assert program.names == ("memory_0", "exclusion_0")
    pairs = sum(table.size for table in field.tables)
    assert program.num_binary == field.num_strategies
    assert len(program.costs) == field.num_strategies + pairs
    marginals = sum(sum(table.shape) for table in field.tables)
    assert program.num_rows == field.num_nodes + marginals + len(cuts)


def test_exclusion_forbids_these_choices_and_no_others():
    field = binding_field(1, length=2, strategies=2)
    row = int(np.argmax([len(memory_cut(field, r).columns) for r in range(3)]))
    chosen = np.array([0, 1, 1, 0])
    cut = exclusion_cut(field, row, chosen)
    counted = set(cut.columns.tolist())
    for choices in np.ndindex(2, 2, 2, 2):
        flat = field.offsets[:-1] + np.array(choices)
        total = sum(int(f) in counted for f in flat)
        same = all(
            int(f) in flat for f in (field.offsets[:-1] + chosen) if int(f) in counted
        )
        assert (total > cut.upper) == same


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(problems(max_nodes=5, max_strategies=3))
def test_solving_a_field_matches_brute_force(problem):
    field = solvable_field(problem)
    least = least_cost(field)
    answer = solve_field(field, backend_of("highs"), EXACT)
    assert answer.finished
    if math.isinf(least):
        assert answer.choices is None
        assert answer.bound == math.inf
        return
    assert field.memory.fits(answer.choices)
    assert answer.cost == field.cost(answer.choices)
    assert answer.cost == pytest.approx(least)
    assert answer.bound <= least + 1e-7 * max(1.0, abs(least))


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
@pytest.mark.parametrize("seed", range(6))
def test_cbc_solves_the_same_field(seed):
    field = binding_field(seed, length=3, strategies=3)
    answer = solve_field(field, backend_of("cbc"), EXACT)
    assert field.memory.fits(answer.choices)
    assert answer.cost == pytest.approx(least_cost(field))


def test_rows_that_were_broken_can_start_the_next_solve():
    field = binding_field(2, length=4, strategies=3)
    first = solve_field(field, backend_of("highs"), EXACT)
    assert first.rows
    asked = []

    def counting(program, stop, start):
        asked.append(program)
        return backend_of("highs")(program, stop, start)

    again = solve_field(field, counting, EXACT, first.rows)
    assert again.cost == pytest.approx(first.cost)
    assert len(asked) == 1


def test_a_start_that_fits_changes_nothing():
    field = binding_field(3, length=4, strategies=3)
    best = solve_field(field, backend_of("highs"), EXACT)
    again = solve_field(
        field, backend_of("highs"), EXACT, best.rows, start=best.choices
    )
    assert again.cost == pytest.approx(best.cost)


def test_a_row_broken_by_tolerance_is_excluded():
    """A back end that keeps breaking a row is told not to make that choice."""
    graph = graph_of([[0.0, 1.0]], {}, {0: term(0, 1, 5.0, 0.0)}, [4.0])
    field = flatten(graph)
    names = []

    def sloppy(program, stop, start):
        names.append(program.names)
        over = "exclusion_0" not in program.names
        values = np.array([1.0, 0.0] if over else [0.0, 1.0])
        return ProgramAnswer(values, -math.inf, True)

    answer = solve_field(field, sloppy, EXACT)
    assert answer.choices.tolist() == [1]
    assert names == [(), ("memory_0",), ("memory_0", "exclusion_0")]


def test_nothing_below_the_cutoff_is_no_choice():
    field = field_of(ladder(4, length=3, strategies=3, tightness=None))
    best = solve_field(field, backend_of("highs"), EXACT)
    stop = StopCriteria(seconds=None, gap=1e-9, cutoff=best.cost - 0.01)
    answer = solve_field(field, backend_of("highs"), stop)
    assert answer.finished
    assert answer.choices is None or answer.cost >= best.cost - 1e-7
    assert answer.bound >= stop.cutoff - 1e-7


def test_without_time_nothing_is_claimed():
    field = field_of(ladder(5, length=3, strategies=3, tightness=None))
    stop = StopCriteria(seconds=0.0, gap=0.0)
    answer = solve_field(field, backend_of("highs"), stop)
    assert (answer.choices, answer.finished) == (None, False)
    assert answer.bound == -math.inf


def test_broken_rows_are_the_worst_of_each_stretch():
    memory = {0: term(0, 6, 0.0, 10.0)}
    room = [9.0, 7.0, 8.0, 12.0, 9.5, 10.0]
    field = flatten(graph_of([[0.0, 0.0]], {}, memory, room))
    assert broken_rows(field, np.array([0])) == ()
    # Over by 1, 3 and 2; fits; over by a half; fits.
    assert broken_rows(field, np.array([1])) == (1, 4)


def test_a_pair_of_nodes_without_a_pair_of_strategies():
    """Reductions that time cut short may leave a table that forbids everything."""
    forbidden = np.full((2, 2), np.inf)
    field = flatten(graph_of([[0.0, 1.0], [0.0, 1.0]], {(0, 1): forbidden}))
    answer = solve_field(field, backend_of("highs"), EXACT)
    assert (answer.choices, answer.bound, answer.finished) == (None, math.inf, True)


def test_a_row_without_room_forbids_what_occupies_it():
    graph = graph_of([[0.0, 1.0]], {}, {0: term(0, 1, 5.0, 0.0)}, [0.0])
    answer = solve_field(flatten(graph), backend_of("highs"), EXACT)
    assert answer.choices.tolist() == [1]


def test_a_single_choice_can_be_excluded():
    """The row's usage is over its room by less than a back end's tolerance."""
    room = 2.0**40
    memory = {0: term(0, 1, room + 1.0, 0.0)}
    field = flatten(graph_of([[0.0, 1.0]], {}, memory, [room]))
    answer = solve_field(field, backend_of("highs"), EXACT)
    assert answer.choices.tolist() == [1]
    assert answer.finished
