"""Tests sums that a stage sends or reads before its microbatches end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from stage_cases import copied, distance

import autopar

CLOSE = 2e-5
LAYERS, ROWS, TIME, WIDTH = 2, 16, 4, 8


def recurrent_loss(params, batch):
    """Layers in a loop, each with a loop over time that reads weights each time."""

    def layer(x, own):
        def tick(state, x):
            state = jnp.tanh(state @ own["w"] + x * own["u"])
            return state, state

        start = jnp.zeros((x.shape[1], WIDTH))
        return x + jax.lax.scan(tick, start, x)[1], None

    x, _ = jax.lax.scan(layer, jnp.swapaxes(batch["x"], 0, 1), params)
    return jnp.mean((x[-1] - batch["y"]) ** 2)


def case():
    """A step with an update in a branch, which one stage computes for all gradients."""
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)

    def step(state, batch):
        value, grads = jax.value_and_grad(recurrent_loss)(state["params"], batch)
        updates, kept = optimizer.update(grads, state["kept"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "kept": kept}, value

    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 4.0
    params = {"w": w, "u": jnp.ones((LAYERS, WIDTH))}
    return step, {"params": params, "kept": optimizer.init(params)}


def batch(seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, TIME, WIDTH)).astype(np.float32)
    return {"x": x, "y": x[:, 0] * 0.5}


def test_gradients_of_loops_are_summed_before_another_stage_reads_them():
    step, state = case()
    options = {"pins": {"batch/*": P("data")}, "axis_names": ("data",)}
    planned = autopar.parallelize(
        step, cluster="4:cpu", stages=2, microbatches=2, **options
    )
    one, other, losses = jax.jit(step), copied(state), []
    for number in range(4):
        state, loss = one(state, batch(number))
        other, found = planned(other, batch(number))
        losses.append((float(found), float(loss)))
    for found, loss in losses:
        assert found == pytest.approx(loss, rel=CLOSE)
    assert distance(state, other) < CLOSE
