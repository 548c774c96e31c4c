"""Tests the choice of batch size, microbatches and codecs of a training."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from property_tests import examples

from autopar.errors import PlanError
from autopar.goodput import CodecError, Terms, Throughput, efficiency
from autopar.goodput.choice import PhiRange, Ratio, Way, batches, decide

BASE = 32


def way(rows: int, **more: Any) -> Way:
    sync = more.pop("sync_s", 1e-2)
    found = Terms(devices=4, hosts=4, rows=rows, work_s=1e-5 * rows, sync_s=sync)
    return Way(rows=rows, terms=found, **more)


def seen(*ways: Way) -> Throughput:
    found = Throughput()
    for one in ways:
        for _ in range(8):
            found = found.with_step(one.terms, one.terms.predicted_s)
    return found.fit()


def sure(phi: float) -> PhiRange:
    return PhiRange(phi, phi, phi)


def found(current: Way, others: list[Way], phi: PhiRange, **more: Any) -> Any:
    options: dict[str, Any] = {"base_batch": BASE, "horizon_s": 600.0, "sigmas": 1.0}
    return decide(current, others, seen(current), phi, **options | more)


@settings(max_examples=examples(50))
@example(7, 9, 4)
@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 4, 6, 8]))
def test_batches_lie_between_the_limits_and_split(
    base: int, more: int, split: int
) -> None:
    sizes = batches(base, base + more, split)
    assert sizes[0] == base
    assert sizes == tuple(sorted(set(sizes)))
    assert all(base <= rows <= base + more for rows in sizes)
    assert all(rows % split == 0 for rows in sizes[1:])
    assert all(b / a < 2.0 or b - a <= split for a, b in itertools.pairwise(sizes))


def test_a_base_batch_above_the_most() -> None:
    with pytest.raises(PlanError, match="max_batch=16 must be at least base_batch=32"):
        batches(32, 16, 4)


def test_the_batch_grows_where_noise_is_large() -> None:
    others = [way(rows) for rows in batches(BASE, 4096, 4)[1:]]
    noisy = found(way(BASE), others, sure(1e5))
    assert noisy.chosen.way.rows >= 1024
    assert noisy.chosen.least > 2
    quiet = found(way(BASE), others, sure(1.0))
    assert not quiet.changes
    assert quiet.chosen.way.rows == BASE


def test_the_chosen_goodput_is_the_formulas() -> None:
    (runs,) = found(way(BASE), [], sure(200.0)).compared
    rows_s = BASE / runs.step_s
    assert runs.goodput == pytest.approx(rows_s * efficiency(200.0, BASE, BASE))


def test_a_gain_that_is_not_sure_is_none() -> None:
    """The same expectation, once sure and once not."""
    others = [way(256)]
    assert found(way(BASE), others, sure(100.0)).changes
    wide = PhiRange(100.0, 0.0, math.inf)
    assert not found(way(BASE), others, wide).changes
    assert not found(way(BASE), others, sure(100.0), sigmas=30.0).changes


@pytest.mark.parametrize(("horizon_s", "changes"), [(600.0, True), (6.0, False)])
def test_a_change_must_pay_until_the_next(horizon_s: float, changes: bool) -> None:
    others = [way(64, cost_s=5.0)]
    assert found(way(BASE), others, sure(1e4), horizon_s=horizon_s).changes == changes


def test_a_choice_does_not_swing() -> None:
    """Where one way pays to go to, the other does not pay to come back."""
    one, other = way(64), way(88)
    for phi in (1.0, 30.0, 100.0, 1000.0):
        there = found(one, [other], sure(phi)).changes
        back = found(other, [one], sure(phi)).changes
        assert not (there and back)


class TestCodecs:
    def test_one_that_saves_time_and_errs_little_is_used(self) -> None:
        coded = way(BASE, codecs="int8", sync_s=2e-3, error=CodecError(own=1e-4))
        assert found(way(BASE), [coded], sure(100.0)).chosen.way.codecs == "int8"

    def test_one_that_errs_more_than_it_saves_is_not(self) -> None:
        error = CodecError(shared=9.0)
        coded = way(BASE, codecs="randk", sync_s=2e-3, error=error)
        assert not found(way(BASE), [coded], sure(100.0)).changes

    def test_one_that_saves_nothing_is_not(self) -> None:
        coded = way(BASE, codecs="int8", error=CodecError(own=1e-4))
        assert not found(way(BASE), [coded], sure(100.0)).changes

    @pytest.mark.parametrize(("low", "used"), [(0.95, True), (0.1, False)])
    def test_a_biased_one_counts_by_what_was_measured(
        self, low: float, used: bool
    ) -> None:
        ratio = Ratio(0.97, low, 1.0)
        coded = way(BASE, codecs="topk", sync_s=2e-3, ratio=ratio)
        assert found(way(BASE), [coded], sure(100.0)).changes == used

    def test_one_that_loses_all_is_never_used(self) -> None:
        coded = way(BASE, codecs="x", sync_s=0.0, error=CodecError(own=math.inf))
        made = found(way(BASE), [coded], sure(100.0))
        assert not made.changes
        assert made.compared[1].to_data()["goodput"] is not None


def test_the_rest_of_a_job_is_finished_first() -> None:
    """More work until a horizon is no help where less is left to do."""
    current = way(BASE, sync_s=1.0)
    quick = way(4 * BASE, sync_s=1.0, cost_s=1.0)
    fast = way(4 * BASE, sync_s=0.1, codecs="int8", cost_s=20.0)
    times = seen(current, quick, fast)

    def chosen(rest_s: float) -> Way:
        options: dict[str, Any] = {"base_batch": BASE, "horizon_s": 600.0}
        return decide(
            current, [quick, fast], times, sure(1e4), sigmas=1.0, rest_s=rest_s,
            **options,
        ).chosen.way  # fmt: skip

    assert chosen(math.inf) is fast
    assert chosen(600.0) is fast
    # 20 s and then a fortieth of 40 s, or 1 s and then a quarter of them.
    assert chosen(40.0) is quick
    assert chosen(1.0) is current
