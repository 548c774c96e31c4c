"""Tests what is read from rows of telemetry, and its warnings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compression.gradient import MOST_LOST
from autopar.compression.synchronise import ERROR, NON_FINITE, WANTED
from autopar.runtime.gradients.codec_state import (
    EARLY,
    UNREAD,
    MeasuredGradient,
    TelemetryReader,
)
from autopar.runtime.gradients.synchroniser import _spoilt

W, B = MeasuredGradient("w", "int4", 0.2), MeasuredGradient("b", "", 0.0)


class Rows(np.ndarray):
    """Telemetry that the devices may still be computing."""

    ready = True

    def is_ready(self) -> bool:
        return self.ready


def telemetry(
    *squared: float, wanted: float = 2.0, bad: Sequence[int] = (), ready: bool = True
) -> Rows:
    """A row of telemetry for each squared relative error."""
    rows = np.zeros((len(squared), NON_FINITE + 1)).view(Rows)
    rows[:, WANTED], rows[:, ERROR] = wanted, wanted * np.array(squared)
    rows[list(bad), NON_FINITE] = 1.0
    rows.ready = ready
    return rows


def learnt(*given: Rows) -> float | None:
    """The error of the gradient W after some steps."""
    reader = TelemetryReader(warns=True)
    for step, rows in enumerate(given):
        reader.add(step, step, [W], rows)
    reader.look()
    return reader.errors.get("w", {}).get("int4")


def test_the_first_errors_count_alike_and_later_ones_fade() -> None:
    squared = np.linspace(0.01, 0.02, 25)
    mean = 0.0
    for count, one in enumerate(squared, start=1):
        weight = max(0.1, 1 / count)
        mean = (1 - weight) * mean + weight * one

    assert learnt(*map(telemetry, squared)) == pytest.approx(math.sqrt(mean))


@pytest.mark.parametrize(
    "rows",
    [
        telemetry(0.1, wanted=0.0),
        telemetry(0.1, wanted=math.inf),
        telemetry(-0.1),
        telemetry(0.1, ready=False),
    ],
)
def test_a_row_without_a_measured_error_teaches_nothing(rows: Rows) -> None:
    assert learnt(rows) is None
    assert learnt(telemetry(0.0)) == 0.0


def test_a_gradient_of_changing_codecs_is_not_learnt() -> None:
    reader = TelemetryReader(warns=True)
    reader.add(1, 0, [B, W], telemetry(0.5, 0.25))
    reader.look()

    assert reader.errors == {"w": {"int4": 0.5}}


def test_rows_wait_for_the_devices_until_there_are_too_many() -> None:
    reader = TelemetryReader(warns=True)
    for step in range(UNREAD):
        reader.add(step, step, [W], telemetry(0.01, ready=False))
    reader.look()
    assert not reader.errors

    reader.add(UNREAD, UNREAD, [W], telemetry(0.09, ready=False))
    reader.look()
    assert reader.errors["w"]["int4"] == pytest.approx(0.1)

    reader.look(wait=True)
    assert reader.errors["w"]["int4"] > 0.1


@pytest.mark.parametrize(
    ("expected", "most"), [(0.01, 0.1), (0.3, 0.6), (0.9, MOST_LOST)]
)
def test_the_most_error_without_a_warning(expected: float, most: float) -> None:
    assert MeasuredGradient("w", "int4", expected).most == pytest.approx(most)


def warned(
    squared: Sequence[float], first_turn: int, *, warns: bool = True
) -> list[int]:
    """The numbers of the steps with a warning."""
    reader, found = TelemetryReader(warns=warns), list[int]()
    for step, one in enumerate(squared):
        reader.add(step, first_turn + step, [W], telemetry(one))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reader.look()
        found += [step] * len(caught)
        assert all(f"step {step}: codecs lose" in str(w.message) for w in caught)
    return found


LOSSY, FINE = 0.41**2, 0.39**2


def test_the_second_large_error_in_a_row_is_warned_of_once() -> None:
    assert warned([LOSSY, LOSSY, LOSSY, LOSSY], EARLY) == [1]
    assert warned([LOSSY, FINE, LOSSY, FINE], EARLY) == []
    assert warned([FINE, LOSSY, LOSSY], EARLY) == [2]
    assert warned([0.4**2 * (1 - 1e-9)] * 3, EARLY) == []


def test_the_first_steps_are_not_warned_of() -> None:
    assert warned([LOSSY, LOSSY], EARLY - 2) == []
    assert warned([LOSSY, LOSSY, LOSSY], EARLY - 2) == [2]
    assert warned([LOSSY] * 4, EARLY, warns=False) == []


def test_the_largest_loss_is_named_first() -> None:
    other = MeasuredGradient("v", "int8", 0.1)
    reader = TelemetryReader(warns=True)
    for step in range(2):
        reader.add(step, EARLY, [W, other], telemetry(LOSSY, 0.64))
    with pytest.warns(UserWarning, match=r"'v' \(int8: 0.8, .*'w' \(int4.*\{'v': 'in"):
        reader.look()


def test_a_skipped_step_names_four_gradients_and_teaches_nothing() -> None:
    many = [MeasuredGradient(f"g{k}", "int4", 0.2) for k in range(6)]
    reader = TelemetryReader(warns=False)
    reader.add(7, 0, many, telemetry(*[0.1] * 6, bad=range(6)))
    with pytest.warns(UserWarning, match=r"step 7: .*g0, g1, g2, g3 and 2 more are"):
        reader.look()
    assert not reader.errors

    reader.add(8, 1, many[:4], telemetry(*[0.1] * 4, bad=[1, 2]))
    with pytest.warns(UserWarning, match=r"gradients of g1, g2 are not finite"):
        reader.look()


def test_a_single_number_that_is_none_spoils_its_gradient_alone() -> None:
    rows = np.zeros((4, NON_FINITE + 1))
    rows[:, NON_FINITE] = 0, 1, 2, 1
    rows[:, WANTED] = 1.0, np.nan, np.inf, np.inf

    found = np.asarray(_spoilt(jnp.asarray(rows, jnp.float32)))
    np.testing.assert_array_equal(found, [0.0, np.nan, np.inf, np.inf])
