"""Tests trainings with adaptive batch size and learning rate, under plans."""

from __future__ import annotations

from typing import Any

import jax
import noise_cases as cases
import numpy as np
import optax
import pytest
from noise_cases import REPLICATED

import autopar
from autopar.goodput import codec_error, gain, progress, scale_updates, set_batch

BASE = 256
TX = scale_updates(optax.sgd(0.1, momentum=0.5), "adascale", base_batch=BASE)


def step(state: Any, batch: Any) -> Any:
    w, opt = state
    loss, grads = jax.value_and_grad(cases.loss_of)(w, batch)
    updates, opt = TX.update(grads, opt, w)
    return (optax.apply_updates(w, updates), opt), loss


def fresh() -> Any:
    return cases.state(), TX.init(cases.state())


def parallel(**options: Any) -> Any:
    pins = {"batch": REPLICATED["batch"], "state/0/*": REPLICATED["w/*"]}
    kept: dict[str, Any] = {
        "cluster": "8:cpu",
        "axis_names": ("data",),
        "pins": pins,
        "noise_scale": True,
        "seconds": None,
    }
    return autopar.parallelize(step, **kept | options)


def test_the_rate_follows_a_batch_that_grows() -> None:
    """A planned step does what one device does that is told the same."""
    run, state, plain, worth = parallel(), fresh(), fresh(), 0.0
    for seed, rows in enumerate([BASE, BASE, 4 * BASE]):
        phi = run.noise_scale.phi if seed else None
        state, plain = (set_batch(s, batch=rows, phi=phi) for s in (state, plain))
        state, loss = run(state, cases.batch(rows, seed))
        plain, expected = jax.jit(step)(plain, cases.batch(rows, seed))
        worth += BASE * (1.0 if phi is None else gain(phi, rows, BASE))

        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert progress(state) == pytest.approx(worth, rel=1e-5)
    assert BASE < progress(state) < 6 * BASE
    assert (run.noise_scale.biased, run.noise_scale.left_out) == (False, ())
    np.testing.assert_allclose(state[0]["up"], plain[0]["up"], rtol=1e-4, atol=1e-6)


def test_errors_of_codecs_are_measured() -> None:
    """Elements that are drawn alike err together, by the inverse of their share."""
    run = parallel(
        compression="randk:unbiased=true,ratio=0.25",
        noise_scale=autopar.goodput.NoiseOptions(every=1),
    )
    for seed in range(24):
        run(fresh(), cases.batch(BASE, seed))
    error = codec_error(run.noise_scale, run.telemetry, workers=8)

    assert error.own == 0.0
    assert error.shared == pytest.approx(3.0, rel=0.25)
