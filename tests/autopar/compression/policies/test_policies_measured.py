"""Tests policies that choose by the errors of codecs on samples."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from autopar.compression.codecs.lowrank import PowerSGD
from autopar.compression.codecs.quantise import Dense, Int8
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.codecs.sparse import TopK
from autopar.compression.policies import (
    AcrossFamilies,
    GraVAC,
    LGreCo,
    Probe,
    powersgd_family,
    topk_family,
)
from autopar.compression.policies.policy import (
    GradientReport,
    Observation,
    ProbingPolicy,
    Saving,
)
from autopar.compression.policies.probe import relative_error


def report(codec, error=0.0):
    return GradientReport(
        codec=codec,
        elements=4096,
        wire_bytes=1.0,
        dense_bytes=4.0,
        norm=1.0,
        relative_error=error,
        gain=1.0,
        residual_norm=0.0,
        gradient_norm=1.0,
    )


def spectrum(rows, columns, values, seed=0):
    """A matrix with given singular values."""
    random = np.random.default_rng(seed)
    left = np.linalg.qr(random.standard_normal((rows, len(values))))[0]
    right = np.linalg.qr(random.standard_normal((columns, len(values))))[0]
    return ((left * values) @ right.T).astype(np.float32)


def test_errors_are_those_of_the_codecs():
    sample = spectrum(48, 40, 2.0 ** -np.arange(12))
    values = 2.0 ** -np.arange(12)
    tail = np.linalg.norm(values[3:]) / np.linalg.norm(values)
    # Six power iterations at a ratio of two between neighbours: 4 ** -6 is left.
    assert relative_error(PowerSGD(rank=3), sample) == pytest.approx(tail, rel=0.01)
    largest = np.sort(np.abs(sample.ravel()))[::-1]
    kept = round(0.1 * sample.size)
    tail = np.linalg.norm(largest[kept:]) / np.linalg.norm(largest)
    # bf16 loses at most 2 ** -9 of each value that is sent.
    assert relative_error(TopK(ratio=0.1), sample) == pytest.approx(tail, rel=1e-3)
    assert relative_error(Dense(), sample) == 0.0
    assert relative_error(TopK(ratio=0.1), np.zeros((4, 4), np.float32)) == 0.0
    with pytest.raises(ValueError, match="not finite"):
        relative_error(Int8(), np.array([math.inf]))


SAMPLES = {
    "flat": spectrum(64, 48, np.ones(48), seed=1),
    "steep": spectrum(64, 48, 4.0 ** -np.arange(48.0), seed=2),
    "vector": np.ones(2000, np.float32),
    "small": np.ones((4, 4), np.float32),
}


PROBE = Probe(4)


def choose(policy, samples, probe=PROBE):
    return policy.choose(probe.measure(samples, policy.probes))


def test_lgreco_moves_ranks_to_where_they_help():
    """Little of a steep spectrum needs many ranks; the sum of errors is no larger."""
    policy = LGreCo(reference="powersgd:rank=4", options=powersgd_family(4))
    chosen = choose(policy, SAMPLES)
    assert set(chosen) == {"flat", "steep"}
    ranks = {name: parse_codec(text).rank for name, text in chosen.items()}
    assert ranks["steep"] < 4

    def lost(ranks):
        return sum(
            np.linalg.norm(SAMPLES[n]) * relative_error(PowerSGD(rank=r), SAMPLES[n])
            for n, r in ranks.items()
        )

    def sent(ranks):
        return sum(
            PowerSGD(rank=r).wire_bytes(SAMPLES[n].shape, 4) for n, r in ranks.items()
        )

    # Ten thousand buckets, each error rounded up: two of them may be lost.
    uniform = dict.fromkeys(ranks, 4)
    assert lost(ranks) <= lost(uniform)
    allowed = [
        dict(zip(ranks, pair, strict=True))
        for pair in itertools.product(range(2, 9), repeat=2)
    ]
    best = min(sent(p) for p in allowed if lost(p) <= lost(uniform) * (1 - 2e-4))
    assert sent(ranks) <= best


def test_across_families_beats_every_single_codec_within_the_budget():
    options = ("sign", "int4", "int8", *powersgd_family(2), *topk_family((0.01, 0.1)))
    budget = 0.3
    policy = AcrossFamilies(bandwidth_bytes_per_s=1e6, options=options, budget=budget)
    chosen = choose(policy, SAMPLES)

    def lost(codecs):
        return sum(
            SAMPLES[n].size * relative_error(parse_codec(t), SAMPLES[n]) ** 2
            for n, t in codecs.items()
        ) / sum(SAMPLES[n].size for n in codecs)

    def sent(codecs):
        return sum(
            parse_codec(t).wire_bytes(SAMPLES[n].shape, 4) for n, t in codecs.items()
        )

    assert set(chosen) == {"flat", "steep"}
    assert parse_codec(chosen["steep"]).name == "powersgd"
    assert lost(chosen) <= budget**2 * (1 + 1e-6)
    for pair in itertools.product(policy.options, repeat=2):
        other = dict(zip(chosen, pair, strict=True))
        assert lost(other) > budget**2 or sent(other) >= sent(chosen) * (1 - 1e-6)


def test_across_families_weighs_by_the_optimizer():
    """For SGD the large gradient counts alone, for Adam both count the same."""
    samples = {"large": 1e3 * SAMPLES["flat"], "little": SAMPLES["flat"]}
    options = ("sign", "int8")
    budget = {"budget": 0.1, "options": options, "bandwidth_bytes_per_s": 1e6}
    sgd = choose(AcrossFamilies(optimizer="sgd", **budget), samples)
    adam = choose(AcrossFamilies(optimizer="adam", **budget), samples)
    assert sgd == {"large": "int8", "little": "sign"}
    assert adam == {"large": "int8", "little": "int8"}


def test_across_families_leaves_gradients_dense_where_encoding_costs_more():
    slow = {"int8": 1e-3, "sign": 1e-3}
    policy = AcrossFamilies(
        bandwidth_bytes_per_s=1e9,
        options=("int8", "sign"),
        encode_s_per_element=slow,
    )
    assert set(choose(policy, SAMPLES).values()) == {"dense"}


def test_scattered_gradients_get_no_codec_that_needs_the_whole():
    probe = Probe(4, frozenset({"steep"}))
    assert set(choose(LGreCo(), SAMPLES, probe)) == {"flat"}


def test_choices_stay_where_nothing_is_measured():
    policy = AcrossFamilies(
        bandwidth_bytes_per_s=1e6, options=("int8", "sign"), budget=0.1
    )
    measured = Probe(4).measure(SAMPLES, policy.probes)
    assert isinstance(policy, ProbingPolicy)
    assert not isinstance(GraVAC(), ProbingPolicy)
    reports = {name: report("dense") for name in SAMPLES}
    assert policy.observe(Observation(100, 1.0, reports, True)) is None
    assert policy.observe(Observation(200, 1.0, reports, False, measured)) is None
    wish = policy.observe(Observation(300, 1.0, reports, True, measured))
    assert wish == {"flat": "int8", "steep": "int8"}
    reports["flat"] = report("int8")
    wish = policy.observe(Observation(400, 1.0, reports, True))
    assert wish == {"steep": "int8"}
    again = dataclasses.replace(policy)
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert again.state == policy.state


REFERENCE, BUDGET = "powersgd", 0.1


@pytest.mark.parametrize(
    ("policy", "used", "may_wait"),
    [
        (LGreCo(), REFERENCE, True),
        (LGreCo(alpha=0.98), REFERENCE, False),
        (LGreCo(), "powersgd:rank=2", False),
        # Of a codec that is not probed the error is that of the last step.
        (LGreCo(), "int8", True),
        (LGreCo(), "sign", False),
        (AcrossFamilies(bandwidth_bytes_per_s=1e6, budget=BUDGET), "int8", True),
        (AcrossFamilies(bandwidth_bytes_per_s=1e6, budget=BUDGET), "sign", False),
        (AcrossFamilies(bandwidth_bytes_per_s=1e6, budget=0.9), "sign", True),
    ],
)
def test_other_codecs_may_wait_while_those_in_use_are_within_the_bound(
    policy, used, may_wait
):
    error = {"int8": 0.001, "sign": 0.9}.get(used, 0.0)
    measured = Probe(4).measure(SAMPLES, policy.probes)
    reports = {name: report(used, error) for name in measured}
    wish = policy.observe(Observation(100, 1.0, reports, True, measured))
    assert wish
    assert isinstance(wish, Saving) == may_wait


def test_samples_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="gradient 'w' holds numbers that are not"):
        Probe(4).measure({"w": np.array([math.nan])}, ("int8",))
