"""MessagePassing, elimination and prices: every bound is one, for every strategy."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sharding_problems import ladder, problems, random_problem

from autopar_solver.sharding.bounds.buckets import TooLargeError, mini_bucket_bounds
from autopar_solver.sharding.bounds.compiled import (
    compiled_loop,
    record_tape,
    sweep_loop,
)
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.bounds.message_passing import MessagePassing
from autopar_solver.sharding.field import flatten
from autopar_solver.sharding.graph import ContradictionError
from autopar_solver.sharding.reductions.build import build_graph
from autopar_solver.sharding.reductions.forbidden import drop_infinite

UNLIMITED = 10**9


def field_of(problem):
    """The problem as it is: nothing reduced but infinite node costs."""
    graph = build_graph(problem)
    try:
        drop_infinite(graph)
    except ContradictionError:
        reject()
    return flatten(graph)


def minima(field, costs):
    """The least cost, and the least of each flat strategy, by trying everything."""
    best = np.full(field.num_strategies, np.inf)
    for choices in np.ndindex(*field.sizes.tolist()):
        flat = field.offsets[:-1] + np.array(choices)
        total = costs[flat].sum()
        for (k, m), table in zip(field.edges, field.tables, strict=True):
            total += table[choices[k], choices[m]]
        best[flat] = np.minimum(best[flat], total)
    return best


@settings(max_examples=80, deadline=None)
@given(problems(memory=False, max_nodes=5, max_strategies=3), st.integers(1, 6))
def test_message_bounds(problem, sweeps):
    field = field_of(problem)
    messages = MessagePassing(field)
    best = minima(field, field.costs)
    last = -np.inf
    for _ in range(sweeps):
        swept = messages.sweep(field.costs)
        assert last <= swept.bound + 1e-9
        assert swept.base <= swept.bound + 1e-9
        assert (swept.base + swept.rises <= best + 1e-9).all()
        last = swept.bound


@settings(max_examples=60, deadline=None)
@given(
    problems(memory=False, max_nodes=6, max_strategies=3, max_edges=14),
    st.sampled_from([1, 4, 9, 30, UNLIMITED]),
)
def test_elimination_bounds(problem, limit):
    field = field_of(problem)
    best = minima(field, field.costs)
    costs, tables = MessagePassing(field).shifted(field.costs)
    found = mini_bucket_bounds(field, costs, tables, limit, UNLIMITED)
    assert (found.bound + found.rises <= best + 1e-9).all()
    if limit == UNLIMITED:
        assert found.exact
        possible = best < np.inf
        np.testing.assert_allclose(
            (found.bound + found.rises)[possible], best[possible]
        )
        if possible.any():
            assert field.cost(found.choices) == pytest.approx(found.bound)


def test_elimination_after_messages_is_no_worse():
    field = field_of(ladder(3, length=6, strategies=5, tightness=None))
    messages = MessagePassing(field)
    for _ in range(10):
        swept = messages.sweep(field.costs)
    costs, tables = messages.shifted(field.costs)
    for limit in (25, 125, UNLIMITED):
        found = mini_bucket_bounds(field, costs, tables, limit, UNLIMITED)
        assert found.bound >= swept.bound - 1e-9
    with pytest.raises(TooLargeError):
        mini_bucket_bounds(field, costs, tables, UNLIMITED, 10)


@given(problems(max_nodes=6), st.integers(0, 10**6))
def test_shifting_keeps_every_cost(problem, seed):
    field = field_of(problem)
    messages = MessagePassing(field)
    messages.sweep(field.costs)
    costs, tables = messages.shifted(field.costs)
    random = np.random.default_rng(seed)
    choices = np.array([int(random.integers(size)) for size in field.sizes])
    total = costs[field.offsets[:-1] + choices].sum()
    for (k, m), table in zip(field.edges, tables, strict=True):
        total += table[choices[k], choices[m]]
    expected = field.cost(choices) - field.constant
    if np.isfinite(expected):
        assert total == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("seed", range(5))
def test_compiled_loop_equals_numpy(seed):
    """The loop is plain Python too: it is compared whether numba is there or not."""
    field = field_of(random_problem(seed, max_edges=14))
    messages = MessagePassing(field, compiled=False)
    other = MessagePassing(field, compiled=False)
    tapes = record_tape(other._forward), record_tape(other._backward)
    for _ in range(3):
        swept = messages.sweep(field.costs)
        base, _ = tapes[0].run(sweep_loop, field.costs, other.buffer)
        bound, rises = tapes[1].run(sweep_loop, field.costs, other.buffer)
        assert (base, bound) == pytest.approx((swept.base, swept.bound))
        np.testing.assert_allclose(rises, swept.rises, atol=1e-9)
        np.testing.assert_allclose(other.buffer, messages.buffer, atol=1e-9)


def test_compiled():
    if compiled_loop() is None:
        pytest.skip("numba is not installed")
    field = field_of(ladder(0, length=5, strategies=7, tightness=None))
    plain = MessagePassing(field, compiled=False).sweep(field.costs)
    fast = MessagePassing(field, compiled=True).sweep(field.costs)
    assert fast.bound == pytest.approx(plain.bound)
    np.testing.assert_allclose(fast.rises, plain.rises, atol=1e-12)


def test_messages_resume():
    field = field_of(ladder(1, length=5, strategies=4, tightness=None))
    first = MessagePassing(field)
    for _ in range(5):
        first.sweep(field.costs)
    second = MessagePassing(field)
    second.resume(first.by_link())
    np.testing.assert_array_equal(first.buffer, second.buffer)
