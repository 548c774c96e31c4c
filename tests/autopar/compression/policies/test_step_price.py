"""Tests the price of a step for a falling learning rate."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from autopar.compression.policies import GraVAC
from autopar.compression.policies.gravac import falls_by, step_price_s
from autopar.compression.policies.policy import GradientReport, Observation, Signal

LEVELS = ("topk:ratio=0.1", "topk")
GAINS: dict[str, float] = dict(zip(LEVELS, (1.0, 0.6), strict=True))
PACES: dict[str, float] = dict(zip(LEVELS, (1.0, 0.4), strict=True))


def drawn(seed: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Gains and paces of two or three levels, and falling rates."""
    random = np.random.default_rng(seed)
    levels = [(g, t) for g, t in random.uniform(0.1, 1.0, (2 + seed % 2, 2)).tolist()]
    steps = 2 + seed % 4
    return levels, sorted(random.uniform(0.1, 1.0, steps).tolist(), reverse=True)


def picked(levels: Sequence[tuple[float, float]], falls: float) -> tuple[float, float]:
    """The level with the most progress per second, price included."""
    price = step_price_s(levels, falls)
    return max(levels, key=lambda level: level[0] / (level[1] + price))


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_levels_gets_as_far_in_less_time(seed: int) -> None:
    """Against all orders of at most as many steps."""
    levels, rates = drawn(seed)
    last = len(rates) - 1
    chosen = [
        picked(levels, falls_by(rates.__getitem__, k, last)) for k in range(last + 1)
    ]

    def progress(order: Sequence[tuple[float, float]]) -> float:
        return sum(rate * gain for rate, (gain, _) in zip(rates, order, strict=False))

    def taken_s(order: Sequence[tuple[float, float]]) -> float:
        return sum(pace for _, pace in order)

    for steps in range(1, len(rates) + 1):
        for order in itertools.product(levels, repeat=steps):
            if progress(order) >= progress(chosen):
                assert taken_s(order) >= taken_s(chosen) - 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_a_rate_that_stays_makes_no_price(seed: int) -> None:
    assert step_price_s(drawn(seed)[0], 1.0) == pytest.approx(0.0, abs=1e-12)


def test_nothing_is_priced_before_anything_is_measured() -> None:
    assert step_price_s([], 5.0) == 0.0
    assert step_price_s([(0.0, 1.0)], 5.0) == 0.0


def test_warm_up_makes_no_price() -> None:
    """A rate below the last one is as the last."""
    assert falls_by(lambda k: 0.1 + k, 0, 9) == 1.0
    assert falls_by(lambda k: 1.0 / (1 + k), 30, 9) == 1.0


def used(policy: GraVAC, steps: int) -> list[str]:
    """The codecs used in a training with the gains and seconds above."""
    codecs = [policy.levels[0]]
    for step in range(1, steps):
        codec = codecs[-1]
        signal = Signal(GAINS[codec], 1.0, 1.0, 1.0)
        seen = GradientReport(
            codec, 4096, 1.0, 4.0, 1.0, 0.5, 0.5, 0.0, 1.0, signal=signal
        )
        policy.observe(Observation(step, PACES[codec], {"w": seen}, True))
        codecs.append(policy.codec)
    return codecs


def gravac(rate: Callable[[int], float] | None = None, steps: int = 0) -> GraVAC:
    return GraVAC(
        levels=LEVELS, every=1, window=1, epsilon=0.0, gain_of="signal",
        explore=0.02, rate=rate, steps=steps,
    )  # fmt: skip


def test_it_takes_the_quick_level_once_the_rate_has_fallen() -> None:
    """The first makes 1 a second, the second 1.5; a step's price makes up for it.

    With ``price = falls / 1.5 - 1`` of the first, ``1 / (1 + price)`` is above
    ``0.6 / (0.4 + price)`` from ``falls = 2.25`` on.
    """
    falling = used(gravac(lambda k: max(1.0, 10.0 - 0.1 * k), 200), 200)
    assert falling[:70].count(LEVELS[0]) > 60
    assert falling[100:].count(LEVELS[1]) > 90
    assert used(gravac(lambda _: 3.0, 200), 70).count(LEVELS[1]) > 60
    assert used(gravac(), 70).count(LEVELS[1]) > 60


def test_paces_are_saved() -> None:
    policy = gravac(lambda k: 2.0 - 0.001 * k, 1000)
    used(policy, 9)
    again = gravac(lambda k: 2.0 - 0.001 * k, 1000)
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert again.state == policy.state
    assert again.state.paces == [1.0, 0.4]


def test_a_rate_needs_a_last_step_at_which_it_is_positive() -> None:
    with pytest.raises(ValueError, match="got steps=0; say steps="):
        gravac(lambda _: 1.0)
    with pytest.raises(ValueError, match=r"rate\(10\) must be positive, got 0\.0"):
        gravac(lambda k: 10.0 - k, 10)
