"""Tests steps written for ``jax.pmap`` as one replica with the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planner_harness as harness
import pytest
from flax import linen

from autopar_errors import TraceError
from autopar_passes.program.trace import open_arguments, trace

X = jnp.arange(8.0).reshape(4, 2)


def run(case: harness.Case) -> list[Any]:
    """The flat results under a plan that splits as much as it can."""
    plan = harness.random_plan(case, (8,), random.Random(0))
    arrays = open_arguments(case.step, case.args).arrays
    return harness.compiled(harness.lowered(case, plan))(*map(np.asarray, arrays))


def collectives(x: Any) -> Any:
    axis = "devices"
    return {
        "index": jax.lax.axis_index(axis) + 3,
        "size": jax.lax.psum(1, axis) * jnp.ones(2),
        "mean": jax.lax.pmean({"a": x, "b": x + 1}, axis),
        "most": (jax.lax.pmax(x, axis), jax.lax.pmin(x, axis)),
        "gather": jax.lax.all_gather(x, axis),
        "gather last": jax.lax.all_gather(x, axis, axis=1),
        "tiled": jax.lax.all_gather(x, axis, tiled=True),
        "scatter": jax.lax.psum_scatter(x, axis, tiled=True),
        "permuted": jax.lax.ppermute(x, axis, [(0, 0)]),
        "to all": jax.lax.all_to_all(x, axis, 0, 1, tiled=True),
        "moved": jax.lax.all_to_all(x[None], axis, 0, 2),
        "key": jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(axis)),
    }


def test_every_collective_is_that_of_one_replica() -> None:
    case = harness.prepare(collectives, (X,))
    kinds = {op.kind for op in case.graph.operators}
    assert not kinds & {"psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute"}
    want = jax.jit(jax.vmap(collectives, axis_name="devices"))(X[None])
    have = run(case)
    for a, b in zip(have, jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b[0])


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        norm = linen.BatchNorm(use_running_average=False, axis_name="batch")
        return linen.Dense(1)(norm(linen.Dense(8)(x)))


def norm_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        out, new = Net().apply(variables, batch, mutable=["batch_stats"])
        return jnp.mean(out**2), new["batch_stats"]

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    grads = jax.lax.pmean(grads, axis_name="batch")
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "batch_stats": stats}, jax.lax.pmean(value, "batch")


def test_means_over_replicas_are_means_over_the_batch() -> None:
    """The statistics of 2 replicas of 16 rows are those of one of 32."""
    x = jax.random.normal(jax.random.key(0), (32, 4))
    create = jax.vmap(lambda k: Net().init(k, x), axis_name="batch", axis_size=1)
    state = jax.jit(create)(jax.random.split(jax.random.key(1), 1))
    state = jax.tree.map(lambda a: a[0], dict(state))
    replicas = jax.vmap(norm_step, in_axes=(None, 0), axis_name="batch")
    want = jax.tree.map(lambda a: a[0], jax.jit(replicas)(state, x.reshape(2, 16, 4)))
    case = harness.prepare(norm_step, (state, x))
    assert case.traced.replicas == {"batch"}
    assert len(case.traced.carried) == len(jax.tree.leaves(state))
    for a, b in zip(run(case), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_pmap_is_refused() -> None:
    with pytest.raises(TraceError, match=r"is a jax\.pmap: pass the function itself"):
        trace(jax.pmap(lambda x: x, axis_name="batch"), (X,))


def undefined(x: Any) -> Any:
    return x * factor  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("step", [undefined])
def test_other_names_that_are_missing_are_the_users_own(
    step: Callable[..., Any],
) -> None:
    with pytest.raises(NameError, match="factor"):
        trace(step, (X,))
