"""Tests planned steps under ``jax.set_mesh``, and on arrays with explicit shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar

P = PartitionSpec
W = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32)
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
STATE = {"w": jax.ShapeDtypeStruct(W.shape, np.float32), "n": np.int32(0)}


def _state() -> dict[str, Any]:
    return {"w": jnp.asarray(W), "n": jnp.int32(0)}


def _updated(state: Any, loss: Callable[[Any], Any]) -> Any:
    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, value


def plain(state: Any, x: Any) -> Any:
    """Knows nothing of meshes."""
    state, loss = _updated(state, lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))
    return state, {"loss": loss, "rows": jnp.mean(x, 1)}


def stated(state: Any, x: Any) -> Any:
    """States the shardings of arrays in all ways that JAX has."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = mesh.axis_names[0]

    def loss(w: Any) -> Any:
        hidden = jnp.dot(x, w, out_sharding=P(axis, None))
        hidden = jax.sharding.reshard(hidden, P(None, axis))
        other: Any = jax.sharding.auto_axes(jnp.tanh, out_sharding=P(axis))(hidden)
        zeros = jnp.zeros(hidden.shape, out_sharding=P(axis))
        rows = jax.sharding.reshard(other + zeros, P(None, None))
        total = jax.lax.scan(lambda c, v: (c + v.sum(), None), 0.0, rows.T)[0]
        return jnp.mean(jnp.tanh(hidden) ** 2) + total / 999 / mesh.shape[axis]

    state, value = _updated(state, loss)
    state["w"] = jax.sharding.reshard(state["w"], P(None, None))
    return state, {"loss": value, "rows": jnp.mean(x, 1)}


def _mesh(*sizes: int, auto: bool = False) -> Any:
    names = ("data", "model")[: len(sizes)]
    kind = AxisType.Auto if auto else AxisType.Explicit
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def _trained(step: Callable[..., Any], x: Any) -> tuple[list[float], Any]:
    """The losses of two steps and the weights, read as users read them."""
    state, losses = _state(), list[float]()
    for _ in range(2):
        state, metrics = step(state, x)
        losses.append(float(jnp.mean(jnp.stack([metrics["loss"], metrics["loss"]]))))
        rows = metrics["rows"] + 0 * metrics["loss"]
        np.testing.assert_allclose(rows, X.mean(1), rtol=1e-4, atol=1e-6)
    return losses, np.asarray(state["w"])


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "two axes": (stated, _mesh(2, 4), {"noise_scale": True}),
    "microbatches": (stated, _mesh(4), {"microbatches": 4}),
    "stages": (stated, _mesh(8), {"stages": 2, "microbatches": 2}),
    "automatic": (plain, _mesh(8, auto=True), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_planned_step_under_a_mesh_equals_plain_jit(case: str) -> None:
    step, mesh, options = CASES[case]
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        planned = autopar.parallelize(step, cluster="8:cpu", seconds=2, **options)
        losses, w = _trained(planned, x)
        assert jax.sharding.get_mesh() == mesh
        expected, wanted = _trained(jax.jit(step), x)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(w, wanted, atol=1e-5)


def test_codec_under_a_mesh_sends_as_without_one() -> None:
    rows = np.tile(X, (256, 1))  # so many that each device works on its own

    def run() -> Any:
        step = autopar.parallelize(
            plain,
            cluster="8:cpu",
            compression="int8",
            pins={"x": P("data"), "state/w": P()},
            seconds=2,
        )
        state, losses = _state(), list[float]()
        for _ in range(2):
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
        codecs = [g.codec for g in step.plan.gradients]
        return (losses, np.asarray(state["w"])), codecs

    (expected, wanted), codecs = run()
    with jax.set_mesh(_mesh(8)):
        (losses, w), same = run()
    assert codecs == same
    assert losses == expected
    np.testing.assert_array_equal(w, wanted)


def test_state_lies_on_the_mesh_that_is_set_where_its_axes_can_say_so() -> None:
    mesh = _mesh(2, 4)
    with jax.set_mesh(mesh):
        pins = {"state/w": P("data"), "x": P()}
        step = autopar.parallelize(plain, cluster="8:cpu", pins=pins, max_axes=1)
        state = step.init(_state, batch=X)
        planned = step.shardings(state)["w"]
        state, metrics = step(state, X)
        again, _ = step(state, X)
        assert metrics["loss"].sharding.mesh == mesh
        assert again["w"].sharding.mesh == mesh
        assert again["w"].sharding.is_equivalent_to(planned, 2)
        total = jax.jit(jnp.sum)(again["w"])
        np.testing.assert_allclose(total, np.sum(np.asarray(again["w"])), atol=1e-3)


def test_every_method_works_under_a_mesh() -> None:
    with jax.set_mesh(_mesh(8)):
        step = autopar.parallelize(stated, cluster="8:cpu", seconds=2)
        state = step.init(_state, batch=X)
        state, first = step(state, X)
        loss = step.jit(
            lambda s, x: jnp.mean(jnp.dot(x, s["w"], out_sharding=P("data")))
        )
        np.testing.assert_allclose(
            loss(state, X) + 0, np.mean(X @ state["w"]), rtol=1e-4
        )
        state = step.replan("4:cpu", state)
        state, second = step(state, X[:8])
        plan = autopar.plan(stated, STATE, X, cluster="8:h100", seconds=2)
        autopar.audit(stated, STATE, X, plan=plan)
        outer = jax.jit(lambda s: step(s, X)[1]["loss"], out_shardings=P())
        expected = jax.jit(stated)
        wanted, one = expected(_state(), X)
        _, two = expected(wanted, X[:8])
        np.testing.assert_allclose(first["loss"], one["loss"], rtol=1e-5)
        np.testing.assert_allclose(second["loss"], two["loss"], rtol=1e-5)
        np.testing.assert_allclose(outer(_state()), one["loss"], rtol=1e-5)


def test_typed_arrays_without_a_mesh_that_is_set() -> None:
    mesh = _mesh(8)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    losses, _ = _trained(autopar.parallelize(plain, cluster="8:cpu", seconds=2), x)
    np.testing.assert_allclose(losses, _trained(jax.jit(plain), X)[0], rtol=1e-5)


def test_step_that_does_not_fit_the_mesh_is_refused_in_a_line() -> None:
    def step(w: Any, x: Any) -> Any:
        return w, jnp.sum(jax.sharding.reshard(x, P("model")))

    with (
        jax.set_mesh(_mesh(8)),
        pytest.raises(autopar.TraceError, match="model"),
    ):
        autopar.parallelize(step, cluster="8:cpu")(jnp.asarray(W), X)


def test_product_that_jit_calls_ambiguous_runs_under_a_mesh() -> None:
    def step(w: Any, x: Any) -> Any:
        return w, jnp.sum(jnp.dot(x.T, x))

    mesh = _mesh(8)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        _, total = autopar.parallelize(step, cluster="8:cpu")(jnp.asarray(W), x)
    np.testing.assert_allclose(total, np.sum(X.T @ X), rtol=1e-4)


def test_operator_that_jax_has_no_types_for_runs_under_a_mesh() -> None:
    sizes = np.array([6, 10], np.int32)

    def step(w: Any, x: Any) -> Any:
        grouped = w.reshape(2, 32, 16)
        loss, gradient = jax.value_and_grad(
            lambda g: jnp.mean(jax.lax.ragged_dot(x, g, sizes) ** 2)
        )(grouped)
        return w - 0.1 * gradient.reshape(w.shape), loss

    _, wanted = jax.jit(step)(jnp.asarray(W), X)
    mesh = _mesh(8)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        _, loss = autopar.parallelize(step, cluster="8:cpu", seconds=2)(
            jnp.asarray(W), x
        )
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
