"""Tests that updates with loops, such as Muon's, run once after all microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stage_cases import adam, copied, distance, mean_loss, train

import autopar

CLOSE = 2e-5


def orthogonal(x):
    """Newton-Schulz iteration, which approximates an orthogonal matrix."""

    def better(_, x):
        return 1.5 * x - 0.5 * (x @ x.T) @ x

    return jax.lax.fori_loop(0, 3, better, x / (jnp.linalg.norm(x) + 1e-6))


def step(state, batch):
    value, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    kept = jax.tree.map(lambda m, g: 0.9 * m + g, state["kept"], grads)
    turned = jax.tree.map(lambda m: orthogonal(m) if m.ndim == 2 else m, kept)
    params = jax.tree.map(lambda p, u: p - 0.05 * u, state["params"], turned)
    return {"params": params, "kept": kept}, value


def first():
    params = adam(mean_loss)[1]["params"]
    return {"params": params, "kept": jax.tree.map(jnp.zeros_like, params)}


@pytest.mark.parametrize("options", [{"stages": 2}, {}])
def test_a_loop_of_the_update_trains_as_on_one_device(options):
    planned = autopar.parallelize(step, cluster="4:cpu", microbatches=4, **options)
    state, losses = train(planned, copied(first()))
    expected, expected_losses = train(jax.jit(step), copied(first()))
    np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
    assert distance(expected, state) < CLOSE
