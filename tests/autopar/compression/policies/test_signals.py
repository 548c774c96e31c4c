"""Tests the sums that policies compute from the reports of a step."""

from __future__ import annotations

import pytest

from autopar.compression.policies import GraVAC
from autopar.compression.policies.policy import GradientReport, Observation, sum_updates


def report(raw: float, sent: float, elements: int) -> GradientReport:
    """A report with given norms of the gradient and of the message."""
    return GradientReport(
        codec="topk:ratio=0.1",
        elements=elements,
        wire_bytes=1.0,
        dense_bytes=4.0,
        norm=2.0 * sent,
        relative_error=0.5,
        gain=0.25,
        residual_norm=0.0,
        gradient_norm=raw,
    )


REPORTS = {
    "late": report(1.0, 2.0, 3000),
    "starved": report(50.0, 25.0, 1000),
    "exact": report(3.0, 3.0, 4000),
}


def test_updates_are_smaller_where_gradients_arrive_late() -> None:
    """Adam divides by the mean square of what arrives; each element counts alike."""
    size, dense = sum_updates(REPORTS.values())
    assert (size, dense) == (pytest.approx(1500 + 500 + 4000), 8000)


def test_gravac_takes_that_for_its_gain() -> None:
    policy = GraVAC(alpha=1.0, epsilon=0.0, gain_of="updates")
    for step in (5, 10):
        policy.observe(Observation(step, 1.0, REPORTS, True))
    assert policy.gain == pytest.approx(6000 / 8000)


def test_gradients_of_zeros_lose_nothing() -> None:
    assert sum_updates([report(0.0, 0.0, 10)]) == (10.0, 10.0)
