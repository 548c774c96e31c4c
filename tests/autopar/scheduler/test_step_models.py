"""Tests models of a step's seconds: the Gaussian process and the corrected form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.scheduler.models import corrected_form
from autopar.scheduler.models.corrected_form import PowerTimes, Prior
from autopar.scheduler.models.pollux_form import StepSamples

LENGTHS = (0.5, 0.8)
PRIOR = Prior(lengths=LENGTHS, spread=0.1, count=4.0)


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.uniform(0, 4, (count, 2)), 0.2 * draw.standard_normal(count)


def matern(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The kernel for each pair, from its formula."""
    found = np.zeros((len(one), len(other)))
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            far = np.linalg.norm((a - b) / LENGTHS)
            found[i, j] = (1 + 3**0.5 * far) * np.exp(-(3**0.5) * far)
    return found


@given(seed=st.integers(0, 99), count=st.integers(1, 12), part=st.floats(0.05, 0.95))
@settings(deadline=None, max_examples=examples(30))
def test_it_is_the_dense_formula(seed: int, count: int, part: float) -> None:
    points, values = drawn(seed, count)
    at, _ = drawn(seed + 1000, 5)
    found = corrected_form.process_of(points, values, LENGTHS, variance=0.3, part=part)
    smooth = 0.3 * part
    seen = smooth * matern(points, points) + 0.3 * (1 - part) * np.eye(count)
    across = smooth * matern(at, points)
    known = np.diag(across @ np.linalg.solve(seen, across.T))
    assert found.mean(at) == pytest.approx(across @ np.linalg.solve(seen, values))
    assert found.spread(at) ** 2 == pytest.approx(smooth - known, abs=1e-9)


@given(seed=st.integers(0, 99), count=st.integers(1, 12))
@settings(deadline=None, max_examples=examples(30))
def test_without_noise_it_goes_through_what_was_seen(seed: int, count: int) -> None:
    points, values = drawn(seed, count)
    found = corrected_form.process_of(points, values, LENGTHS, variance=0.3, part=1.0)
    assert found.mean(points) == pytest.approx(values, abs=1e-5)
    assert found.spread(points) == pytest.approx(0, abs=1e-3)


@given(seed=st.integers(0, 99), count=st.integers(1, 12))
@settings(deadline=None, max_examples=examples(30))
def test_far_away_nothing_is_known(seed: int, count: int) -> None:
    points, values = drawn(seed, count)
    found = corrected_form.fit_process(points, values, PRIOR)
    far = points + 100.0
    assert found.mean(far) == pytest.approx(0, abs=1e-9)
    assert found.spread(far) == pytest.approx((found.variance * found.part) ** 0.5)


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 2]])
def test_errors_without_a_group_are_those_of_fits_without_it(groups: list[int]) -> None:
    points, values = drawn(3, 6)
    own = np.array(groups)
    whole = corrected_form.process_of(points, values, LENGTHS, variance=0.3, part=0.6)
    for group in set(groups):
        out = own == group
        rest = corrected_form.process_of(
            points[~out], values[~out], LENGTHS, variance=0.3, part=0.6
        )
        expected = values[out] - rest.mean(points[out])
        assert whole.without(own)[out] == pytest.approx(expected)


def test_the_fit_is_the_most_likely_part() -> None:
    points, values = drawn(5, 10)
    found = corrected_form.fit_process(points, values, PRIOR)

    def likely(part: float) -> float:
        seen = part * matern(points, points) + (1 - part) * np.eye(10)
        square = float(values @ np.linalg.solve(seen, values))
        variance = (4 * 0.1**2 + square) / 14
        return -(14 * np.log(variance) + np.linalg.slogdet(seen)[1]) / 2

    tried = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
    assert found.part == max(tried, key=likely)


def test_what_is_smooth_is_found_and_what_is_noise_is_left() -> None:
    points, noise = drawn(7, 60)
    smooth = np.sin(points[:, 0])
    assert corrected_form.fit_process(points, smooth, PRIOR).part > 0.9
    assert corrected_form.fit_process(points, noise, PRIOR).part < 0.3


TRUE = PowerTimes((-1.0, -3.0, -3.0, -1.0, 0.5, 0.5, -0.3, 0.1, 0.0))


def samples(wrong: float) -> StepSamples:
    """Steps whose seconds deviate from the form on 8 devices of 2 nodes."""
    counts = ((1, 1), (1, 2), (1, 4), (2, 8), (3, 12), (4, 16))
    places = [(n, k, m) for n, k in counts for m in (4, 8, 16, 32, 64)]
    nodes, devices, local = np.array(places, float).T
    step = TRUE.step_s(nodes, devices, local)
    step[devices == 8] *= wrong
    return StepSamples(nodes, devices, local, TRUE.grad_s(local), step)


def test_what_was_measured_is_predicted_though_the_form_misses_it() -> None:
    seen = samples(2.0)
    where = seen.nodes, seen.devices, seen.local
    before = np.abs(
        corrected_form.fit_power_form(seen).step_s(*where) / seen.step_s - 1
    )
    after = np.abs(corrected_form.fit(seen).step_s(*where) / seen.step_s - 1)
    assert before.max() > 0.2
    assert after.max() < before.max() / 2


def test_far_from_what_was_measured_the_form_is_left() -> None:
    found = corrected_form.fit(samples(1.5))
    far = np.array([1e9]), np.array([1e9]), np.array([1e9])
    assert found.step_s(*far) == pytest.approx(found.form.step_s(*far))


def test_shapes_are_kept() -> None:
    found, form = (
        corrected_form.fit(samples(1.0)),
        corrected_form.fit_power_form(samples(1.0)),
    )
    local = np.array([[8.0, 16.0], [32.0, 64.0], [8.0, 8.0]])
    counts = np.array([1.0, 4.0]), np.array([4.0, 16.0])
    assert found.step_s(*counts, local).shape == (3, 2)
    assert found.grad_s(local) == pytest.approx(form.grad_s(local))


def test_one_measurement_is_enough() -> None:
    one = StepSamples(*(np.array([x]) for x in (1.0, 1.0, 32.0, 0.5, 0.5)))
    found = corrected_form.fit(one).step_s(*(np.array([x]) for x in (1.0, 1.0, 32.0)))
    assert found == pytest.approx(0.5, rel=0.05)
