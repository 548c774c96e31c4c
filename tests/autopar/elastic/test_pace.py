"""Lines of progress: how far a run is, how fast, and with which loss."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest

from autopar.elastic.ledger import Ledger
from autopar.elastic.pace import Pace, loss_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(*steps: tuple[float, int, float, Any], last: int = -1) -> list[Any]:
    """The lines of steps: when, on how many devices, seconds, loss."""
    ledger, clock = Ledger(None), Clock()
    pace = Pace(ledger, 1.0, clock)
    for k, (now, devices, seconds, loss) in enumerate(steps, 1):
        clock.now = now
        pace.done(k, 8 * k, 8, devices, seconds, loss, last=k == last)
    return ledger.lines


def test_a_line_a_second_holds_the_median_since_the_last() -> None:
    steps = [(0.0, 2, 5.0, 1.0), *((0.3 * k, 2, 0.1 * k, 1.0 / k) for k in (1, 2, 3))]
    first, second = paced(*steps, (1.2, 2, 0.2, 0.25))
    assert (first["step"], first["position"], first["step_s"]) == (1, 8, 5.0)
    assert (second["step"], second["steps"]) == (5, 4)
    assert second["step_s"] == pytest.approx(0.2)
    assert (second["loss"], second["finite"]) == (0.25, True)


def test_steps_of_another_world_do_not_count() -> None:
    _, second = paced((0.0, 2, 5.0, 1.0), (0.5, 2, 9.0, 1.0), (1.5, 1, 0.5, 1.0))
    assert (second["devices"], second["steps"], second["step_s"]) == (1, 1, 0.5)


def test_the_last_step_is_always_told() -> None:
    lines = paced((0.0, 1, 1.0, 1.0), (0.1, 1, 1.0, math.nan), last=2)
    assert [x["step"] for x in lines] == [1, 2]
    assert (lines[1]["loss"], lines[1]["finite"]) == (None, False)


def test_a_loss_is_the_first_number() -> None:
    assert loss_of((jnp.ones(3), jnp.bfloat16(0.5), 2.0)) == 0.5
    assert loss_of({"done": True, "name": jnp.ones((2, 2))}) is None
