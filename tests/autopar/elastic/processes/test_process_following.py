"""Tests when a run of several processes with an adaptive batch size ends."""

from __future__ import annotations

import math

import pytest

from autopar.elastic.processes.following import Ends


@pytest.mark.parametrize(
    ("ends", "rest_s"),
    [
        (Ends(), math.inf),
        (Ends(steps=30), 10.0),
        (Ends(steps=10), 0.0),
        (Ends(samples=1000.0), 12.5),
        (Ends(samples=300.0), 0.0),
        (Ends(steps=30, samples=1000.0), 10.0),
        (Ends(steps=90, samples=1000.0), 12.5),
    ],
)
def test_the_rest_of_a_run(ends: Ends, rest_s: float) -> None:
    """10 steps were worth 500 rows, the last one 20; it took half a second."""
    assert ends.rest_s(10, 500.0, 20.0, 0.5) == rest_s


def test_a_step_that_gained_nothing_says_nothing_of_rows() -> None:
    assert Ends(samples=1000.0).rest_s(10, 500.0, 0.0, 0.5) == math.inf
