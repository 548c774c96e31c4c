"""Tests progress ratios of pairs of trainings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.goodput.following import progress_ratio, steps_to


def losses(
    rate: float, steps: int = 400, noise: float = 0.0, seed: int = 0
) -> list[float]:
    draw = np.random.default_rng(seed)
    found = 4.0 * np.exp(-rate * np.arange(steps)) + 1.0
    return list(found + noise * draw.standard_normal(steps))


def test_a_codec_that_is_slower() -> None:
    """With 0.8 of the rate every loss takes 1 / 0.8 of the rows."""
    found = progress_ratio([losses(0.01)], [losses(0.008)])

    assert found.value == pytest.approx(0.8, rel=0.02)
    assert found.interval() == (-math.inf, math.inf)


def test_the_interval_holds_the_ratio() -> None:
    dense = [losses(0.01, noise=0.02, seed=k) for k in range(5)]
    coded = [losses(0.008, noise=0.02, seed=k) for k in range(5)]
    low, high = progress_ratio(dense, coded).interval()

    assert low < 0.8 < high
    assert high - low < 0.3


def test_steps_to_a_loss() -> None:
    assert steps_to([4.0, 3.0, 1.0], 2.0) == pytest.approx(2.5)
    assert steps_to([4.0, 3.0, 1.0], 4.0) == 1.0
    assert steps_to([4.0, 3.0], 2.0) == math.inf


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(PlanError, match="as many of each"):
        progress_ratio([losses(0.1)], [])
    with pytest.raises(PlanError, match="no loss in common"):
        progress_ratio([[4.0, 3.0]], [[2.0, 1.0]])
    with pytest.raises(PlanError, match="finite"):
        progress_ratio([[4.0, math.nan]], [[2.0, 1.0]])
