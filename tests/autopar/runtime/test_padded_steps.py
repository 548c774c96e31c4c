"""Plans with padded rows train as one device does."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_forms import cheap

import autopar
from autopar.planner.idle_devices import plan_with_padding
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.steps.analysis import Analysis, analyse

ROWS, WIDTH, STEPS = 22, 8, 3
TX = optax.adam(1e-2)


def create(rng: jax.Array) -> Any:
    keys = jax.random.split(rng)
    layers = jnp.stack([0.4 * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys])
    params = {"layers": layers, "scale": jnp.ones(WIDTH)}
    return params, TX.init(params)


def step(params: Any, opt_state: Any, batch: Any) -> Any:
    """Layers in a scan, dropout, and a loss that leaves rows out."""

    def loss_of(params: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x @ w), None

        out, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        kept = jax.random.bernoulli(jax.random.key(3), 0.8, out.shape)
        out = jnp.where(kept, out, 0.0) * params["scale"]
        losses = jnp.mean((out - batch["y"]) ** 2, -1)
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@functools.cache
def batch() -> Any:
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    mask = (np.arange(ROWS) % 3 > 0).astype(np.float32)
    return {"x": x, "y": np.sin(x), "mask": mask}


@functools.cache
def analysis() -> Analysis:
    return analyse(step, (*jax.eval_shape(create, jax.random.key(0)), batch()))


def padded_plan(
    devices: int, found: Analysis | None = None, **options: Any
) -> autopar.Plan:
    asked = PlanOptions(may_idle=False, stages=1, **options)
    cluster = cheap(f"{devices}:cpu")
    return plan_with_padding(
        found or analysis(),
        devices,
        lambda padded: plan_analysis(padded, cluster, asked),
    )


@functools.cache
def expected() -> tuple[Any, tuple[float, ...]]:
    return trained(jax.jit(step))


def trained(run: Any, state: Any = None) -> tuple[Any, tuple[float, ...]]:
    state = create(jax.random.key(0)) if state is None else state
    losses: list[float] = []
    for _ in range(STEPS):
        *state, loss = run(*state, batch())
        losses.append(float(loss))
    return state, tuple(losses)


@pytest.mark.parametrize(
    ("devices", "options", "rows"),
    [
        (5, {}, 25),
        (6, {"remat": "all"}, 24),
        (7, {"microbatches": 2}, 28),
        (5, {"microbatches": 2, "remat": "all"}, 30),
    ],
)
def test_losses_and_state_are_those_of_one_device(
    devices: int, options: dict[str, Any], rows: int
) -> None:
    plan = padded_plan(devices, **options)
    assert plan.decided[0].startswith(f"rows: 22 padded to {rows}")
    made = autopar.parallelize(step, plan=plan)
    state = made.init(create, jax.random.key(0), batch=batch())
    assert len(jax.tree.leaves(state)[0].sharding.device_set) == devices
    found, losses = trained(made, state)
    known, known_losses = expected()
    np.testing.assert_allclose(losses, known_losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_by_a_codec() -> None:
    def deep(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(x @ w) @ w) - x) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 9.0 * grad, loss

    x = np.random.default_rng(0).standard_normal((404, 61)).astype(np.float32)
    w = np.eye(61, dtype=np.float32)
    plan = padded_plan(5, analyse(deep, (w, x)), compression="int8")
    assert [g.codec.partition(":")[0] for g in plan.stage.gradients] == ["int8"]
    made, plain = autopar.parallelize(deep, plan=plan), jax.jit(deep)
    state, expected = made.init(lambda: jnp.asarray(w), batch=x), w
    for _ in range(STEPS):
        (state, loss), (expected, known) = made(state, x), plain(expected, x)
        np.testing.assert_allclose(loss, known, rtol=0.01)
    assert known < 0.9 * plain(w, x)[1]


def test_the_compiler_communicates_what_is_planned() -> None:
    plan = padded_plan(5)
    found = autopar.audit(step, *create(jax.random.key(0)), batch(), plan=plan)
    assert found.agrees, str(found)
