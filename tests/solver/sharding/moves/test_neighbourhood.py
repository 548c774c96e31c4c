"""Tests that the neighbourhood search keeps to memory and never raises the cost."""

import math
import types

import numpy as np
import pytest
from solver_fields import binding_field, random_choices

from autopar_solver.clock import Clock
from autopar_solver.ilp.backends import backend_of
from autopar_solver.ilp.highs import ProgramAnswer
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.moves.neighbourhood import (
    LEAST_PAIRS,
    MOST_PAIRS,
    NeighbourhoodSearch,
)

HIGHS = backend_of("highs")


def search_of(field, backend=HIGHS, seed=0):
    dual = Dual(field)
    for _ in range(5):
        dual.sweep()
    return NeighbourhoodSearch(dual, backend, seed)


def fitting_choices(field):
    """The first random choices that are allowed and within the memory limit."""
    for seed in range(1000):
        choices = random_choices(field, seed)
        if field.memory.fits(choices) and field.cost(choices) < math.inf:
            return choices
    raise AssertionError("no choices fit")


@pytest.mark.parametrize("seed", range(6))
def test_never_worsens_and_stays_within_memory(seed):
    """Half a second of counted work: the same on every machine."""
    field = binding_field(seed, length=6, strategies=4)
    start = fitting_choices(field)
    clock = Clock(0.0, None).within(0.5)
    found = search_of(field).improve(start, math.inf, clock)
    assert field.memory.fits(found)
    assert field.cost(found) < field.cost(start)


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_optimum_of_a_field_that_is_one_part(seed):
    field = binding_field(seed, length=3)
    best = min(
        field.cost(np.array(choices))
        for choices in np.ndindex(*field.sizes.tolist())
        if field.memory.fits(np.array(choices))
    )
    clock = Clock(0.0, None).within(2.0)
    found = search_of(field).improve(fitting_choices(field), math.inf, clock)
    assert field.cost(found) == pytest.approx(best)


def test_the_same_seed_takes_the_same_steps():
    field = binding_field(7, length=6, strategies=4)
    start = fitting_choices(field)
    first, second = (
        search_of(field, seed=3).improve(start, math.inf, Clock(0.0, None).within(0.3))
        for _ in range(2)
    )
    assert first.tolist() == second.tolist()


def test_without_time_nothing_changes():
    field = binding_field(1, length=4)
    start = fitting_choices(field)
    clock = Clock(0.0, None).within(0.0)
    assert search_of(field).improve(start, math.inf, clock).tolist() == start.tolist()


def test_a_backend_that_finds_nothing_leaves_the_choices():
    """Parts then shrink down to the least."""

    def nothing(program, stop, start):
        return ProgramAnswer(None, -math.inf, False)

    field = binding_field(2, length=6, strategies=4)
    start = fitting_choices(field)
    search = search_of(field, nothing)
    found = search.improve(start, math.inf, Clock(0.0, None).within(0.5))
    assert field.cost(found) <= field.cost(start)
    assert LEAST_PAIRS <= search.pairs <= MOST_PAIRS


def counting(calls):
    """The HiGHS back end, which also notes the size of every program that it solves."""

    def solve(program, stop, start):
        calls.append(len(program.costs))
        return HIGHS(program, stop, start)

    return solve


def test_parts_that_are_solved_fast_grow():
    calls = []
    field = binding_field(4, length=8, strategies=4)
    search = search_of(field, counting(calls))
    search.pairs = 30
    search.improve(fitting_choices(field), math.inf, Clock(0.0, None).within(0.2))
    assert len(calls) > 3
    assert search.pairs > 30


def test_one_part_after_another_is_chosen_again():
    """The search goes on after a part that is not the whole field."""
    calls = []
    field = binding_field(5, length=8, strategies=4)
    search = search_of(field, counting(calls))
    search.pairs = LEAST_PAIRS // 10
    start = fitting_choices(field)
    found = search.improve(start, math.inf, Clock(0.0, None).within(1.0))
    assert len(calls) > 1
    assert len(set(calls)) > 1
    changed = np.flatnonzero(found != start)
    assert len(changed) > 1


def test_a_field_that_is_one_part_is_solved_once():
    calls = []
    field = binding_field(6, length=3)
    search = search_of(field, counting(calls))
    search.improve(fitting_choices(field), math.inf, Clock(0.0, None).within(2.0))
    assert len(calls) == 1


def test_a_part_stops_growing_once_it_is_large_enough():
    """In the middle of a node's neighbours, too."""
    search = search_of(binding_field(4, length=8, strategies=4))
    search.pairs = 10
    leaves = range(1, 9)
    links = {0: [(k, None) for k in leaves], **{k: [(0, None)] for k in leaves}}
    sizes = np.full(9, 2)
    part = search._grow(0, sizes, types.SimpleNamespace(links=links))
    assert part.tolist() == [0, 1, 2, 3]  # 4 pairs each
