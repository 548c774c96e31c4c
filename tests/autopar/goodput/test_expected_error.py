"""Tests the expected error of a plan's codecs, before any measurement."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest

from autopar.goodput.choice import EXACT
from autopar.goodput.configurations import error_of
from autopar.goodput.ways import expected_error


def planned(codec: str, square: float, *, feedback: bool) -> Any:
    """The parts of a plan that are read, for one gradient with a codec."""
    error = math.sqrt(square)
    gradient = types.SimpleNamespace(
        codec=codec, error=error, feedback=feedback, workers=4
    )
    return types.SimpleNamespace(
        gradients=[gradient],
        stages=[None],
        compression=types.SimpleNamespace(error=error),
    )


@pytest.mark.parametrize("function", [expected_error, error_of])
@pytest.mark.parametrize("ratio", [0.25, 0.1])
def test_elements_that_all_draw_alike_err_together(function: Any, ratio: float) -> None:
    """Scaled up to be right on average, they err by 1 / ratio - 1."""
    codec = f"randk:unbiased=true,ratio={ratio}"
    found = function(planned(codec, 1 - ratio, feedback=True))
    assert found.own == 0
    assert found.shared == pytest.approx(1 / ratio - 1)


@pytest.mark.parametrize("function", [expected_error, error_of])
def test_workers_round_each_by_itself(function: Any) -> None:
    plan = planned("int8:rounding=stochastic", 2e-4, feedback=False)
    found = function(plan)
    assert (found.own, found.shared) == (pytest.approx(2e-4), 0)


def test_what_is_sent_later_counts_like_what_is_lost_until_it_is_measured() -> None:
    plan = planned("topk:ratio=0.05", 0.5, feedback=True)
    found = expected_error(plan)
    assert (found.own, found.shared) == (pytest.approx(1.0), 0)


def test_dense_gradients_are_exact() -> None:
    assert expected_error(planned("dense", 0.0, feedback=False)) == EXACT
