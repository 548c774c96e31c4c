"""Tests a step's time as a function of batch and accumulation.

The expected value comes from tracing the step at that batch and pricing the same
layouts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.cluster import Cluster
from autopar.cost.estimate import estimate
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.planner.recipes import Recipe, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse

CASES = (("dense", "8:h100"), ("dense", "2x4:h100"), ("attention", "8:cpu"))
ROWS = 4096


def dense_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = batch["x"]
        for w in p["layers"]:
            x = x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = p["embed"][batch["tokens"]]
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        x = jnp.einsum("bhts,bshk->bthk", scores, v)
        logits = jnp.einsum("bthk,hkv->btv", x, p["out"])
        wanted = jax.nn.one_hot(batch["tokens"], logits.shape[-1])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, -1))

    value, grads = jax.value_and_grad(loss)(params)
    optimizer = optax.sgd(0.1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), value


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    layer = {"up": struct(1024, 4096), "bias": struct(4096), "down": struct(4096, 1024)}
    batch = {"x": struct(rows, 1024), "y": struct(rows, 1024)}
    return dense_step, ({"layers": [layer, layer]}, batch)


def attention(rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    params = {
        "embed": struct(512, 128), "out": struct(4, 32, 512),
        "q": struct(128, 4, 32), "k": struct(128, 4, 32), "v": struct(128, 4, 32),
    }  # fmt: skip
    return attention_step, (params, {"tokens": struct(rows, 32, dtype=jnp.int32)})


STEPS = {"dense": dense, "attention": attention}


@functools.cache
def analysed(name: str, rows: int) -> Analysis:
    step, args = STEPS[name](rows)
    return analyse(step, args)


@functools.cache
def planned(name: str, text: str) -> tuple[Assignment, Pricer]:
    cluster = Cluster.parse(text)
    pricer = Pricer(cluster, candidate_meshes(cluster)[0])
    analysis = analysed(name, ROWS)
    axes = tuple(range(len(pricer.mesh.axes)))
    recipe = (
        Recipe("data", axes) if len(axes) == 1 else Recipe("both", (0,), (1,), True)
    )
    limit = restriction_of(analysis, recipe, pricer)
    return solve_mesh(analysis, pricer, limit, seconds=2).assignment, pricer


def anew(name: str, text: str, rows: int) -> float:
    """Seconds of the same layouts, after the step is traced and priced at another
    batch.
    """
    assignment, pricer = planned(name, text)
    other = analysed(name, rows)
    assert len(other.contraction.nodes) == len(assignment.strategies)
    moved = dataclasses.replace(assignment, analysis=other)
    return estimate(moved, pricer).seconds()


@pytest.mark.parametrize("rows", [64, 512, 4096, 65536])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_other_batches_cost_what_pricing_anew_says(
    name: str, text: str, rows: int
) -> None:
    found = estimate(*planned(name, text)).seconds(rows / ROWS)
    assert found == pytest.approx(anew(name, text, rows), rel=1e-3)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_accumulation_pays_for_each_microbatch(name: str) -> None:
    """Sums and the update are paid once, the rest by every microbatch."""
    found = estimate(*planned(name, "8:cpu"))
    each = found.microbatch_s()
    once = found.seconds() - each
    assert 0 < once < found.seconds()
    for count in (2, 4, 8):
        want = count * (each + found.accumulate_s) + once
        assert found.seconds(count, accumulation=count) == pytest.approx(want)
        assert found.seconds(count, accumulation=count) >= found.seconds(count)


@pytest.mark.parametrize("text", ["8:cpu", "8:h100"])
def test_more_samples_never_take_less_time(text: str) -> None:
    found = estimate(*planned("attention", text))
    times = [found.seconds(rows / ROWS) for rows in range(64, 16384, 256)]
    assert times == sorted(times)
