"""Tests that the compiled loop computes the same as numpy."""

import numpy as np
import pytest
from sharding_problems import ladder, random_problem
from solver_fields import field_of
from solver_graphs import graph_of

from autopar_solver.sharding.bounds.message_passing import (
    MIN_PAIRS,
    MessagePassing,
    compiled_loop,
    record_tape,
    sweep_loop,
)
from autopar_solver.sharding.field import flatten


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


def test_small_fields_are_swept_in_numpy():
    """Loading the loop would take longer; the tape is not even written."""
    field = field_of(ladder(0, length=3, strategies=3, tightness=None))
    assert field.num_pairs < MIN_PAIRS
    assert MessagePassing(field)._tapes is None


def test_without_numba_there_is_no_loop(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert compiled_loop.__wrapped__() is None


def test_a_tape_without_links():
    """Nodes on their own: the bound is the sum of the least costs."""
    field = flatten(graph_of([[3.0, 1.0], [4.0, 9.0, 5.0]], {}))
    other = MessagePassing(field, compiled=False)
    tape = record_tape(other._forward)
    assert tape.widest == 3
    bound, rises = tape.run(sweep_loop, field.costs, other.buffer)
    assert (bound, rises.tolist()) == (5.0, [2.0, 0.0, 0.0, 5.0, 1.0])
