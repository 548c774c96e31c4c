"""Tests that the dual bound is at most the cost of every feasible choice."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples
from sharding_problems import ladder, problems
from solver_fields import UNLIMITED, binding_field, field_of

from autopar_solver.sharding.bounds.dual import Dual, peaks


@settings(max_examples=examples(60), deadline=None)
@given(problems(max_nodes=5, max_strategies=3))
def test_priced_bounds(problem):
    """With prices on memory, bounds hold for every choice that fits."""
    field = field_of(problem)
    dual = Dual(field)
    dual.sweep()
    for _ in range(6):
        dual.ascend(np.inf)
    dual.deepen(UNLIMITED, UNLIMITED)
    for _ in range(3):
        dual.ascend(100.0)
    for choices in np.ndindex(*field.sizes.tolist()):
        choices = np.array(choices)
        if field.memory.fits(choices):
            cost = field.cost(choices)
            flat = field.offsets[:-1] + choices
            assert dual.bound <= cost + 1e-7
            assert (dual.bounds[flat] <= cost + 1e-7).all()


def test_prices_raise_the_bound():
    field = field_of(ladder(4, length=10, strategies=6, tightness=0.25))
    dual = Dual(field)
    for _ in range(10):
        dual.sweep()
    free = dual.bound
    for _ in range(100):
        dual.ascend(np.inf)
    assert dual.bound > free + 0.01 * abs(free)
    assert (dual.best_prices >= 0).all()
    assert dual.best_prices.any()


def fitting_costs(field):
    """Yields every choice within the memory limit, with its cost."""
    for choices in np.ndindex(*field.sizes.tolist()):
        if field.memory.fits(np.array(choices)):
            yield np.array(choices), field.cost(np.array(choices))


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problems(max_nodes=4, max_strategies=3), st.integers(0, 10**6))
def test_any_prices_prove_a_bound(problem, seed):
    """Prices drawn at random bound the cost as the best ones do."""
    field = field_of(problem)
    random = np.random.default_rng(seed)
    prices = random.integers(0, 4, len(field.memory.room)) * 1.0
    dual = Dual(field, prices)
    dual.sweep()
    for choices, cost in fitting_costs(field):
        assert dual.bound <= cost + 1e-7
        flat = field.offsets[:-1] + choices
        assert (dual.bounds[flat] <= cost + 1e-7).all()


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problems(max_nodes=4, max_strategies=3), st.integers(1, 12))
def test_what_is_proved_stays_proved(problem, steps):
    """Steps may lose ground; the best bounds never do."""
    field = field_of(problem)
    dual = Dual(field)
    dual.sweep()
    for _ in range(steps):
        bound, bounds = dual.bound, dual.bounds.copy()
        dual.ascend(np.inf)
        assert dual.bound >= bound
        assert (dual.bounds >= bounds).all()
        assert (dual.prices >= 0).all()


def test_what_is_no_number_proves_nothing():
    """A sweep at costs that overflowed leaves the bounds that are known."""
    dual = Dual(field_of(ladder(3, length=3, strategies=3, tightness=1.0)))
    dual.sweep()
    bound, bounds = dual.bound, dual.bounds.copy()

    dual.costs = np.full_like(dual.costs, np.nan)
    dual.sweep()

    assert dual.bound == bound
    assert (dual.bounds == bounds).all()


def test_costs_are_those_of_the_prices():
    field = binding_field(0)
    prices = np.arange(len(field.memory.room)) * 0.5
    dual = Dual(field, prices)
    expected = field.costs + field.memory.cost_at(prices, field.num_strategies)
    assert dual.costs.tolist() == expected.tolist()
    assert Dual(field).costs.tolist() == field.costs.tolist()


def test_elimination_bounds_no_less_than_messages():
    field = binding_field(3)
    dual = Dual(field)
    dual.sweep()
    before = dual.bound
    assert dual.bucket_choices is None
    assert dual.deepen(UNLIMITED, UNLIMITED)
    assert dual.bound >= before - 1e-9
    assert len(dual.bucket_choices) == field.num_nodes
    dual.lighten()
    assert dual.bucket_choices is None


def test_elimination_that_is_too_large_is_left_out():
    field = binding_field(3)
    dual = Dual(field)
    assert not dual.deepen(UNLIMITED, 1)
    light = dual.step_seconds
    assert dual.deepen(UNLIMITED, UNLIMITED)
    assert dual.step_seconds > light


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    entries=st.sampled_from([1, 4, 9]),
    share=st.sampled_from([1e-6, 1e-2, 1.0]),
)
def test_bounds_hold_where_elimination_splits_nodes(seed, entries, share):
    """Whatever gap is guessed; the expected use is one that choices can have."""
    field = field_of(ladder(seed, length=3, strategies=3, tightness=0.6))
    dual = Dual(field)
    dual.sweep()
    assert dual.deepen(entries, UNLIMITED)
    for _ in range(4):
        dual.ascend(dual.bound + share * abs(dual.bound))
        used = dual.expected_use(1e-3 * share)
        assert (used >= -1e-9).all()
        assert (used <= most_used(field) + 1e-9).all()
    for choices, cost in fitting_costs(field):
        assert dual.bound <= cost + 1e-7
        assert (dual.bounds[field.offsets[:-1] + choices] <= cost + 1e-7).all()


def most_used(field):
    """The memory of each row if each term has its largest usage."""
    memory = field.memory
    chosen = [memory.usage[memory.term == k].max() for k in range(len(memory.node))]
    rows = np.arange(len(memory.room))
    live = (memory.starts[:, None] <= rows) & (rows < memory.ends[:, None])
    return np.array(chosen) @ live


def test_nodes_that_elimination_splits_have_an_expected_use():
    """All strategies of a node may rise, by much more than the temperature."""
    field = field_of(ladder(1, length=12, strategies=4, tightness=0.6))
    dual = Dual(field)
    dual.sweep()
    assert dual.deepen(4, UNLIMITED)
    least = np.minimum.reduceat(dual.rises, field.offsets[:-1])
    assert least.max() > 0

    cold = dual.expected_use(1e-4 * least.max())

    best = field.memory.usage_of(field.least(dual.rises))
    np.testing.assert_allclose(cold, best, rtol=1e-6)


def test_expected_use_is_near_the_least_rises():
    """When cold, the strategies that do not rise are certain; when hot, all alike."""
    field = binding_field(1)
    dual = Dual(field)
    dual.sweep()
    cold = dual.expected_use(1e-9)
    best = field.memory.usage_of(field.least(dual.rises))
    np.testing.assert_allclose(cold, best, rtol=1e-6)
    hot = dual.expected_use(1e12)
    mean = field.memory.expected_usage(1.0 / np.repeat(field.sizes, field.sizes))
    np.testing.assert_allclose(hot, mean, rtol=1e-6)


def test_peaks_are_one_for_each_stretch():
    values = np.array([0.0, 1.0, 3.0, 3.0, -1.0, 2.0])
    assert np.flatnonzero(peaks(values)).tolist() == [2, 5]
    assert not peaks(np.zeros(3)).any()
    assert not peaks(np.zeros(0)).any()
