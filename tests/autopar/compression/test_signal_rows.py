"""Tests the signal of messages against sums over all pairs of workers."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_cases import case_of
from compression_mesh import FED_BACK, WORKERS, norm, normal, run

from autopar import PlanError
from autopar.compression.codecs.quantise import Dense
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import Gradient
from autopar.compression.policies import GraVAC
from autopar.compression.policies.policy import (
    GradientReport,
    Observation,
    Signal,
    signal_updates,
    sum_signals,
)
from autopar.compression.synchronise import (
    DENSE_SIGNAL,
    DENSE_SQUARE,
    NON_FINITE,
    SENT_SIGNAL,
    SENT_SQUARE,
    WIDTH,
    sketch,
)

TOPK = parse_codec("topk:ratio=0.1")


def between(sent: np.ndarray, others: np.ndarray) -> float:
    """The sum of inner products between a worker's message and other workers'
    gradients.
    """
    pairs = itertools.permutations(range(WORKERS), 2)
    return float(sum(np.vdot(sent[i], others[j]) for i, j in pairs))


@pytest.mark.parametrize("text", ["topk:ratio=0.1", "int8", "powersgd:rank=2"])
def test_products_between_workers_are_exact_for_what_is_sent(text: str) -> None:
    gradient = Gradient("w", (24, 16), parse_codec(text), FED_BACK)
    states, before = None, np.zeros((WORKERS, 24, 16), np.float32)
    for step in range(3):
        partials = normal(WORKERS, 24, 16, seed=step)
        (total,), states, sums = run([gradient], [partials], states, step, signals=True)
        after = states[0]["residual"]
        sent, rows = before + partials - after, sums[:, 0].sum(axis=0)
        before = after

        # Codecs with several shots send other sums than those of what workers sent.
        others = total[0] - sent
        expected = float(sum(np.vdot(others[i], partials[i]) for i in range(WORKERS)))
        assert rows[SENT_SIGNAL] == pytest.approx(expected, abs=1e-2)
        assert rows[SENT_SQUARE] == pytest.approx(norm(total[0]) ** 2, rel=1e-5)
        if text.startswith("topk"):
            assert expected == pytest.approx(between(sent, partials), abs=1e-2)


def test_small_gradients_are_not_folded() -> None:
    partials = normal(WORKERS, 4, 16)
    _, _, sums = run([Gradient("w", (4, 16), TOPK, FED_BACK)], [partials], signals=True)
    rows = sums[:, 0].sum(axis=0)
    assert rows[DENSE_SIGNAL] == pytest.approx(between(partials, partials), abs=1e-3)
    assert rows[DENSE_SQUARE] == pytest.approx(norm(partials.sum(axis=0)) ** 2)


def test_folded_ones_are_right_in_the_mean_over_signs() -> None:
    one, two = normal(40, 50), normal(40, 50, seed=1) + 0.5 * normal(40, 50)
    folded = jax.jit(jax.vmap(sketch, in_axes=(None, 0)))
    seeds = jnp.arange(2000, dtype=jnp.uint32)
    found = np.sum(np.asarray(folded(one, seeds) * folded(two, seeds)), axis=1)

    spread = np.sqrt(2 / WIDTH) * norm(one) * norm(two)
    assert found.std() < 1.1 * spread
    assert found.mean() == pytest.approx(np.vdot(one, two), abs=4 * spread / 2000**0.5)


def test_noise_of_one_worker_carries_nothing() -> None:
    """Norms of what is sent grow with noise, the signal does not."""
    true = 0.1 * normal(32, 32)
    gradient, ratios = Gradient("w", (32, 32), TOPK, FED_BACK), []
    for noise in (0.0, 1.0):
        states, rows = None, np.zeros(NON_FINITE + 5)
        for step in range(40):
            partials = true + noise * normal(WORKERS, 32, 32, seed=step + 1)
            _, states, sums = run([gradient], [partials], states, step, signals=True)
            rows = rows + sums[:, 0].sum(axis=0)
        ratios.append(rows[SENT_SIGNAL] / (WORKERS * (WORKERS - 1) * norm(true) ** 2))
    # 40 steps send nearly all of a gradient that stays, of which noise sends no more.
    assert ratios[0] == pytest.approx(40, rel=0.15)
    assert ratios[1] == pytest.approx(40, rel=0.25)


def test_gradients_without_a_codec_are_not_measured() -> None:
    dense = Gradient("a", (32, 32), Dense())
    part = Gradient("b", (32, 32), TOPK, FED_BACK, scatter_dim=0, seed=1)
    coded = Gradient("c", (32, 32), TOPK, FED_BACK, seed=2)
    arrays = [normal(WORKERS, 32, 32, seed=k) for k in range(3)]
    _, _, sums = run([dense, part, coded], arrays, signals=True)
    found = [Signal.of(row) for row in sums.sum(axis=0)[:, NON_FINITE + 1 :]]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert Signal.of(()) is None


def reported(name_signal: Signal | None, elements: int = 100) -> GradientReport:
    return GradientReport(
        "topk", elements, 1.0, 4.0, 1.0, 0.5, 0.25, 0.0, 1.0, signal=name_signal
    )


def test_signals_add_up_over_gradients() -> None:
    reports = [
        reported(Signal(1.0, 4.0, 2.0, 16.0)),
        reported(Signal(3.0, 9.0, 4.0, 9.0), 900),
        reported(None),
    ]
    assert sum_signals(reports) == (4.0, 6.0)
    sent, dense = signal_updates(reports)
    assert sent == pytest.approx(1.0 * 10 / 2 + 3.0 * 30 / 3)
    assert dense == pytest.approx(2.0 * 10 / 4 + 4.0 * 30 / 3)


def observed(policy: GraVAC, sent: float, seconds: float, step: int) -> str:
    """One observation of the codec in use, and the codec for the next steps."""
    one = reported(Signal(sent, 1.0, 1.0, 1.0))
    one = GradientReport(policy.codec, *[getattr(one, n) for n in (
        "elements", "wire_bytes", "dense_bytes", "norm", "relative_error", "gain",
        "residual_norm", "gradient_norm")], signal=one.signal)  # fmt: skip
    policy.observe(Observation(step, seconds, {"w": one}, True))
    return policy.codec


def test_levels_that_are_much_worse_are_tried_less_often() -> None:
    """A share of 0.02 of progress: half as fast a level is tried after 25 windows."""
    levels = ("topk:ratio=0.1", "topk")
    policy = GraVAC(
        levels=levels, window=1, epsilon=0.0, gain_of="signal", explore=0.02, retry=2
    )
    gains = {levels[0]: 1.0, levels[1]: 0.5}
    used = [levels[0]]
    for step in range(60):
        used.append(observed(policy, gains[used[-1]], 1.0, step))
    tried = [k for k, text in enumerate(used) if text == levels[1]]
    assert len(tried) in (2, 3)
    assert min(np.diff(tried)) >= 25


def test_gains_of_signals_are_at_most_all() -> None:
    policy = GraVAC(gain_of="signal", epsilon=0.0, explore=0.02)
    observed(policy, 1.7, 1.0, 5)
    assert policy.signals
    assert policy.gain == 1.0
    assert not GraVAC(gain_of="energy").signals


@pytest.mark.parametrize("hidden", [Signal(1.0, 1.0, -1.0, 1.0), None])
def test_a_level_stays_while_noise_hides_the_signal(hidden: Signal | None) -> None:
    policy = GraVAC(
        levels=("topk", "topk:ratio=0.001"), window=1, epsilon=0.0, gain_of="signal"
    )
    for step in range(5):
        policy.observe(Observation(step, 1.0, {"w": reported(hidden)}, True))
        assert policy.codec == "topk"

    clear = reported(Signal(50.0, 1.0, 100.0, 1.0))
    policy.observe(Observation(5, 1.0, {"w": clear}, True))
    assert policy.codec == "topk:ratio=0.001"


def test_a_planned_step_measures_it() -> None:
    """With a codec that loses next to nothing, all of the signal is carried."""
    case, seen = case_of("data_parallel"), list[Observation]()

    class Looks:
        every, signals = 2, True

        def observe(self, given: Observation) -> None:
            seen.append(given)

    step = case.parallel("int8", policy=Looks())
    case.train(step, case.state(), case.batches(4))

    assert len(seen) == 2
    for report in seen[1].gradients.values():
        if report.codec == "int8":
            assert report.signal is not None
            square = report.signal.sent_square / report.signal.dense_square
            assert 0.4 < square < 2.5
    assert any(r.signal for r in seen[1].gradients.values())


def test_it_is_not_measured_with_a_fallback() -> None:
    policy = GraVAC(gain_of="signal")
    with pytest.raises(PlanError, match="fallback"):
        case_of("data_parallel").parallel("topk", policy=policy, fallback="int8")
