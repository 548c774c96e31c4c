"""Error feedback: averages, and the step ahead against its published algorithm."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compression_mesh import FED_BACK, WORKERS, begin, norm, normal, run

from autopar.compression.codecs.quantise import Sign
from autopar.compression.feedback import (
    Feedback,
    apply_change,
    average_due,
    change,
    step_ahead,
)
from autopar.compression.gradient import Gradient
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


def sign_blocks(values, width):
    """What the sign codec makes of blocks, in float32 with bfloat16 scales."""
    blocks = values.reshape(-1, width)
    scales = np.abs(blocks).mean(axis=1, dtype=np.float32).astype(ml_dtypes.bfloat16)
    signs = np.where(blocks >= 0, np.float32(1), np.float32(-1))
    return (signs * scales.astype(np.float32)[:, None]).reshape(-1)


def reference_loop(start, matrices, targets, *, preview, every, steps, rate, beta):
    """Algorithm 1 of arXiv 2008.05823; previews as in arXiv 2601.20738."""
    n, size = targets.shape
    params, server = start.copy(), np.zeros(size, np.float32)
    residuals, momenta = np.zeros((2, n, size), np.float32)
    for t in range(steps):
        if (t + 1) % every == 0:
            residuals[:] = residuals.mean(axis=0)
        sent = np.zeros((n, size), np.float32)
        for i in range(n):
            ahead = params - np.float32(preview) * residuals[i]
            momenta[i] = beta * momenta[i] + matrices[i] @ (ahead - targets[i])
            stepped = ahead - rate * momenta[i]
            wanted = (params - stepped) + np.float32(1 - preview) * residuals[i]
            sent[i] = sign_blocks(wanted, size // n)
            residuals[i] = wanted - sent[i]
        server += sent.sum(axis=0)
        total = sign_blocks(server, size // n)
        server -= total
        params = params - total / n
    return params, residuals


@pytest.mark.parametrize("preview", [0.0, 0.5, 1.0])
def test_step_ahead_loop_is_the_published_algorithm(preview):
    size, steps, every = 32, 10, 4
    rate, beta = np.float32(0.05), np.float32(0.5)
    spread = normal(WORKERS, size, size)
    matrices = np.einsum("nij,nkj->nik", spread, spread) / size
    targets, start = normal(WORKERS, size, seed=1), normal(size, seed=2)
    feedback = Feedback("partial", preview=preview, average_every=every)
    gradients = (Gradient("x", (size,), Sign(block=8), feedback),)

    @jax.jit
    def local(params, residuals, momenta):
        ahead = jax.vmap(lambda e: step_ahead(params, e, preview))(residuals)
        slope = jnp.einsum("nij,nj->ni", jnp.asarray(matrices), ahead - targets)
        momenta = beta * momenta + slope
        return change(params, ahead - rate * momenta), momenta

    params, states = jnp.asarray(start), begin(gradients)
    momenta = jnp.zeros((WORKERS, size))
    for step in range(steps):
        partials, momenta = local(params, states[0]["residual"], momenta)
        totals, states, _ = run(gradients, [partials], states, step)
        params = apply_change(params, totals[0][0], WORKERS)

    expected, left = reference_loop(
        start,
        matrices,
        targets,
        preview=preview,
        every=every,
        steps=steps,
        rate=rate,
        beta=beta,
    )
    np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-4)
    # The algorithm averages at the start of a step, here it is at its end.
    if (steps + 1) % every == 0:
        left[:] = left.mean(axis=0)
    np.testing.assert_allclose(states[0]["residual"], left, rtol=1e-3, atol=1e-4)
    assert norm(expected - start) > 0.1


def test_partial_without_preview_is_plain_feedback():
    partials = normal(WORKERS, 30)
    out = []
    for feedback in (FED_BACK, Feedback("partial", preview=0.0)):
        gradients, states = [Gradient("w", (30,), Sign(), feedback)], None
        for step in range(2):
            totals, states, _ = run(gradients, [partials], states, step)
        out.append(totals[0])
    np.testing.assert_array_equal(*out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "server"}, "kind must be one of none, residual, partial"),
        ({"kind": "residual", "dtype": "int8"}, "dtype must be one of float32"),
        ({"kind": "residual", "decay": 1.5}, r"decay must be in 0\.\.1, got 1\.5"),
        ({"kind": "residual", "decay": math.nan}, "decay must be in"),
        ({"kind": "partial", "preview": -0.1}, "preview must be in"),
        ({"kind": "partial", "decay": 0.5}, "use preview, or kind='residual'"),
        ({"kind": "residual", "average_every": -1}, "0 .never. or a number of steps"),
        ({"average_every": 2}, "needs a residual; use kind='residual'"),
    ],
)
def test_bad_feedback(fields, message):
    with pytest.raises(ValueError, match=message):
        Feedback(**fields)
