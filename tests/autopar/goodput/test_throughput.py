"""Tests predicted step times, and their intervals near and far from measurements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.errors import PlanError
from autopar.goodput import Terms, Throughput


def terms(rows: int, devices: int = 8, microbatches: int = 1, hosts: int = 1) -> Terms:
    return Terms(
        devices=devices,
        hosts=hosts,
        rows=rows,
        microbatches=microbatches,
        work_s=1e-4 * rows / devices,
        fixed_s=1e-4 * microbatches,
        sync_s=2e-3 if devices > 1 else 0.0,
    )


def true_s(found: Terms, wrong: tuple[float, float, float] = (1.7, 1.0, 2.0)) -> float:
    work, fixed, sync = wrong
    return 2e-3 + work * found.work_s + fixed * found.fixed_s + sync * found.sync_s


def measured(*seen: Terms, steps: int = 12, noise: float = 0.05) -> Throughput:
    draw = np.random.default_rng(0)
    found = Throughput()
    for one in seen:
        for _ in range(steps):
            found = found.with_step(
                one, true_s(one) * math.exp(noise * draw.standard_normal())
            )
    return found.fit()


def test_before_anything_is_measured_the_plan_is_believed() -> None:
    found = Throughput().step_s(terms(64))
    assert found.seconds == pytest.approx(terms(64).predicted_s, rel=0.2)
    assert found.spread > 0.5
    assert Throughput().fit() == Throughput()


def test_what_was_seen_is_predicted() -> None:
    found = measured(terms(64), terms(128), terms(256))
    for rows in (64, 128, 256):
        assert found.step_s(terms(rows)).seconds == pytest.approx(
            true_s(terms(rows)), rel=0.06
        )
    assert found.step_s(terms(192)).seconds == pytest.approx(
        true_s(terms(192)), rel=0.06
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    wrong=st.tuples(*[st.floats(0.5, 2.0)] * 3),
    constant=st.floats(1e-4, 5e-3),
    rows=st.integers(8, 4096),
)
def test_the_truth_lies_within_the_intervals(
    wrong: tuple[float, float, float], constant: float, rows: int
) -> None:
    """Whatever a plan gets wrong, three deviations hold it."""
    found = Throughput()
    for seen in (terms(64), terms(128)):
        seconds = constant + true_s(seen, wrong) - 2e-3
        for _ in range(8):
            found = found.with_step(seen, seconds)
    found = found.fit()
    low, high = found.step_s(terms(rows)).bounds(3.0)
    assert low <= constant + true_s(terms(rows), wrong) - 2e-3 <= high


@pytest.mark.parametrize(
    "way",
    [
        [terms(r) for r in (64, 128, 512, 4096)],
        [terms(64), terms(64, devices=16), terms(64, devices=64)],
        [terms(64), terms(64, hosts=2), terms(64, hosts=8)],
        [terms(64), terms(64, microbatches=2), terms(64, microbatches=16)],
    ],
)
def test_intervals_widen_away_from_what_was_seen(way: list[Terms]) -> None:
    found = measured(terms(64))
    spreads = [found.step_s(one).spread for one in way]
    assert spreads == sorted(spreads)
    assert spreads[-1] > 2 * spreads[0]
    quotients = [found.ratio(one, way[0]).spread for one in way]
    assert quotients[0] == 0.0
    assert quotients == sorted(quotients)


def test_an_axis_that_was_seen_is_surer() -> None:
    one, more = measured(terms(64)), measured(terms(64), terms(64, devices=32))
    asked = terms(64, devices=64)
    assert more.step_s(asked).spread < 0.7 * one.step_s(asked).spread


def test_what_is_unsure_of_both_does_not_count_in_a_quotient() -> None:
    found = Throughput()
    near = dataclasses.replace(terms(64), rows=65)
    assert found.step_s(near).spread > 0.5
    assert found.ratio(near, terms(64)).spread < 0.02


def test_steps_that_were_held_up_do_not_count() -> None:
    """A median hears no single step, and a fit no single configuration."""
    calm = measured(terms(64), terms(128), terms(256))
    wild = calm
    for _ in range(5):
        wild = wild.with_step(terms(128), 50 * true_s(terms(128)))
    wild = wild.fit()
    for _ in range(8):
        wild = wild.with_step(terms(96), 20 * true_s(terms(96)))
    for _ in range(12):
        wild = wild.with_step(terms(64), true_s(terms(64)))
    wild = wild.fit()
    for rows in (64, 256, 512):
        expected = calm.step_s(terms(rows)).seconds
        assert wild.step_s(terms(rows)).seconds == pytest.approx(expected, rel=0.15)


def test_steps_that_took_no_time_are_left_out() -> None:
    found = Throughput()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        found = found.with_step(terms(64), seconds)
    assert not found.seen


def test_what_is_kept_is_bounded() -> None:
    found = Throughput()
    for rows in range(8, 200):
        for _ in range(2):
            found = found.with_step(terms(rows), 1e-3)
    assert len(found.seen) == 64
    for _ in range(100):
        found = found.with_step(terms(8), 1e-3)
    assert len(found.seen[-1].seconds) == 32


def test_it_goes_on_from_data() -> None:
    found = measured(terms(64), terms(128))
    again = Throughput.from_data(found.to_data())
    assert again.seen == found.seen
    assert again.step_s(terms(512)) == found.step_s(terms(512))
    with pytest.raises(PlanError, match="expected what to_data"):
        Throughput.from_data([{"terms": {"rows": 3}, "seconds": []}])


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"work_s": -1.0}, {"sync_s": math.nan}])
def test_terms_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="Terms: expected"):
        dataclasses.replace(terms(64), **wrong)
