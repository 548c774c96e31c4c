"""Tests Accordion's rule for the batch size."""

from __future__ import annotations

import math

import pytest

from autopar.errors import PlanError
from autopar.goodput import CriticalRegimes


def after(rule: CriticalRegimes, *norms: float) -> list[bool]:
    """Whether the regime is critical after each window of steps with one norm."""
    found: list[bool] = []
    for norm in norms:
        for _ in range(int(rule.window)):
            rule = rule.with_step(norm**2, 1.0)
        found.append(rule.critical)
    return found


def test_windows_are_critical_where_the_norm_changes() -> None:
    rule = CriticalRegimes(window=4)
    assert rule.critical
    assert after(rule, 4.0, 3.9, 1.0, 0.9, 2.0) == [True, False, True, False, True]


def test_it_may_stay_large() -> None:
    rule = CriticalRegimes(window=4, only_grows=True)
    assert after(rule, 4.0, 3.9, 1.0) == [True, False, False]


def test_a_window_is_of_rows() -> None:
    """A batch of four base batches fills it in a quarter of the steps."""
    rule = CriticalRegimes(window=8).with_step(1.0, 4.0)
    assert rule.previous is None
    assert rule.with_step(1.0, 4.0).previous == 1.0


def test_steps_that_are_not_finite_do_not_count() -> None:
    rule = CriticalRegimes(window=2)
    assert rule.with_step(math.nan, 1.0) == rule


def test_it_goes_on_from_data() -> None:
    rule = CriticalRegimes(window=2).with_step(3.0, 1.0)
    assert CriticalRegimes(window=2).gone_on(rule.to_data()) == rule


@pytest.mark.parametrize("wrong", [{"eta": 0.0}, {"window": -1.0}])
def test_numbers_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="above 0"):
        CriticalRegimes(**wrong)
