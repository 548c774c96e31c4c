"""Tests policies with made-up telemetry."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_training import Training, report
from property_tests import examples

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.policies import (
    Accordion,
    AcrossFamilies,
    Dct,
    GraVAC,
    LGreCo,
    Probe,
    WarmUp,
    topk_levels,
)
from autopar.compression.policies.policy import (
    Observation,
    Saving,
)

# --- GraVAC -----------------------------------------------------------------

LEVELS = ("topk:ratio=0.1", "topk", "topk:ratio=0.001")


def gravac(gains, seconds, observations=40, **options):
    options = {"epsilon": 0.5, "window": 2, "retry": 100, **options}
    policy = GraVAC(**{"gain_of": "energy", **options})
    training = Training(
        policy,
        {"w": "topk:ratio=0.1"},
        dict(zip(LEVELS, gains, strict=True)),
        {"dense": 8.0, **dict(zip(LEVELS, seconds, strict=True))},
    )
    for _ in range(observations):
        training.observe()
    return training


def test_gravac_climbs_while_throughput_improves():
    # Gain over seconds: 0.9 / 4, 0.8 / 2, 0.6 / 1.
    assert gravac((0.9, 0.8, 0.6), (4, 2, 1)).codecs["w"] == "topk:ratio=0.001"


def test_gravac_goes_back_from_a_level_that_is_no_faster():
    # 0.9 / 4 < 0.8 / 2 > 0.6 / 1.9: the last level was tried, and left.
    training = gravac((0.9, 0.8, 0.6), (4, 2, 1.9))
    assert training.codecs["w"] == "topk"
    assert any(step["w"] == "topk:ratio=0.001" for step in training.history)


@pytest.mark.parametrize(("faster", "expected"), [(1.04, LEVELS[0]), (1.06, LEVELS[1])])
def test_gravac_keeps_the_smaller_factor_unless_it_gains_more_than_omega(
    faster, expected
):
    training = gravac((0.9, 0.9, 0.1), (4, 4 / faster, 1), omega=0.05)
    assert training.codecs["w"] == expected


def test_gravac_never_stays_below_epsilon():
    """However fast a level is, a gain under epsilon is left at the next observation."""
    training = gravac((0.9, 0.8, 0.4), (4, 2, 0.001))
    used = [step["w"] for step in training.history]
    assert used.count("topk:ratio=0.001") == 1
    assert used[-1] == "topk"


def test_gravac_sends_dense_where_no_level_has_enough_gain():
    training = gravac((0.4, 0.3, 0.2), (4, 2, 1))
    assert training.codecs["w"] == "dense"


def test_gravac_tries_the_next_level_again_after_retry_windows():
    training = gravac((0.9, 0.8, 0.4), (4, 2, 1), window=2, retry=3, observations=40)
    tries = [
        k for k, step in enumerate(training.history) if step["w"] == "topk:ratio=0.001"
    ]
    # One observation at the level, then three windows of two at the one below.
    assert set(np.diff(tries)) == {1 + 3 * 2}


def test_gravac_follows_a_link_that_changes():
    training = gravac((0.9, 0.8, 0.6), (4, 3.9, 3.8), retry=2, observations=12)
    assert training.codecs["w"] == LEVELS[0]
    training.seconds = {LEVELS[0]: 40.0, LEVELS[1]: 4.0, LEVELS[2]: 0.4}
    for _ in range(12):
        training.observe()
    assert training.codecs["w"] == LEVELS[2]


def test_gravac_gain_is_of_squared_norms_over_all_gradients():
    policy = GraVAC(alpha=1.0, epsilon=0.0, gain_of="energy")
    codec = policy.levels[0]
    reports = {
        "a": report(codec, norm=3.0, gain=0.5),
        "b": report(codec, norm=1.0, gain=1.0),
        "small": report("dense", norm=100.0, elements=10),
    }
    for step in (5, 10):
        policy.observe(Observation(step, 1.0, reports, True))
    assert policy.gain == pytest.approx((0.5 * 9 + 1.0) / (9 + 1))


def test_gravac_gain_is_of_norms_against_the_gradients_without_residuals():
    policy = GraVAC(alpha=1.0, epsilon=0.0, gain_of="norms")
    codec = policy.levels[0]
    reports = {
        # Sent: 0.5 of a norm of 3, and 0.2 of one of 5.
        "a": report(codec, norm=3.0, gain=0.25, gradient=2.0),
        "b": report(codec, norm=5.0, gain=0.04, gradient=1.0),
        "small": report("dense", norm=100.0, elements=10),
    }
    for step in (5, 10):
        policy.observe(Observation(step, 1.0, reports, True))
    assert policy.gain == pytest.approx((1.5 + 1.0) / (2.0 + 1.0))


def test_gravac_gain_of_norms_forgives_a_residual_that_the_energy_does_not():
    """What waits adds nothing to a gradient of which as much is sent as comes in."""
    for gain_of, expected in (("norms", "topk"), ("energy", "dense")):
        policy = GraVAC(levels=("topk",), window=2, gain_of=gain_of)
        training = Training(policy, {"w": "topk"})
        for step in range(5, 50, 5):
            seen = report("topk", norm=10.0, gain=0.01, gradient=1.0)
            wish = policy.observe(Observation(step, 1.0, {"w": seen}, True))
            training.codecs.update(wish or {})
        assert training.codecs["w"] == expected


def test_gravac_ignores_steps_that_are_not_finite():
    policy = GraVAC()
    training = Training(policy, {"w": "int8"})
    training.observe(norms={"w": math.nan}, finite=False)
    assert policy.state.names == []


@pytest.mark.parametrize("stepping", ["geometric", "exponential"])
def test_topk_levels_go_from_the_least_to_the_largest_factor(stepping):
    found = [parse_codec(text).ratio for text in topk_levels(5, 700, 3, stepping)]
    assert found[0] == pytest.approx(1 / 5)
    assert found[-1] == pytest.approx(1 / 700, rel=1e-5)
    steps = np.log(np.array(found[:-2]) / found[1:-1]) / np.log(3)
    expected = [1, 1, 1, 1] if stepping == "geometric" else [1, 2]
    np.testing.assert_allclose(steps, expected, rtol=1e-4)


def gravac_put_off(gains, observations):
    """GraVAC's answers if the run postpones every change."""
    policy = GraVAC(epsilon=0.5, window=2, retry=2, every=1, levels=LEVELS)
    wishes = []
    for step, gain in zip(range(observations), gains, strict=True):
        seen = {"w": report(LEVELS[0], gain=gain)}
        wishes.append(policy.observe(Observation(step, 1.0, seen, True)))
    return policy, wishes


def test_gravac_climbs_to_save_time_and_asks_until_it_is_so():
    policy, wishes = gravac_put_off([0.9] * 8, 8)
    assert wishes == [None, None, *[{"w": "topk"}] * 6]
    assert all(isinstance(wish, Saving) for wish in wishes[2:])
    for step in range(8, 10):
        seen = {"w": report("topk", gain=0.8)}
        assert policy.gain == pytest.approx(0.9 if step == 8 else 0.8)
        wish = policy.observe(Observation(step, 0.5, seen, True))
    # A whole window on the level, and none of what was seen below it.
    assert policy.state.throughput[1] == pytest.approx(0.8 / 0.5)
    assert wish == {"w": "topk:ratio=0.001"}


def test_gravac_watches_the_gain_of_the_level_that_is_still_in_use():
    """It goes below that one, and not for the sake of time."""
    _, wishes = gravac_put_off([0.9] * 4 + [0.1] * 2, 6)
    assert isinstance(wishes[3], Saving)
    assert wishes[-1] == {"w": "dense"}
    assert not isinstance(wishes[-1], Saving)


def test_gravac_goes_down_at_once():
    training = gravac((0.9, 0.8, 0.4), (4, 2, 0.001), observations=0)
    wishes = [wish for _ in range(8) if (wish := training.observe())]
    found = [(wish["w"], isinstance(wish, Saving)) for wish in wishes[:3]]
    assert found == [("topk", True), ("topk:ratio=0.001", True), ("topk", False)]


@pytest.mark.parametrize("horizon", [0, 500])
def test_horizons(horizon):
    """A window where none is stated."""
    assert GraVAC(every=4, window=3, horizon=horizon).horizon == (horizon or 12)
    assert Accordion(every=4, window=3, horizon=horizon).horizon == (horizon or 12)
    policy = WarmUp(steps=2, codec="sign", then=GraVAC(horizon=500))
    assert policy.horizon == 0
    policy.observe(Observation(2, 1.0, {"w": report()}, True))
    assert policy.horizon == 500


# --- DCT --------------------------------------------------------------------


def test_dct_sets_thresholds_once():
    training = Training(Dct(ratio=0.02, refresh=500), {"w": "int8", "b": "dense"})
    assert training.observe() == {"w": "threshold:ratio=0.02,every=500"}
    assert training.observe() is None


def test_dct_doubles_the_share_where_the_gain_stays_low():
    policy = Dct(ratio=0.01, least_gain=0.5, patience=2, most=0.03)
    low = {"threshold": 0.3, "threshold:ratio=0.02": 0.4, "threshold:ratio=0.03": 0.4}
    training = Training(policy, {"w": "int8"}, low)
    for _ in range(12):
        training.observe()
    used = [text for text, _ in itertools.groupby(s["w"] for s in training.history)]
    assert used == list(low)


# --- Warm-up ----------------------------------------------------------------


def test_warm_up_changes_codecs_after_its_steps_and_no_others():
    policy = WarmUp(steps=10, codec="sign")
    training = Training(policy, {"w": "int8", "bias": "dense"})
    for _ in range(4):
        training.observe()
    # Asked after step 1 and after step 11, the first multiple that Training counts.
    assert [step["w"] for step in training.history] == ["dense", "sign", "sign", "sign"]
    assert {step["bias"] for step in training.history} == {"dense"}


def test_warm_up_asks_no_more_often_than_it_must():
    policy = WarmUp(steps=10, codec="sign", then=GraVAC(every=7))
    assert policy.every == 1
    seen = {"w": report("int8")}
    assert policy.observe(Observation(1, 1.0, seen, True)) == {"w": "dense"}
    assert policy.every == 10
    seen = {"w": report("dense")}
    assert policy.observe(Observation(10, 1.0, seen, True)) == {"w": "sign"}
    assert policy.every == 7


def test_warm_up_hands_over_to_its_policy():
    inner = Accordion(low="int8", high="sign", every=5, window=1)
    training = Training(WarmUp(steps=1, codec="int8", then=inner), {"w": "sign"})
    for _ in range(6):
        training.observe()
    assert training.history[0]["w"] == "int8"
    assert training.codecs == {"w": "sign"}


def test_warm_up_has_codecs_measured_once_it_is_over():
    inner = LGreCo(every=5)
    policy = WarmUp(steps=2, codec="powersgd", then=inner)
    assert policy.probes == ()
    for step in (1, 2):
        policy.observe(Observation(step, 1.0, {"w": report("powersgd")}, True))
    assert policy.probes == inner.probes != ()


def test_warm_up_of_one_step_lasts_one_step():
    policy = WarmUp(steps=1, codec="sign", first="bf16")
    wish = policy.observe(Observation(1, 1.0, {"w": report("int8")}, True))
    assert wish == {"w": "sign"}


# --- Saved states -----------------------------------------------------------

MAKERS = {
    "gravac": lambda: GraVAC(epsilon=0.3, window=2, retry=2),
    "accordion": lambda: Accordion(low="int8", high="sign", window=2),
    "together": lambda: Accordion(low="int8", high="sign", window=2, together=True),
    "dct": lambda: Dct(least_gain=0.9),
    "warm-up": lambda: WarmUp(steps=3, codec="topk", then=GraVAC(window=1, every=2)),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=examples(20), deadline=None)
@given(
    norms=st.lists(st.floats(0.0, 10.0), min_size=2, max_size=30),
    cut=st.integers(0, 30),
)
def test_saved_policy_goes_on_as_if_it_had_not_stopped(name, norms, cut):
    gains = {"topk:ratio=0.1": 0.9, "topk": 0.6, "threshold": 0.2}
    whole = Training(MAKERS[name](), {"w": "int8", "v": "int8"}, gains)
    parts = Training(MAKERS[name](), {"w": "int8", "v": "int8"}, gains)
    for k, norm in enumerate(norms):
        if k == cut:
            text = json.dumps(parts.policy.state_dict())
            parts.policy = MAKERS[name]()
            parts.policy.load_state_dict(json.loads(text))
        for training in (whole, parts):
            training.observe({"w": norm}, {"w": norm / 2})
    assert whole.history == parts.history
    assert whole.policy.state_dict() == parts.policy.state_dict()


def test_state_of_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"Dct: its saved state has below, doublings"):
        Dct().load_state_dict(Accordion().state_dict())
    trained = GraVAC(levels=LEVELS[:2])
    Training(trained, {"w": "int8"}).observe()
    with pytest.raises(ValueError, match="of 2 levels, this one has 3"):
        GraVAC().load_state_dict(trained.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraVAC(levels=()), "at least one level"),
        (lambda: GraVAC(levels=("nothing",)), "unknown codec"),
        (lambda: GraVAC(epsilon=1.5), "epsilon must be from 0 to 1"),
        (lambda: GraVAC(alpha=0.0), "alpha must be positive"),
        (lambda: GraVAC(window=0), "window must be at least 1"),
        (lambda: Accordion(eta=0.0), "eta must be positive"),
        (lambda: Dct(ratio=0.5), "0 < ratio <= most"),
        (lambda: Probe(1), "needs 2 or more"),
        (lambda: LGreCo(options=()), "at least one option"),
        (lambda: LGreCo(alpha=0.0), "alpha must be positive"),
        (
            lambda: AcrossFamilies(bandwidth_bytes_per_s=0.0),
            "bandwidth_bytes_per_s must be positive",
        ),
        (
            lambda: GraVAC(gain_of="loss"),
            "gain_of must be one of norms, energy, updates",
        ),
        (lambda: WarmUp(steps=0, codec="sign"), "steps must be at least 1"),
        (lambda: WarmUp(steps=5, codec="nothing"), "unknown codec"),
        (lambda: topk_levels(10, 5), "least <= most"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
