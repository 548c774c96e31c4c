"""Tests the second moments by which Adam's signals are divided."""

from __future__ import annotations

import json

import pytest

from autopar.compression.policies import GraVAC
from autopar.compression.policies.gravac import Moments, update_moments
from autopar.compression.policies.policy import GradientReport, Observation, Signal


def report(signal: Signal | None, codec: str = "topk") -> GradientReport:
    return GradientReport(codec, 64, 1.0, 4.0, 1.0, 0.5, 0.5, 0.0, 1.0, signal=signal)


def test_they_are_means_that_forget() -> None:
    moments: Moments = {}
    update_moments(moments, {"w": report(Signal(1.0, 8.0, 2.0, 16.0))}, 0.5)
    (found,) = update_moments(moments, {"w": report(Signal(3.0, 2.0, 4.0, 1.0))}, 0.5)

    # The weights 1/4 and 1/2, of which the sum is 3/4.
    assert found.signal is not None
    assert found.signal.sent_square == pytest.approx((8.0 / 4 + 2.0 / 2) / 0.75)
    assert found.signal.dense_square == pytest.approx((16.0 / 4 + 1.0 / 2) / 0.75)
    assert (found.signal.sent, found.signal.dense) == (3.0, 4.0)


def test_the_first_is_as_it_is_and_none_stays_none() -> None:
    first = report(Signal(1.0, 8.0, 2.0, 16.0))
    moments: Moments = {}
    found = update_moments(moments, {"w": first, "b": report(None)}, 0.999)
    assert found[0].signal is not None
    assert found[0].signal.sent_square == pytest.approx(8.0)
    assert found[1].signal is None
    assert list(moments) == ["w"]


def test_a_level_that_sends_little_at_first_is_not_taken_for_better() -> None:
    """Its messages are a tenth, and so is what they carry; b2=0 would not see it."""
    gains: dict[float, float] = {}
    for b2 in (0.0, 0.999):
        policy = GraVAC(
            levels=("topk", "topk:ratio=0.001"), every=5, window=1, epsilon=0.0,
            gain_of="signal-updates", explore=0.02, b2=b2,
        )  # fmt: skip
        policy.observe(Observation(5, 1.0, {"w": report(Signal(1, 1, 1, 1))}, True))
        assert policy.codec == "topk:ratio=0.001"
        little = report(Signal(0.1, 0.01, 1.0, 1.0), policy.codec)
        policy.observe(Observation(10, 1.0, {"w": little}, True))
        gains[b2] = policy.state.throughput[1] or 0.0
        assert json.dumps(policy.state_dict())
    assert gains[0.0] == pytest.approx(1.0)
    # With a long memory the second moment is the mean of both squares.
    assert gains[0.999] == pytest.approx(0.1 / ((1 + 0.01) / 2) ** 0.5, rel=0.01)


def test_what_they_keep_is_below_all() -> None:
    with pytest.raises(ValueError, match="b2 must be from 0 to below 1"):
        GraVAC(b2=1.0)
