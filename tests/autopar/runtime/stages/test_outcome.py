"""Tests that a failing host function in a stage is an error, and changes no state."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from stage_cases import adam, batch, copied, mean_loss

import autopar
from autopar.errors import StageError
from autopar.runtime.stages.run import _Run

FAILS: list[bool] = []


def noted(_):
    if FAILS:
        raise ValueError("the disk is full")


def told(kind, x):
    """Returns ``x`` after a call of a function on the host."""
    seen = jax.lax.stop_gradient(x)
    if kind == "debug":
        jax.debug.callback(noted, jnp.sum(seen))
    else:
        io_callback(noted, None, jnp.sum(seen))
    return x


def loss(kind, params, batch):
    x = batch["x"]
    for p in params:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((told(kind, x) - batch["y"]) ** 2)


@pytest.mark.parametrize("kind", ["debug", "io"])
def test_a_function_of_the_host_that_fails_is_an_error_of_its_stage(kind):
    made, state, example = adam(functools.partial(loss, kind))
    step = autopar.parallelize(
        made, cluster="4:cpu", stages=2, microbatches=2, coupled="microbatch"
    )
    state, _ = step(copied(state), example)
    FAILS.append(True)
    try:
        with pytest.raises(StageError, match=r"(?s)stage \d, update"):
            step(state, example)
    finally:
        FAILS.clear()
    expected = mean_loss(jax.device_get(state["params"]), batch())
    state, value = step(state, example)  # nothing was consumed
    np.testing.assert_allclose(value, expected, rtol=2e-5)


class Made:
    """A result that records when it is waited for."""

    nbytes = 4

    def __init__(self, waited):
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self)


@pytest.mark.parametrize("alone", [False, True])
def test_tasks_that_run_alone_are_waited_for(alone):
    """Before processes meet again: what they do together must not meet a task."""
    waited = []
    run = object.__new__(_Run)
    run.pipeline = types.SimpleNamespace(alone=alone, links=None)
    run.watched, run.sums, run.results = [], {0: {1: Made(waited)}}, {2: Made(waited)}
    run.latest = {"task": Made(waited)}
    run.settle()
    assert len(waited) == (3 if alone else 0)
