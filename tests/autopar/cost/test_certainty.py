"""Tests the uncertainty of predicted times."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster
from autopar.cost.breakdown import CostBreakdown, certainty_of, interval_s, step_s

SECONDS = st.floats(0.0, 10.0)
TERMS = (
    "matrix_s",
    "vector_s",
    "kernel_s",
    "waiting_s",
    "hideable_s",
    "waiting_latency_s",
    "hideable_latency_s",
    "codec_s",
)
DEVICES = [Cluster.parse(f"8:{name}").device for name in ("h100", "v5e", "cpu")]


@st.composite
def costs(draw: st.DrawFn) -> CostBreakdown:
    cost = CostBreakdown(**{name: draw(SECONDS) for name in TERMS})
    part = draw(st.floats(0.0, 1.0))
    return dataclasses.replace(cost, cover_s=part * cost.hideable_total_s)


@given(costs(), st.sampled_from(DEVICES))
def test_the_prediction_lies_between(cost: CostBreakdown, device: object) -> None:
    low, high = interval_s(cost, device)  # type: ignore[arg-type]
    assert 0.0 <= low <= step_s(cost) <= high
    scaled = interval_s(3.0 * cost, device)  # type: ignore[arg-type]
    assert scaled == pytest.approx((3.0 * low, 3.0 * high), abs=1e-12)


@given(costs(), st.sampled_from(DEVICES))
def test_terms_that_err_together_would_err_further(
    cost: CostBreakdown, device: object
) -> None:
    """Never wider than if every term were wrong by its whole error at once."""
    sure = certainty_of(device)  # type: ignore[arg-type]
    hidden = sure.bare * cost.cover_s
    each = (
        sure.matrix * cost.matrix_s,
        sure.vector * cost.vector_s,
        sure.kernel * cost.kernel_s,
        sure.transfer * (cost.waiting_s + cost.hideable_s),
        sure.latency * (cost.waiting_latency_s + cost.hideable_latency_s),
        sure.codec * cost.codec_s,
        sure.step * step_s(cost),
    )
    low, high = interval_s(cost, device)  # type: ignore[arg-type]
    assert high - step_s(cost) <= sum(each) + hidden + 1e-9
    assert step_s(cost) - low <= sum(each) + 1e-9


def test_what_is_hidden_makes_a_step_longer_alone() -> None:
    device = DEVICES[0]
    bare = interval_s(CostBreakdown(matrix_s=1.0), device)
    hidden = interval_s(
        CostBreakdown(matrix_s=1.0, hideable_s=0.4, cover_s=0.4), device
    )
    assert hidden[0] == bare[0]
    around = 1.0 - bare[0]
    assert hidden[1] == pytest.approx(1.0 + math.hypot(around, 0.2))
