"""Tests steps that call the host in order, from loops and branches, and all plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar

W = np.eye(16, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
Log = list[tuple[float, ...]]


def _doubled(log: Log) -> Callable[..., Any]:
    def call(tag: Any, x: Any) -> Any:
        _said(log)(tag, x)
        return np.float32(2 * np.sum(x))

    return call


def _said(log: Log) -> Callable[..., None]:
    return lambda tag, x: log.append((float(tag), float(np.sum(np.asarray(x)))))


def _step(log: Log, where: str, *, ordered: bool) -> Callable[..., Any]:
    """A step that calls the host, with a new tag for each call."""
    say = _said(log)

    def told(tag: Any, x: Any) -> None:
        jax.debug.callback(say, tag, x, ordered=ordered)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = jnp.tanh(x @ w)
            if where == "rows":
                told(0, hidden)
            return jnp.mean((hidden - 1) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        result = value
        if where == "values":
            told(0, value)
            result = io_callback(_doubled(log), SCALAR, 1, value, ordered=ordered)
            io_callback(say, None, 2, result, ordered=ordered)
            told(3, gradient)
        if where == "control flow":
            jax.lax.fori_loop(0, 2, lambda k, y: (told(k, y), y / 2)[1], value)
            jax.lax.scan(lambda y, k: (y, told(k, y)), value, jnp.arange(4, 6))
            jax.lax.cond(value > 0, lambda: told(6, value), lambda: told(7, value))
            told(8, value)
        if where == "pure":
            result = jax.pure_callback(_doubled([]), SCALAR, 0, value)
        return w - 0.1 * gradient, result

    return step


def _run(step: Callable[..., Any], log: Log) -> tuple[Log, list[float]]:
    log.clear()
    w, results = jnp.asarray(W), list[float]()
    for _ in range(2):
        w, result = step(w, X)
        results.append(float(result))
    jax.block_until_ready(w)
    jax.effects_barrier()
    return list(log), results


PLANS: dict[str, dict[str, Any]] = {
    "one program": {},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}
CASES = [
    *itertools.product(("values", "control flow"), [True], PLANS),
    ("values", False, "stages"),
    ("control flow", False, "one program"),
    ("rows", True, "one program"),
    ("rows", True, "microbatches"),
    ("pure", False, "microbatches"),
]


@pytest.mark.parametrize(("where", "ordered", "plan"), CASES)
def test_host_is_called_as_by_plain_jit(where: str, ordered: bool, plan: str) -> None:
    log: Log = []
    step = _step(log, where, ordered=ordered)
    expected, wanted = _run(jax.jit(step), log)
    planned = autopar.parallelize(step, cluster="8:cpu", seconds=1, **PLANS[plan])
    found, results = _run(planned, log)
    np.testing.assert_allclose(results, wanted, rtol=1e-5)
    # JAX orders callbacks of each kind by themselves; tags ascend in a step.
    size = len(expected) // 2
    expected = [*sorted(expected[:size]), *sorted(expected[size:])]
    if not ordered:
        found = [*sorted(found[:size]), *sorted(found[size:])]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_text_is_printed_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: Any, x: Any) -> Any:
        for k in range(3):
            jax.debug.print("{k} of {w}", k=k, w=jnp.sum(w), ordered=True)
        return w + 1, jnp.sum(x)

    _run(autopar.parallelize(step, cluster="8:cpu"), [])
    lines = [f"{k} of {total}" for total in (16.0, 272.0) for k in range(3)]
    assert capfd.readouterr().out.splitlines() == lines


def test_order_over_stages_that_run_at_once_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                jax.debug.callback(lambda h: None, h, ordered=True)
                return jnp.tanh(h @ w), None

            return jnp.mean(jax.lax.scan(layer, x, w)[0])

        return w - jax.grad(loss)(w)

    options: dict[str, Any] = PLANS["stages"]
    with pytest.raises(autopar.PlanError, match="ordered=False"):
        autopar.plan(step, np.stack([W] * 4), X, cluster="8:cpu", **options)


def test_a_loop_of_layers_that_calls_the_host_is_cut_into_stages() -> None:
    log: Log = []

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                jax.debug.callback(_said(log), 0, jnp.sum(h, 1))
                return jnp.tanh(h @ w), None

            return jnp.mean(jax.lax.scan(layer, x, w)[0])

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    w = np.stack([W] * 4)
    options: dict[str, Any] = {"stages": 2, "microbatches": 1}
    planned = autopar.parallelize(step, cluster="8:cpu", seconds=1, **options)
    _, value = planned(w, X)
    jax.effects_barrier()
    found = sorted(log)
    log.clear()
    _, expected = jax.jit(step)(w, X)
    jax.effects_barrier()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(found, sorted(log), rtol=1e-4, atol=1e-4)


def test_a_part_of_a_sum_in_a_loop_over_layers_is_refused() -> None:
    """Plain jit tells the host the mean over all rows, once for each layer."""

    def step(ws: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = jnp.tanh(h @ w)
            jax.debug.callback(lambda _: None, h.mean())
            return h, None

        def loss(ws: Any) -> Any:
            return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(ws)
        return ws - 0.1 * gradient, value

    ws = np.stack([W, W])
    with pytest.raises(autopar.AutoparError, match="a part of a sum over rows"):
        autopar.plan(step, ws, X, cluster="4:cpu", microbatches=2)
