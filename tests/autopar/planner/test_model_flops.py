"""Tests that model FLOPs do not depend on the kernel of attention."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples"))
import example_attention

BATCH, SEQ, HEADS, DIM, LAYERS = 2, 256, 2, 64, 1
WIDTH = HEADS * DIM
# Of each layer: two products of attention, and its four weights; the backward pass has
# twice the products of the forward pass, but no gradient of the first layer's input.
PAIRS = BATCH * HEADS * SEQ * SEQ
ATTENTION = LAYERS * 3 * 4 * PAIRS * DIM
WEIGHTS = (3 * LAYERS * 4 - 3) * 2 * BATCH * SEQ * WIDTH * WIDTH


def written(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = jnp.einsum("bshe,bthe->bhst", query, key) * DIM**-0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, -1), value)


def shard_mapped(query: Any, key: Any, value: Any) -> Any:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = jax.shard_map(
        lambda *x: example_attention.attend("splash", *x),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    return attend(query, key, value)


def attention(kind: str, *given: Any) -> Any:
    match kind:
        case "einsum":
            return written(*given, jnp.tril(jnp.ones((SEQ, SEQ), bool)))
        case "array":
            return written(*given, np.tril(np.ones((SEQ, SEQ), bool)))
        case "whole":
            return written(*given, None)
        case "whole cudnn":
            return jax.nn.dot_product_attention(*given, implementation="cudnn")
        case "mapped":
            return shard_mapped(*given)
    return example_attention.attend(kind, *given)


def plan_with(
    kind: str, cluster: str, scan: bool, remat: bool, layers: int = LAYERS
) -> autopar.Plan:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        query, key, value = (
            jnp.einsum("bsd,dhe->bshe", x, w[k].reshape(WIDTH, HEADS, DIM))
            for k in range(3)
        )
        out = attention(kind, query, key, value).reshape(x.shape)
        return x + out @ w[3], None

    body = jax.checkpoint(layer) if remat else layer

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x, weights = batch, weights.astype(jnp.bfloat16)
            if scan:
                x, _ = jax.lax.scan(body, x, weights)
            else:
                for k in range(layers):
                    x, _ = body(x, weights[k])
            return (x.astype(jnp.float32) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    weights = jax.ShapeDtypeStruct((layers, 4, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    decided: dict[str, Any] = {"stages": 1, "microbatches": 1, "remat": 0}
    return autopar.plan(step, weights, batch, cluster=cluster, **decided)


@pytest.mark.parametrize(
    ("kind", "cluster"),
    [
        ("einsum", "2:h100"),
        ("array", "2:h100"),
        ("plain", "2:h100"),
        ("cudnn", "2:h100"),
        ("pallas", "2:h100"),
        ("pallas_tpu", "2:v5e"),
        ("splash", "2:v5e"),
        ("mapped", "2:v5e"),
        ("whole", "2:h100"),
        ("whole cudnn", "2:h100"),
    ],
)
def test_every_kernel_of_a_model_counts_alike(kind: str, cluster: str) -> None:
    """In full; the causal half beside it; nothing that is computed again."""
    plan = plan_with(kind, cluster, scan=False, remat=kind in ("plain", "cudnn"))
    worth = plan.worth
    assert worth

    half = 0.0 if kind.startswith("whole") else 0.5 * ATTENTION
    assert worth.model_flops == pytest.approx(WEIGHTS + ATTENTION)
    part = worth.causal_mfu / worth.mfu
    assert part == pytest.approx(1.0 - half / (WEIGHTS + ATTENTION))
    peak = autopar.Cluster.parse(cluster).device.peak("bfloat16")
    seconds = (WEIGHTS + ATTENTION) / (2 * peak)
    assert worth.mfu == pytest.approx(seconds / plan.predicted.step_s)
    assert ("with causal attention at half" in str(plan)) == bool(half)


@pytest.mark.parametrize("scan", [True, False])
def test_what_a_fused_kernel_saves_is_said(scan: bool) -> None:
    """About what the step with the kernel gains; nothing where there is no kernel."""
    plain = plan_with("plain", "2:h100", scan=scan, remat=False, layers=3)
    fused = plan_with("cudnn", "2:h100", scan=scan, remat=False, layers=3)
    assert plain.worth
    assert fused.worth
    gained = plain.predicted.step_s - fused.predicted.step_s

    assert plain.worth.fused_saves_s == pytest.approx(gained, rel=0.5)
    assert "a fused kernel of attention would save about" in str(plain)
    assert fused.worth.fused_saves_s == 0.0
    assert "kernels " not in str(fused)
    on_cpu = plan_with("plain", "2:cpu", scan=scan, remat=False, layers=3)
    assert "kernels " not in str(on_cpu)
