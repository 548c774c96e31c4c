"""Prices bound every choice that fits."""

import numpy as np
from fields import UNLIMITED, field_of
from hypothesis import given, settings
from sharding_problems import ladder, problems

from autopar_solver.sharding.bounds.dual import Dual


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
