"""Tests that a gain which makes the loss rise gets a limit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.goodput.following import LossGuard, loss_in

USUAL = [2.0 + 0.1 * x for x in np.random.default_rng(0).standard_normal(40)]


def watched(losses: Sequence[float], gain: float, guard: LossGuard) -> LossGuard:
    for loss in losses:
        guard = guard.with_step(float(loss), gain)
    return guard


def test_usual_losses_raise_no_alarm() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        losses = 2.0 + 0.1 * draw.standard_normal(500)
        assert watched(losses, 8.0, LossGuard()).alarms == 0


def test_falling_losses_raise_no_alarm() -> None:
    assert watched(np.geomspace(10.0, 0.1, 200), 8.0, LossGuard()).alarms == 0


def test_one_loss_that_is_far_off_is_no_alarm() -> None:
    guard = watched(USUAL, 8.0, LossGuard())
    assert watched([30.0, 2.0, math.nan, 2.0], 8.0, guard).alarms == 0


@pytest.mark.parametrize("risen", [[3.5, 6.0], [math.nan, math.nan], [math.inf, 9.0]])
def test_two_in_a_row_halve_the_gain(risen: list[float]) -> None:
    guard = watched([*USUAL, *risen], 8.0, LossGuard())
    assert (guard.alarms, guard.most) == (1, 4.0)
    # What it was halved for may take some steps to show.
    assert watched([9.0] * 10, 4.0, guard).most == 4.0
    assert watched([9.0] * 12, 4.0, guard).most == 2.0


def test_it_never_goes_below_the_base_batch() -> None:
    guard = watched([*USUAL, 5.0, 5.0], 1.5, LossGuard())
    assert guard.most == 1.0


def test_a_gain_of_one_is_not_blamed() -> None:
    """The level to which the loss rose becomes the usual one."""
    guard = watched([*USUAL, *[5.0] * 40], 1.0, LossGuard())
    assert guard.alarms == 0
    assert watched([5.0] * 5, 8.0, guard).alarms == 0


def test_a_cap_is_lifted_after_calm_steps_and_later_the_next_time() -> None:
    guard = watched([*USUAL, 5.0, 5.0], 8.0, LossGuard())
    calm = watched([2.0] * 300, 4.0, guard)
    assert calm.most == 8.0
    again = watched([5.0, 5.0], 8.0, calm)
    assert (again.alarms, again.most) == (2, 4.0)
    assert watched([2.0] * 300, 4.0, again).most == 4.0


def test_steps_that_are_too_large_for_the_curvature_are_made_small_again() -> None:
    """Gradient descent on a parabola diverges with a gain of 30 and rate of 0.1."""
    draw, guard = np.random.default_rng(1), LossGuard()
    w, losses = 3.0, list[float]()
    for k in range(200):
        gain = min(1.0 if k < 40 else 30.0, guard.most)
        losses.append(0.5 * w * w + 1.0 + 0.02 * draw.standard_normal())
        guard = guard.with_step(losses[-1], gain)
        w -= 0.1 * gain * (w + 0.01 * draw.standard_normal())
    assert guard.alarms == 1
    assert max(losses[40:]) < 30.0
    assert losses[-1] < 1.2


def test_it_is_saved_as_json() -> None:
    for guard in (LossGuard(), watched([*USUAL, 5.0, 5.0], 8.0, LossGuard())):
        data = json.loads(json.dumps(guard.to_data()))
        assert LossGuard.from_data(data) == guard
    assert {f.name for f in dataclasses.fields(LossGuard)} == set(LossGuard().to_data())


@pytest.mark.parametrize(
    ("result", "loss"),
    [
        (np.float32(2.0), 2.0),
        (2.5, 2.5),
        ({"loss": np.float32(2.0), "accuracy": np.float32(0.5)}, 2.0),
        ((np.float32(3.0), np.zeros(4), np.int32(7)), 3.0),
        ({"loss_a": np.float32(1.0), "loss_b": np.float32(2.0)}, None),
        ((np.float32(1.0), np.float32(2.0)), None),
        (None, None),
    ],
)
def test_the_loss_is_found_where_there_is_no_doubt(
    result: object, loss: float | None
) -> None:
    assert loss_in(result) == loss


def test_processes_must_see_the_same_loss() -> None:
    assert loss_in(np.float32(2.0), alone=False) is None
