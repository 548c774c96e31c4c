"""Tests lines of progress: steps, speed and loss."""

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


def paced(*steps: tuple[float, int, Any], last: int = -1) -> list[Any]:
    """The lines for steps with given times, devices and losses."""
    ledger, clock = Ledger(None), Clock()
    pace = Pace(ledger.write, 1.0, clock)
    for k, (now, devices, loss) in enumerate(steps, 1):
        clock.now = now
        pace.take(k, 8 * k, 8, devices, loss, last=k == last)
    return ledger.lines


def test_a_line_a_second_holds_the_median_from_step_to_step() -> None:
    """The time between steps counts, whatever the loop does there."""
    times = (0.0, 0.2, 0.3, 0.9, 1.2)
    first, second = paced(*((t, 2, 1.0 / (1 + t)) for t in times))
    assert (first["step"], first["position"], first["step_s"]) == (1, 8, None)
    assert (second["step"], second["steps"]) == (5, 4)
    assert second["step_s"] == pytest.approx(0.25)
    assert (second["loss"], second["finite"]) == (pytest.approx(1 / 2.2), True)


def test_the_time_of_a_change_is_no_step() -> None:
    _, second = paced((0.0, 2, 1.0), (0.5, 2, 1.0), (1.2, 1, 1.0))
    assert (second["devices"], second["steps"], second["step_s"]) == (1, 0, None)


def test_the_last_step_is_always_told() -> None:
    lines = paced((0.0, 1, 1.0), (0.1, 1, math.nan), last=2)
    assert [x["step"] for x in lines] == [1, 2]
    assert (lines[1]["loss"], lines[1]["finite"]) == (None, False)


def test_a_loss_is_the_first_number() -> None:
    assert loss_of((jnp.ones(3), jnp.bfloat16(0.5), 2.0)) == 0.5
    assert loss_of({"done": True, "name": jnp.ones((2, 2))}) is None


def test_the_time_of_another_batch_or_plan_is_no_step() -> None:
    ledger, clock = Ledger(None), Clock()
    pace = Pace(ledger.write, 1.0, clock)
    plans: list[dict[str, Any]] = [{}, {}, {}, {"codecs": ["int8"]}]
    for k, (batch, plan) in enumerate(zip((8, 8, 64, 64), plans, strict=True), 1):
        clock.now += 2.0
        pace.take(k, 8 * k, batch, 2, None, plan=plan)
    assert [x["step_s"] for x in ledger.lines] == [None, 2.0, None, None]
    assert [x.get("codecs") for x in ledger.lines] == [None, None, None, ["int8"]]


def test_a_line_says_what_was_measured_of_the_noise() -> None:
    ledger = Ledger(None)
    told = {"noise_scale": 40.0, "progress": 24.0}
    pace = Pace(ledger.write, 1.0, Clock())
    pace.take(1, 8, 8, 2, 1.0)
    pace.take(2, 16, 8, 2, 1.0, measured=lambda: told, last=True)
    assert ledger.lines[0]["noise_scale"] is None
    assert (ledger.lines[1]["noise_scale"], ledger.lines[1]["progress"]) == (40.0, 24.0)
