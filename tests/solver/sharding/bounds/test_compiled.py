"""The compiled loop does what numpy does."""

import numpy as np
import pytest
from fields import field_of
from sharding_problems import ladder, random_problem

from autopar_solver.sharding.bounds.compiled import (
    compiled_loop,
    record_tape,
    sweep_loop,
)
from autopar_solver.sharding.bounds.message_passing import MessagePassing


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
