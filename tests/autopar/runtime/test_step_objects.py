"""Tests that objects which a step changes are updated as under ``nnx.jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar

ROWS, WIDTH, CLASSES = 16, 8, 4
TX = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.sizes = [WIDTH, CLASSES]
        self.options: dict[str, Any] = {"names": ["a", "b"]}
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(self.norm(x)))


class Tally(nnx.Pytree):
    """An NNX object that is neither a module nor an optimizer."""

    def __init__(self) -> None:
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32))
        self.kind = "rows"


def batches(count: int = 3) -> list[Any]:
    draw = np.random.default_rng(0)
    return [
        {
            "x": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
            "y": draw.integers(0, CLASSES, ROWS),
        }
        for _ in range(count)
    ]


def tutorial_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
    def loss(model: Any) -> Any:
        logits = model(batch["x"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return each.mean(), logits

    (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    metrics.update(loss=value, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return value


def tutorial_state() -> Any:
    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param), metrics


def noise_step(rngs: Any, tally: Any, level: Any, out: Any, batch: Any) -> Any:
    """A step with every kind of object, one of them in a dictionary."""
    noise = jax.random.normal(rngs["noise"](), batch["x"].shape)
    tally.rows[...] += batch["x"].shape[0]
    level[...] = 0.9 * level[...] + 0.1 * noise.std()
    out["mean"].update(values=noise.mean(axis=1))
    return {"level": level[...], "sum": (noise * batch["x"]).sum()}


def noise_state() -> Any:
    return (
        {"noise": nnx.Rngs(7)},
        Tally(),
        nnx.Variable(jnp.zeros(())),
        {"mean": nnx.metrics.Average()},
    )


class Growing(nnx.Module):
    """Makes a variable and changes a static attribute in its first call."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.calls = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.last = nnx.Variable((x * self.scale).mean(axis=0))
        self.calls += 1
        return x * self.scale


def growing_step(model: Any, batch: Any) -> Any:
    model.scale[...] *= 0.5
    return model, model(batch["x"]).sum()


@pytest.mark.parametrize(
    ("step", "create"),
    [
        (tutorial_step, tutorial_state),
        (noise_step, noise_state),
        (growing_step, lambda: (Growing(),)),
    ],
)
def test_as_nnx_jit(step: Callable[..., Any], create: Callable[[], Any]) -> None:
    want, have = create(), create()
    theirs, ours = nnx.jit(step), autopar.parallelize(step, cluster="8:cpu")
    for batch in batches():
        a, b = theirs(*want, batch), ours(*have, batch)
        check(
            nnx.to_pure_dict(nnx.state((a, want))),
            nnx.to_pure_dict(nnx.state((b, have))),
        )
        assert nnx.graphdef(have) == nnx.graphdef(want)


def check(want: Any, have: Any) -> None:
    for (path, x), (other, y) in zip(
        jax.tree_util.tree_leaves_with_path(want),
        jax.tree_util.tree_leaves_with_path(have),
        strict=True,
    ):
        assert path == other
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=str(path))


def test_a_returned_object_is_the_callers() -> None:
    model = Growing()
    out, _ = autopar.parallelize(growing_step, cluster="8:cpu")(model, batches()[0])
    assert out is model


def test_a_failed_call_leaves_objects_as_they_were() -> None:
    def broken(model: Any, batch: Any) -> Any:
        model.scale[...] = model.scale[...] * 2
        raise RuntimeError("no such layer")

    model = Growing()
    with pytest.raises(RuntimeError, match="no such layer"):
        autopar.parallelize(broken, cluster="8:cpu")(model, batches()[0])
    np.testing.assert_array_equal(model.scale[...], np.ones(WIDTH))


def test_objects_are_created_in_their_shards() -> None:
    step = autopar.parallelize(tutorial_step, cluster="8:cpu")
    state = step.init(tutorial_state, batch=batches()[0])
    assert np.isfinite(step(*state, batches()[0]))
    assert state[2].compute()["loss"] > 0
