"""Tests telemetry that only every n-th step measures."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_cases import case_of, fresh, on_host, spoilt

from autopar.compression.codecs import registry
from autopar.compression.codecs.codec import Reduced
from autopar.compression.codecs.quantise import Dense
from autopar.compression.gradient import MOST_LOST
from autopar.compression.policies.policy import GradientReport
from autopar.runtime.gradients.codec_state import MeasuredGradient

NAME = "data_parallel"


def run(step: Any, steps: int) -> tuple[list[float], list[dict[str, GradientReport]]]:
    """Runs steps; returns losses, and the telemetry after each step."""
    case, seen = case_of(NAME), []
    state, losses = case.state(), []
    for batch in case.batches(steps):
        state, (loss,) = case.train(step, state, [batch])
        losses.append(loss)
        seen.append(dict(step.telemetry))
    return losses, seen


@pytest.mark.parametrize("codec", ["int4", "powersgd:rank=2"])
def test_it_is_that_of_the_last_step_that_measured(codec: str) -> None:
    losses, each = run(fresh(codec, telemetry_every=1), 5)
    same, seldom = run(fresh(codec, telemetry_every=3), 5)

    assert same == pytest.approx(losses, rel=1e-6)
    for found, expected in zip(seldom, (each[k] for k in (0, 0, 0, 3, 3)), strict=True):
        for name, report in found.items():
            for field in ("norm", "relative_error", "gain", "residual_norm"):
                wanted = getattr(expected[name], field)
                assert getattr(report, field) == pytest.approx(wanted, rel=1e-4), field


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_step_that_measures_nothing_is_skipped_all_the_same(codec: str) -> None:
    case, step = case_of(NAME), fresh(codec, telemetry_every=4)
    state, _ = case.train(step, case.state(), case.batches(2))
    before = on_host((state, step.compression_state["gradients"]))

    state, _ = case.train(step, state, [spoilt(case.batch(2))])
    with pytest.warns(UserWarning, match=r"step 3: .*not finite"):
        residuals = step.compression_state["gradients"]
    after = on_host((state, residuals))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert {r.skipped for r in step.telemetry.values()} == {1}


def test_a_codec_that_sends_hardly_anything_is_warned_of_once() -> None:
    case, step = case_of(NAME), fresh("predicted", telemetry_every=8)
    state, _ = case.train(step, case.state(), case.batches(17))
    said = r"step 17: .*'params/0/up' \(predicted: 0\.9\d, expected 0\.97\).*recode"
    with pytest.warns(UserWarning, match=said) as caught:
        measured = step.telemetry["params/0/up"].relative_error
    assert measured > 0.9
    assert [w.filename for w in caught] == [__file__]
    case.train(step, state, case.batches(8))  # where a warning is an error


def test_a_saved_state_is_measured_in_its_first_step() -> None:
    case, step = case_of(NAME), fresh("int8", telemetry_every=4)
    state, _ = case.train(step, case.state(), case.batches(2))
    saved, kept = step.compression_state, on_host(state)
    assert "due" not in saved

    again = fresh("int8", telemetry_every=4)
    again.compression_state = saved
    case.train(again, jax.tree.map(jnp.asarray, kept), [case.batch(2)])
    whole = fresh("int8", telemetry_every=1)
    case.train(whole, case.state(), case.batches(3))

    for name, report in again.telemetry.items():
        assert report.norm == pytest.approx(whole.telemetry[name].norm, rel=1e-4)


def test_the_errors_of_steps_that_measure_are_what_is_learned() -> None:
    """What was not measured is no error of zero."""
    case, step = case_of(NAME), fresh("int8", telemetry_every=2)
    case.train(step, case.state(), case.batches(4))
    for name, report in step.telemetry.items():
        if report.codec == "int8":
            assert 0 < report.relative_error < 0.02, name
        assert np.isfinite([report.gain, report.gradient_norm]).all()


@dataclasses.dataclass(frozen=True)
class Failing(Dense):
    """Makes a NaN in the second step."""

    name: ClassVar[str] = "failing"
    sound: ClassVar[bool] = False

    def reduce(self, chunks: Any, state: Any, context: Any) -> Any:
        """See `Codec`."""
        made = yield from Dense.reduce(self, chunks, state, context)
        bad = jnp.where(context.step == 1, jnp.nan, 0.0)
        return Reduced(made.total + bad, chunks, state)


def test_a_codec_that_fails_is_found_where_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry.codec_names()
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))
    registry.register_codec(Failing)
    case, step = case_of(NAME), fresh("failing", telemetry_every=8)
    state, _ = case.train(step, case.state(), case.batches(1))
    before = on_host(state)

    state, _ = case.train(step, state, [case.batch(1)])
    with pytest.warns(UserWarning, match=r"step 2: .*not finite"):
        reports = step.telemetry.values()
    assert {r.skipped for r in reports} == {1}
    jax.tree.map(np.testing.assert_array_equal, on_host(state), before)


@pytest.mark.parametrize(
    ("expected", "most"), [(0.0, 0.1), (0.04, 0.1), (0.3, 0.6), (0.8, MOST_LOST)]
)
def test_twice_what_was_expected_is_warned_of(expected: float, most: float) -> None:
    """A tenth never is, however little was expected; nearly all always is."""
    found = MeasuredGradient("w", "int4", expected)
    assert found.most == pytest.approx(most)
