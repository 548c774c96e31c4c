"""Tests that a gradient which several updates of a stage read is summed once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from stage_cases import batch, copied, distance, mean_loss, tied_loss, weights

import autopar

CLOSE = 2e-5
CLIP = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
# Loss, optimizer, and what gradients are multiplied by before it.
CASES = {
    "clipped": (mean_loss, CLIP, 1.0),
    "clipped behind a loss scale": (mean_loss, CLIP, 0.3),
    "clipped, tied": (tied_loss, CLIP, 0.5),
    "clipped by each array": (
        mean_loss,
        optax.chain(optax.adaptive_grad_clip(0.02), optax.sgd(0.1, momentum=0.9)),
        1.0,
    ),
    "skipped": (mean_loss, optax.apply_if_finite(CLIP, 3), 1.0),
}


def case(name):
    """A step with state, and its first state."""
    loss, optimizer, scale = CASES[name]

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        grads = jax.tree.map(lambda g: scale * g, grads)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, value

    params = weights()
    return step, {"params": params, "moments": optimizer.init(params)}


def asked(**options):
    return {
        "cluster": "4:cpu", "stages": 2, "microbatches": 4,
        "pins": {"batch/*": P("data")}, "axis_names": ("data",), **options,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["clipped, tied", "clipped by each array", "skipped"])
def test_an_audit_finds_one_sum(name):
    step, state = case(name)
    plan = autopar.plan(step, state, batch(), **asked())
    first = autopar.audit(step, state, batch(), plan=plan).stages[0]
    assert first.predicted["all_reduce"] > 0
    assert first.shardy["all_reduce"] == pytest.approx(first.predicted["all_reduce"])


def rows(number, broken):
    """A batch; on request, a row of the second batch is not finite."""
    out = batch(seed=number)
    if broken and number == 1:
        out["x"][3, 5] = jnp.nan
    return out


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("clipped", "1f1b"),
        ("clipped behind a loss scale", "zero-bubble"),
        ("clipped, tied", "1f1b"),
        ("clipped, tied", "zero-bubble"),
        ("clipped by each array", "1f1b"),
        ("skipped", "zero-bubble"),
    ],
)
def test_states_are_those_of_one_device(name, schedule):
    step, state = case(name)
    staged = autopar.parallelize(step, **asked(schedule=schedule))
    mine, plain, one = copied(state), state, jax.jit(step)
    for number in range(3):
        given = rows(number, broken=name == "skipped")
        mine, loss = staged(mine, given)
        plain, expected = one(plain, given)
        np.testing.assert_allclose(loss, expected, rtol=CLOSE)
    assert distance(plain, mine) < CLOSE
