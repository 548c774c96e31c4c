"""Tests that steps which check their gradients decide as on one device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale as dynamic_scale_lib
from jax.sharding import PartitionSpec
from planner_steps import mlp_loss

# With targets so far off, gradients overflow at this and a few smaller scales: at
# the last of these only their sum does.
FAR, SCALE = 512.0, 2.0**127


def batches(count: int) -> list[Any]:
    found = [cases.rows(seed, cases.ROWS) for seed in range(count)]
    return [{**batch, "y": FAR * batch["y"]} for batch in found]


def scaled(params: Any, batch: Any, scale: Any) -> Any:
    def loss(params: Any) -> Any:
        value = mlp_loss(params, batch)
        return scale * value, value

    (_, value), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)


def by_hand(params: Any, batch: Any, state: Any, dtype: Any = jnp.float32) -> Any:
    """A loss scale that is halved on overflow, and a count of skipped steps."""
    scale, tx = state["scale"], cases.ADAM
    read = jax.tree.map(lambda p: p.astype(dtype), params)
    loss, grads = scaled(read, batch, scale)
    good = jnp.all(
        jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
    )
    updates, moments = tx.update(grads, state["moments"], params)
    kept = functools.partial(jax.tree.map, functools.partial(jnp.where, good))
    return kept(optax.apply_updates(params, updates), params), {
        "moments": kept(moments, state["moments"]),
        "scale": jnp.where(good, scale, scale / 2),
        "skipped": state["skipped"] + (~good).astype(jnp.int32),
        "step": state["step"] + 1,
        "loss": loss,
        "mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"]),
    }


def by_flax(params: Any, batch: Any, state: Any) -> Any:
    """A loss scale as in flax's example wmt."""
    scaler = state["scaler"]
    scaler, finite, loss, grads = scaler.value_and_grad(lambda p: mlp_loss(p, batch))(
        params
    )
    updates, moments = cases.ADAM.update(grads, state["moments"], params)
    kept = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
    return kept(optax.apply_updates(params, updates), params), {
        "moments": kept(moments, state["moments"]),
        "scaler": scaler,
        "step": state["step"] + 1,
        "loss": loss,
    }


GUARDED = optax.apply_if_finite(cases.ADAM, max_consecutive_errors=100)


def by_optax(params: Any, batch: Any, state: Any) -> Any:
    scale = jnp.where(state["step"] % 3 == 1, SCALE, 1.0)
    loss, grads = scaled(params, batch, scale)
    updates, guarded = GUARDED.update(grads, state["guarded"], params)
    return optax.apply_updates(params, updates), {
        "guarded": guarded,
        "step": state["step"] + 1,
        "loss": loss,
    }


def common() -> dict[str, Any]:
    return {"step": jnp.int32(0), "loss": jnp.float32(0)}


def first(scale: float) -> dict[str, Any]:
    return {
        "moments": cases.ADAM.init(cases.MLP),
        "scale": jnp.float32(scale),
        "skipped": jnp.int32(0),
        "mean": jnp.float32(0),
        **common(),
    }


STEPS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "by_hand": (by_hand, lambda: first(SCALE)),
    "in_float16": (
        functools.partial(by_hand, dtype=jnp.float16),
        lambda: first(2.0**15),
    ),
    "DynamicScale": (
        by_flax,
        lambda: {
            "moments": cases.ADAM.init(cases.MLP),
            "scaler": dynamic_scale_lib.DynamicScale(
                growth_interval=2, scale=jnp.float32(SCALE)
            ),
            **common(),
        },
    ),
    "apply_if_finite": (
        by_optax,
        lambda: {"guarded": GUARDED.init(cases.MLP), **common()},
    ),
}


def split(function: Callable[..., Any]) -> Any:
    """The step of a function, with its results in the order of the case."""
    return lambda params, state, batch: function(params, batch, state)


def decisions(state: Any) -> list[Any]:
    """The scales and counters that a step carries."""
    found = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, state))
    return [
        (jax.tree_util.keystr(path), leaf.tolist())
        for path, leaf in found
        if leaf.ndim == 0 and path[0].key not in ("loss", "mean")
    ]


@pytest.mark.filterwarnings("ignore:step .* not finite:UserWarning")
@pytest.mark.parametrize(
    ("name", "codec"), list(zip(STEPS, itertools.cycle(["int8", "sign"]), strict=False))
)
def test_scales_and_counters_are_those_of_one_device(name: str, codec: str) -> None:
    function, start = STEPS[name]
    step = split(function)
    plain, planned = jax.jit(step), autoparallel(step, codec)
    one = many = jax.tree.map(jnp.array, (cases.MLP, start()))
    skipped = []
    for batch in batches(8):
        one, many = plain(*one, batch), planned(*many, batch)
        assert decisions(one[1]) == decisions(many[1])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(many[0]))
        skipped.append(next(iter(planned.telemetry.values())).skipped)
    assert 0 < skipped[-1] < 8
    near = np.asarray(one[1]["loss"]), np.asarray(many[1]["loss"])
    np.testing.assert_allclose(*near, rtol=0.3)


def autoparallel(step: Any, codec: str) -> Any:
    case = dataclasses.replace(
        cases.case_of("data_parallel"),
        step=step,
        pins={"batch/*": PartitionSpec("data")},
    )
    return case.parallel(codec)


def test_what_the_forward_pass_spoils_is_kept_too() -> None:
    """A step that looks at its gradients need not look at what else it carries."""
    step = autoparallel(split(by_hand), "int8")
    start = jax.tree.map(jnp.array, (cases.MLP, first(1.0)))
    params, state = step(*start, batches(1)[0])
    mean = np.asarray(state["mean"])
    bad = batches(2)[1]
    bad["x"][0, 0] = np.nan

    params, state = step(params, state, bad)

    assert np.asarray(state["mean"]) == mean != 0
    assert int(state["skipped"]) == 1
    with pytest.warns(UserWarning, match="step 2: .* not finite"):
        assert step.compression_state["skipped"] == 1
