"""Tests the averages of error feedback, and its errors."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, norm, normal, run

from autopar.compression.codecs.quantise import Sign
from autopar.compression.gradient import Feedback, Gradient, average_due
from autopar.compression.synchronise import RESIDUAL


def test_residuals_are_averaged_when_due():
    every = 3
    shapes = ((7,), (2, 5))
    averaged = tuple(
        Gradient(f"a{k}", shape, Sign(), Feedback("residual", average_every=every))
        for k, shape in enumerate(shapes)
    )
    alone = tuple(dataclasses.replace(g, feedback=FED_BACK) for g in averaged)
    partials = [normal(WORKERS, *shape) for shape in shapes]
    states = None
    for step in range(5):
        _, other, _ = run(alone, partials, states, step)
        _, states, sums = run(averaged, partials, states, step)
        # Algorithm 1 of arXiv 2008.05823 averages at the start of step t when
        # (t + 1) % p == 0: the residuals that leave step t - 1.
        due = (step + 1 + 1) % every == 0
        assert bool(average_due(jnp.int32(step), every)) == due
        for k in range(2):
            got, own = states[k]["residual"], other[k]["residual"]
            expected = own.mean(axis=0, keepdims=True) if due else own
            expected = np.broadcast_to(expected, own.shape)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            assert sums[1, k, RESIDUAL] == pytest.approx(norm(got[1]) ** 2, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "server"}, "kind must be one of none, residual"),
        ({"kind": "residual", "dtype": "int8"}, "dtype must be one of float32"),
        ({"kind": "residual", "decay": 1.5}, r"decay must be in 0\.\.1, got 1\.5"),
        ({"kind": "residual", "decay": math.nan}, "decay must be in"),
        ({"kind": "residual", "average_every": -1}, "0 .never. or a number of steps"),
        ({"average_every": 2}, "needs a residual; use kind='residual'"),
    ],
)
def test_bad_feedback(fields, message):
    with pytest.raises(ValueError, match=message):
        Feedback(**fields)
