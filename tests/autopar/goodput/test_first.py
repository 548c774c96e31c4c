"""Tests the codecs of a run's first step, before any measurement."""

from __future__ import annotations

import math
from typing import Any

import following_cases as cases
import numpy as np
import pytest
from following_cases import BASE

import autopar
from autopar.elastic.train import TrainRun
from autopar.goodput import Following, Loop
from autopar.goodput.choice import efficiency
from autopar.goodput.following import codecs_of

SLOW = "4x1:cpu,network=0.001Gb/s,network_latency=1us"
FAST = "4x1:cpu,network=1000Gb/s,network_latency=1us"
# A dense step of 3 ms, so that a few are over before a plan is made.
SHORT = "4x1:cpu,network=0.01Gb/s,network_latency=1us"
LITTLE, MUCH = "int8:rounding=stochastic", "randk:unbiased=true,ratio=0.25"


@pytest.fixture(scope="module")
def layouts() -> autopar.Plan:
    """Data parallelism with large batches on a fast network."""
    step = cases.parallel(cluster=FAST)
    return step.prepare(cases.create(), cases.source(0, 4096)).plan


def train(layouts: autopar.Plan, cluster: str, codecs: Any, **options: Any) -> TrainRun:
    tx = cases.optimizer()
    found = autopar.train(
        cases.parallel(tx, cluster=cluster, layouts=layouts),
        lambda: cases.create(tx),
        cases.source,
        base_batch=BASE,
        max_batch=BASE,
        codecs=codecs,
        progress=False,
        ahead=False,
        **{"samples": 1e6} | options,
    )
    assert isinstance(found, TrainRun)
    return found


def first_line(run: TrainRun) -> Any:
    return next((x for x in run.ledger.lines if x["kind"] == "batch"), None)


def test_a_codec_that_errs_little_is_taken_at_once_on_slow_links(layouts: Any) -> None:
    run = train(layouts, SLOW, (LITTLE, MUCH))
    assert run.loop.way.codecs == LITTLE
    line = first_line(run)
    assert (line["step"], line["phi"]) == (0, None)
    assert line["old"]["codecs"] == "none"
    # The program that was not wanted was never compiled.
    compiled = run.loop.step.preparation._store._compiled
    next(run)
    assert len(compiled) == 1
    run.close()


def test_steps_are_those_of_a_run_that_was_given_the_codec(layouts: Any) -> None:
    chosen = train(layouts, SLOW, (LITTLE,))
    tx = cases.optimizer()
    given = cases.parallel(tx, cluster=SLOW, layouts=layouts, compression=LITTLE)
    state = given.init(lambda: cases.create(tx))
    for done in (next(chosen) for _ in range(3)):
        state, loss = given(state, cases.source(done.position, BASE))
        assert float(done.result) == float(loss)
    chosen.close()


@pytest.mark.parametrize(
    ("cluster", "options"),
    [(FAST, {}), (SHORT, {"samples": BASE}), (SHORT, {"samples": None, "steps": 1})],
    ids=["fast", "few-rows", "one-step"],
)
def test_gradients_stay_dense_where_it_does_not_pay(
    layouts: Any, cluster: str, options: Any
) -> None:
    run = train(layouts, cluster, (LITTLE,), **options)
    assert run.loop.way.codecs == "none"
    assert first_line(run) is None
    run.close()


def test_what_pays_under_some_noise_scales_alone_waits(layouts: Any) -> None:
    """A step of a third, worth a quarter where all is noise."""
    run = train(layouts, "4x1:cpu,network=0.001Gb/s,network_latency=300us", (MUCH,))
    assert run.loop.way.codecs == "none"
    run.close()


def test_the_choice_pays_under_every_noise_scale(layouts: Any) -> None:
    run = train(layouts, SLOW, (LITTLE, "int4:rounding=stochastic", MUCH))
    ways = run.loop._ways
    made = ways.running(BASE)
    known = {
        codecs: ways.anchors.of(made.curve, made.key.codecs, codecs)[0]
        for codecs in codecs_of((LITTLE, "int4:rounding=stochastic", MUCH), "none")
    }

    def pace(codecs: str, phi: float) -> float:
        curve = known[codecs]
        terms = curve.terms()
        assert terms is not None
        error = ways._describe(made.key, curve.plan, terms, 0.0).error
        return efficiency(phi, BASE, BASE, error) / terms.predicted_s

    scales = [*np.geomspace(1e-3, 1e6, 40), math.inf]
    for phi in scales:
        assert pace(run.loop.way.codecs, phi) > pace("none", phi)
    least = {
        codecs: min(pace(codecs, phi) / pace("none", phi) for phi in scales)
        for codecs in known
    }
    assert least[run.loop.way.codecs] > 0.9 * max(least.values())
    run.close()


def test_a_run_that_goes_on_keeps_its_codecs(layouts: Any, tmp_path: Any) -> None:
    few = {"samples": None, "steps": 1}
    run = train(layouts, SHORT, (LITTLE,), checkpoint=tmp_path, **few)
    assert run.loop.way.codecs == "none"
    assert len(list(run)) == 1
    assert train(layouts, SHORT, (LITTLE,)).loop.way.codecs == LITTLE
    again = train(layouts, SHORT, (LITTLE,), checkpoint=tmp_path)
    assert again.loop.way.codecs == "none"
    assert first_line(again) is None
    again.close()


def test_a_loop_of_ones_own_chooses_where_it_is_told_the_batch(layouts: Any) -> None:
    step = cases.parallel(cluster=SLOW, layouts=layouts)
    rule = Following(
        base_batch=BASE, max_batch=BASE, codecs=codecs_of((LITTLE,), "none")
    )
    batch = cases.source(0, BASE)
    loop = Loop(step, rule)
    state = loop.begin(step.init(cases.create, others=(batch,)), batch)
    assert loop.way.codecs == LITTLE
    state, _ = step(state, batch)
    assert loop.changes == 1
