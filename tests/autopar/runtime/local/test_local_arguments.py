"""Tests which arguments a step with local steps may take."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.local.outer import MEAN

OPTIONS: dict[str, Any] = {
    "cluster": "2:cpu",
    "replicas": 2,
    "outer": MEAN,
    "every": 1,
    "seconds": 1,
    "compile_check": False,
}


def create() -> jax.Array:
    return 0.3 * jnp.eye(4)


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w: Any, x: Any) -> Any:
    loss, grad = jax.value_and_grad(loss_of)(w, x)
    return w - 0.1 * grad, loss


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_rows_in_another_dim() -> None:
    """One local step by plain gradients, and the mean, equal a step of all rows."""
    x = rows(3, 8, 4)
    run = autopar.local_steps(step, batch_argnames={"x": 1}, **OPTIONS)
    state, loss = run(run.init(create, batch=x), x)
    w, expected = jax.jit(step)(create(), x)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(state.state, w, atol=1e-6)


def test_static_arguments() -> None:
    def some(w: Any, x: Any, times: int = 1) -> Any:
        for _ in range(times):
            w, loss = step(w, x)
        return w, loss

    x = rows(8, 4)
    run = autopar.local_steps(some, static_argnames=("times",), **OPTIONS)
    state, _ = run(run.init(create, batch=x), x, 2)
    halves = [create(), create()]
    for k, part in enumerate(np.split(x, 2)):
        for _ in range(2):
            halves[k], _ = jax.jit(step)(halves[k], part)
    np.testing.assert_allclose(state.state, np.mean(halves, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"static_argnames": ("nope",)}, "the step has no such argument"),
        ({"microbatches": 0}, "microbatches=0: expected"),
    ],
)
def test_options_of_the_step_are_checked_at_once(given: Any, says: str) -> None:
    with pytest.raises(autopar.AutoparError, match=says):
        autopar.local_steps(step, **OPTIONS, **given)


@pytest.mark.parametrize("named", [False, True])
def test_arguments_after_the_batch(named: bool) -> None:
    def noisy(w: Any, x: Any, key: Any) -> Any:
        return step(w, x + 0.1 * jax.random.normal(key, (x.shape[1],)))

    x, key = rows(8, 4), jax.random.key(3)
    run = autopar.local_steps(noisy, **OPTIONS)
    others: Any = {"x": x, "key": key} if named else (x, key)
    begun = run.init(create, others=others)
    state, loss = run(begun, x=x, key=key) if named else run(begun, x, key)
    w, expected = jax.jit(noisy)(create(), x, key)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(state.state, w, atol=1e-6)


def test_states_with_functions() -> None:
    """As a planned step takes them: a function is part of the program."""

    def applied(state: Any, x: Any) -> Any:
        w, loss = step(state["w"], state["apply"](x))
        return {**state, "w": w}, loss

    x = rows(8, 4)
    run = autopar.local_steps(applied, **OPTIONS)
    begun = run.init(lambda: {"w": create(), "apply": jnp.tanh}, batch=x)
    state, _ = run(begun, x)
    w, _ = jax.jit(step)(create(), np.tanh(x))
    np.testing.assert_allclose(state.state["w"], w, atol=1e-6)
    assert run.agreed(state)["apply"] is jnp.tanh


def test_a_missing_batch_is_told() -> None:
    with pytest.raises(autopar.TraceError, match="argument: 'x'"):
        autopar.local_steps(step, **OPTIONS).init(create)


def test_what_was_restored_can_be_printed(tmp_path: pathlib.Path) -> None:
    x = rows(8, 4)
    run = autopar.local_steps(step, **OPTIONS)
    state = run.init(create, batch=x)
    printed = str(run)
    checkpoints = autopar.Checkpoints(tmp_path)
    checkpoints.save(run, state, step=0)
    again = autopar.local_steps(step, **OPTIONS)
    checkpoints.restore(again, create, others=(x,))
    assert str(again) == printed
