"""Tests steps with hand-written kernels: planned on any host, run on their devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import attention
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import PartitionSpec as P
from sharing_links import sharing

import autopar
from autopar_passes.rules.factor_rule import CUDNN_EFFICIENCY

SMALL = attention.BlockSizes(
    block_q=8,
    block_k=8,
    block_q_dkv=8,
    block_kv_dkv=8,
    block_q_dq=8,
    block_kv_dq=8,
)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def interpreted(q: Any, k: Any, v: Any) -> Any:
    return attention.mha(q, k, v, None, block_sizes=SMALL, interpret=True)


def on_tpu(q: Any, k: Any, v: Any) -> Any:
    first = [x.swapaxes(1, 2) for x in (q, k, v)]
    return flash_attention(*first).swapaxes(1, 2)


def training(
    attend: Any,
    *,
    batch: int = 8,
    seq: int = 16,
    heads: int = 4,
    dim: int = 8,
    dtype: Any = jnp.float32,
) -> tuple[Any, Any, Any]:
    """An attention between two projections, and the shapes of its arguments."""
    width = heads * dim

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            q, k, v = (
                (x @ params[n].astype(dtype)).reshape(batch, seq, heads, dim)
                for n in "qkv"
            )
            y = attend(q, k, v).reshape(x.shape) @ params["o"].astype(dtype)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {n: jax.ShapeDtypeStruct((width, width), jnp.float32) for n in "qkvo"}
    return step, params, jax.ShapeDtypeStruct((batch, seq, width), dtype)


def filled(tree: Any) -> Any:
    leaves, form = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        form,
        [
            0.2 * jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, leaves, strict=True)
        ],
    )


def kernel_axes(plan: autopar.Plan) -> set[tuple[tuple[str, ...], ...]]:
    """How the batch and the heads of the attention are split."""
    nodes = plan.stages[0].nodes
    return {n.axes[-2:] for n in nodes if "mha_" in n.name}


@pytest.mark.parametrize(
    ("pins", "wanted"),
    [
        ({"x": P(("data", "tensor"))}, (("data", "tensor"), ())),
        (
            {"x": P("data"), "params/*": P(None, "tensor")},
            (("data",), ("tensor",)),
        ),
    ],
    ids=["batch", "batch and heads"],
)
def test_a_planned_kernel_gives_what_the_plain_step_gives(
    pins: Any, wanted: Any
) -> None:
    step, params, x = training(interpreted)
    given = filled(params), filled(x)
    planned = autopar.parallelize(
        step,
        cluster=sharing(autopar.Cluster.parse("2x4:cpu")),
        pins=pins,
        axis_names=("data", "tensor"),
        seconds=1,
        donate=False,
    )

    got = planned(*given)

    assert kernel_axes(planned.plan) == {wanted}
    for mine, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves(step(*given)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert autopar.audit(step, *given, plan=planned.plan).agrees


@pytest.mark.parametrize(
    ("attend", "cluster", "sizes"),
    [
        (cudnn, "4:h100", {"dtype": jnp.bfloat16}),
        (on_tpu, "4:v5p", {"seq": 128, "dim": 128}),
    ],
    ids=["cudnn", "tpu"],
)
def test_steps_for_absent_devices_are_planned_and_audited(
    attend: Any, cluster: str, sizes: Any
) -> None:
    step, params, x = training(attend, **sizes)

    plan = autopar.plan(step, params, x, cluster=cluster, seconds=1)

    assert plan.unsupported_ops == ()
    assert autopar.audit(step, params, x, plan=plan).agrees


def test_a_kernel_runs_at_its_own_part_of_the_peak() -> None:
    """Twice two products forward, five backward; the scores are never in memory."""
    sizes = {"batch": 8, "seq": 4096, "heads": 8, "dim": 128}
    step, params, x = training(cudnn, dtype=jnp.bfloat16, **sizes)
    plan = autopar.plan(step, params, x, cluster="1:h100")

    pairs = 8 * 8 * 4096**2
    flops = 4 * pairs * 128 * 3.5
    attention_s = flops / (989e12 * CUDNN_EFFICIENCY)
    projections_s = 3 * 2 * 4 * 8 * 4096 * 1024**2 / (989e12 * 0.9)
    assert attention_s + projections_s < plan.predicted.compute_s
    assert plan.predicted.compute_s < 1.5 * attention_s + 3 * projections_s
    assert plan.predicted.peak_memory_bytes < pairs


def test_running_without_the_device_is_one_clear_error() -> None:
    step, params, x = training(cudnn, dtype=jnp.bfloat16)
    planned = autopar.parallelize(step, cluster="2x2:h100")

    with pytest.raises(autopar.PlanError, match="'cudnn attention' runs on gpu"):
        planned(filled(params), filled(x))
