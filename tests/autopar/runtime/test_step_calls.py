"""Tests calls of steps: what is compiled, what is donated, and what is static."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_forms as forms

import autopar
from autopar import PlanError
from autopar.steps.state import StateWarning
from autopar_errors import TraceError

TX = optax.adam(1e-2)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of the modules that XLA compiles, in order."""
    found: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def counted_step(state: Any, batch: Any, rng: Any) -> Any:
    """A step that folds its number into the key, as most steps with dropout do."""
    noise = jax.random.normal(jax.random.fold_in(rng, state.step), batch["x"].shape)

    def loss(params: Any) -> Any:
        out = state.apply_fn({"params": params}, batch["x"] + 0.1 * noise)
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


class TestOneProgram:
    """A step compiles once, however its state was made."""

    @pytest.mark.parametrize("made", ["plainly", "by init", "by init for a batch"])
    def test_train_state(self, made: str, compiled: list[str]) -> None:
        step = autopar.parallelize(counted_step, cluster="8:cpu")
        batch, rng = next(forms.batches(1)), jax.random.key(1)
        if made == "plainly":
            state = forms.create_linen(jax.random.key(0))
        else:
            others = (batch, rng) if made == "by init for a batch" else None
            state = step.init(forms.create_linen, jax.random.key(0), others=others)
        losses: list[float] = []
        for batch in forms.batches(3):
            state, loss = step(state, batch, rng)
            losses.append(float(loss))
        assert len([name for name in compiled if "counted_step" in name]) == 1
        np.testing.assert_allclose(losses, self.alone(rng), rtol=1e-5)

    def alone(self, rng: Any) -> list[float]:
        state, losses = forms.create_linen(jax.random.key(0)), []
        for batch in forms.batches(3):
            state, loss = jax.jit(counted_step)(state, batch, rng)
            losses.append(float(loss))
        return losses

    def test_a_number_that_becomes_an_array(self, compiled: list[str]) -> None:
        def rate_step(state: Any, batch: Any) -> Any:
            rate = jnp.maximum(state["rate"] * 0.5, jnp.float32(1e-3))
            return {"w": state["w"] - rate * batch.sum(0), "rate": rate}

        step = autopar.parallelize(rate_step, cluster="8:cpu")
        state = {"w": jnp.zeros(8), "rate": 0.5}
        for _ in range(3):
            state = step(state, np.ones((16, 8), np.float32))
        assert len([name for name in compiled if "rate_step" in name]) == 1
        assert state["rate"] == 0.0625


class TestConsumed:
    def test_is_named(self) -> None:
        step = autopar.parallelize(forms.plain_step, cluster="8:cpu")
        params, opt_state = forms.create_plain(jax.random.key(0))
        batch = next(forms.batches(1))
        new = step(params, opt_state, batch)
        with pytest.raises(PlanError, match=r"'params/.*consumed.*donate=False"):
            step(params, opt_state, batch)
        assert np.isfinite(step(*new[:2], batch)[-1])

    def test_a_batch_is_not(self) -> None:
        step = autopar.parallelize(forms.plain_step, cluster="8:cpu")
        state = forms.create_plain(jax.random.key(0))
        batch = jax.tree.map(jnp.asarray, next(forms.batches(1)))
        for _ in range(2):
            *state, _ = step(*state, batch)


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


def flagged_step(
    w: Any, x: Any, *, train: bool = True, mode: Any = Mode.TRAIN, name: str = "a"
) -> Any:
    scale = 2.0 if train and mode is Mode.TRAIN and name == "a" else 1.0
    return w * scale, (x @ w).sum()


class TestStatic:
    @pytest.mark.parametrize(
        ("flags", "scale"),
        [({}, 2), ({"train": False}, 1), ({"mode": Mode.EVAL}, 1), ({"name": "b"}, 1)],
    )
    def test_flags_are_part_of_the_program(self, flags: Any, scale: float) -> None:
        step = autopar.parallelize(flagged_step, cluster="8:cpu", donate=False)
        w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
        for given in ({}, flags, flags):
            new, _ = step(w, x, **given)
        np.testing.assert_array_equal(new, scale * w)

    def test_named(self) -> None:
        def repeated(w: Any, x: Any, times: int) -> Any:
            for _ in range(times):
                w = w * 2
            return w, x.sum()

        step = autopar.parallelize(
            repeated, cluster="8:cpu", static_argnames="times", donate=False
        )
        w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
        assert [float(step(w, x, k)[0][0, 0]) for k in (1, 3)] == [2, 8]

    def test_of_a_jitted_step(self) -> None:
        jitted = jax.jit(
            lambda w, x, times: (w * (2 if times == 3 else 1), x.sum()),
            static_argnames="times",
            donate_argnums=0,
        )
        step = autopar.parallelize(jitted, cluster="8:cpu", donate=False)
        w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
        assert [float(step(w, x, times=k)[0][0, 0]) for k in (1, 3)] == [1, 2]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": ["a"]}, r"'batch/text/0' is of type str"),
        ({"x": np.array(["a"])}, r"'batch/x' is an array of dtype <U1"),
        ({"x": np.array([None])}, r"'batch/x' is an array of dtype object"),
        ({"x": object()}, r"'batch/x' is of type object"),
    ],
)
def test_what_no_program_takes(batch: Any, message: str) -> None:
    step = autopar.parallelize(lambda w, batch: w, cluster="8:cpu")
    with pytest.raises(TraceError, match=message):
        step(jnp.ones(8), batch)


def test_nothing_carried_is_said() -> None:
    step = autopar.parallelize(
        lambda params, x: (x @ params["w"]).sum(), cluster="8:cpu"
    )
    with pytest.warns(StateWarning, match="nothing that it takes comes back"):
        step({"w": jnp.ones((8, 8))}, jnp.ones((16, 8)))


def test_state_that_comes_back_in_another_dtype_is_named() -> None:
    step = autopar.parallelize(
        lambda w, x: (w - x.sum()).astype(jnp.bfloat16), cluster="8:cpu"
    )
    with pytest.warns(StateWarning, match="'w' is float32, and 'result' of its shape"):
        step(jnp.ones((8, 8)), jnp.ones((16, 8)))


def test_another_structure_is_no_other_dtype() -> None:
    step = autopar.parallelize(
        lambda params, x: [jax.grad(lambda p: (x @ p["w"]).sum())(params)["w"]],
        cluster="8:cpu",
    )
    with pytest.warns(StateWarning, match="nothing that it takes comes back") as said:
        step({"w": jnp.ones((8, 8))}, jnp.ones((16, 8)))
    assert "in the dtype that it had" not in str(said[0].message)


def test_the_users_own_line_is_named() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w * float(x.sum())

    line = inspect.getsourcelines(step)[1] + 1
    planned = autopar.parallelize(step, cluster="8:cpu")
    with pytest.raises(TraceError, match=rf"\(test_step_calls.py:{line}\)"):
        planned(jnp.ones(8), jnp.ones(8))


def test_what_comes_back_with_the_shape_of_the_batch() -> None:
    """It is taken for state, which is said; once it is named, it is the batch."""

    def rebuilt(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.tanh(x @ w)
            return jnp.mean((y - x) ** 2), y

        gradient, y = jax.grad(loss, has_aux=True)(w)
        return w - gradient, y

    w, x = jnp.eye(8), jnp.ones((16, 8))
    doubtful = autopar.parallelize(rebuilt, cluster="8:cpu")
    with pytest.warns(StateWarning, match=r"batch_argnames='x'"):
        doubtful(jnp.copy(w), jnp.copy(x))
    named = autopar.parallelize(rebuilt, cluster="8:cpu", batch_argnames="x")
    for _ in range(2):
        expected = rebuilt(w, x)
        w, y = named(w, x)
        np.testing.assert_allclose(y, expected[1], rtol=1e-5)
        np.testing.assert_allclose(w, expected[0], rtol=1e-5)


def test_state_that_changes_is_said() -> None:
    def widened(state: Any, x: Any) -> Any:
        return {**state, "count": state["count"] + 0.5}, x.sum()

    step = autopar.parallelize(widened, cluster="8:cpu")
    state = {"count": jnp.int32(0), "w": jnp.ones(8), "b": jnp.ones(8)}
    with pytest.warns(StateWarning, match="'state/count' of a state comes back in"):
        state, _ = step(state, np.ones((16, 8)))
    for _ in range(2):
        state, _ = step(state, np.ones((16, 8)))
    assert state["count"] == 1.5


class Mlp(eqx.Module):
    """A model as in Equinox's documentation, with functions among its layers."""

    layers: list[Any]
    drop: eqx.nn.Dropout
    activation: Callable[..., Any]

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(forms.WIDTH, 32, key=one),
            jax.nn.tanh,
            eqx.nn.Linear(32, forms.WIDTH, key=two),
        ]
        self.drop = eqx.nn.Dropout(0.5)
        self.activation = jnp.tanh

    def __call__(self, x: Any, key: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.activation(self.drop(x, key=key))


def equinox_step(model: Any, opt_state: Any, batch: Any, key: Any) -> Any:
    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        out = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = loss(model)
    updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, value


def equinox_state(key: Any) -> Any:
    model = Mlp(key)
    return model, TX.init(eqx.filter(model, eqx.is_array))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("created", [False, True])
def test_equinox(jitted: bool, created: bool, compiled: list[str]) -> None:
    step = eqx.filter_jit(equinox_step) if jitted else equinox_step
    ours = autopar.parallelize(step, cluster="8:cpu")
    key, state = jax.random.key(3), equinox_state(jax.random.key(0))
    if created:
        others = (next(forms.batches(1)), key)
        have = ours.init(equinox_state, jax.random.key(0), others=others)
    else:
        have = state
    want = eqx.filter_jit(lambda: state)()
    for batch in forms.batches(3):
        *have, ours_loss = ours(*have, batch, key)
        *want, loss = eqx.filter_jit(equinox_step)(*want, batch, key)
        np.testing.assert_allclose(ours_loss, loss, rtol=1e-5)
    assert have[0].layers[1] is jax.nn.tanh
    assert have[0].drop == want[0].drop
    assert len(ours._store) == 1  # pyright: ignore[reportPrivateUsage]
