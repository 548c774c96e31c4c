"""Tests permutations and all-to-alls among GPUs: channels, and sizes of groups."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.rates import PartnerRates, partner_rates
from autopar.cost.collectives import (
    LARGEST_PART,
    SMALL_MESSAGE,
    beside,
    channels,
    modelled_s,
    partner_curve,
)

KINDS = ("all_to_all", "collective_permute")
MEASURED = [
    rates
    for name, kind in itertools.product(("h100", "b200", "gb200"), KINDS)
    if (rates := partner_rates(name, kind)) is not None
]
of_two = st.sampled_from([1, 2, 4, 8, 16, 32])
sizes = st.integers(2, 600)
messages = st.floats(2.0**10, 2.0**36)


def test_both_kinds_are_measured_on_three_devices() -> None:
    assert len(MEASURED) == 6


@given(messages, sizes, of_two, of_two)
def test_a_message_takes_the_channels_that_nccl_gives_it(
    nbytes: float, size: int, total: int, most: int
) -> None:
    """Of all powers of two: the most that leave each device one of its own, or more.

    More, up to the least with which no channel takes more than its largest part.
    """
    rates = PartnerRates(channels=total, most_channels=min(most, total))
    allowed = [1 << k for k in range(6) if 1 << k <= rates.most_channels]
    own = [c for c in allowed if c * size <= total] or [1]
    enough = [c for c in allowed if c * LARGEST_PART >= nbytes] or [allowed[-1]]
    assert channels(nbytes, size, rates) == max(own[-1], enough[0])


@given(st.sampled_from(MEASURED), st.sampled_from(KINDS), sizes, messages)
def test_a_curve_is_the_model_and_what_was_measured_beside_it(
    rates: PartnerRates, kind: str, size: int, nbytes: float
) -> None:
    partners = 1 if kind == "collective_permute" else size - 1
    whole = nbytes if kind == "collective_permute" else nbytes * size
    used = channels(nbytes, size, rates)
    at = np.array([nbytes])
    want = modelled_s(at, used, size, partners, rates)
    want = float(want[0] * math.exp(beside(at, size, rates)[0]))
    found = partner_curve(kind, size, rates).seconds(whole)
    assert found == pytest.approx(want, rel=0.06)


@given(st.sampled_from(MEASURED), st.sampled_from(KINDS), sizes)
def test_times_step_down_only_where_nccl_changes_its_ways(
    rates: PartnerRates, kind: str, size: int
) -> None:
    whole = 1 if kind == "collective_permute" else size
    curve = partner_curve(kind, size, rates)
    changes = [SMALL_MESSAGE, *(LARGEST_PART * 2**k for k in range(6))]
    pairs = itertools.pairwise(zip(curve.starts, curve.lines, strict=True))
    for (_, (a, b)), (start, (c, d)) in pairs:
        before, after = a + b * start, c + d * start
        if min(abs(start / whole / at - 1) for at in changes) > 1e-6:
            assert after == pytest.approx(before, rel=1e-6)
        assert before > 0
        assert after > 0


def test_more_channels_make_a_larger_message_faster() -> None:
    """On 64 GB200 one channel takes 16 MiB; 18 MiB go through two."""
    rates = partner_rates("gb200", "collective_permute")
    assert rates is not None
    curve = partner_curve("collective_permute", 64, rates)
    assert curve.seconds(18 * 2.0**20) < 0.65 * curve.seconds(16 * 2.0**20)


def test_knots_are_straight_in_logarithms() -> None:
    rates = PartnerRates(
        channels=32,
        most_channels=32,
        group_sizes=(4, 16),
        octaves=(10.0, 20.0),
        logs=((0.0, 1.0), (2.0, 3.0)),
    )
    found = beside(np.array([2.0**10, 2.0**15, 2.0**20, 2.0**30]), 8, rates)
    assert found.tolist() == [1.0, 1.5, 2.0, 2.0]
    below = beside(np.array([2.0**10]), 2, rates)
    assert below.tolist() == [0.0]


def test_a_group_of_all_shares_the_channels_in_rounds() -> None:
    """32 channels take 33 messages of one channel each in two rounds."""
    rates = PartnerRates(
        channels=32,
        most_channels=32,
        start_s=0.0,
        bandwidth_bytes_per_s=math.inf,
        large_bytes_per_s=1e9,
    )
    at = np.array([1e6])
    few, many = (modelled_s(at, 1, k, k - 1, rates)[0] for k in (32, 33))
    assert few == pytest.approx(1e-3)
    assert many == pytest.approx(2e-3)
