"""Tests the noise scale in pipeline stages against the gradients of single rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import PlanError
from autopar.runtime.noise.averages import NoiseOptions

# So many rows that stages split them over two devices.
ROWS, WIDTH, LAYERS = 4096, 16, 4


def state(width: int = WIDTH) -> Any:
    draw = np.random.default_rng(0)
    return [
        {
            "w": jnp.asarray(0.4 * draw.standard_normal((width, width)), jnp.float32),
            "b": jnp.asarray(0.1 * draw.standard_normal(width), jnp.float32),
        }
        for _ in range(LAYERS)
    ]


def batch(seed: int = 1, width: int = WIDTH) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((ROWS, width)).astype(np.float32)


def loss_of(params: Any, x: Any) -> Any:
    for p in params:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((x - 1.0) ** 2)


def step(params: Any, x: Any, loss_of: Any = loss_of) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    factor = 0.1 / jnp.maximum(1.0, norm)
    return jax.tree.map(lambda p, g: p - factor * g, params, grads), loss


def expected(params: Any, x: Any, groups: list[np.ndarray]) -> tuple[float, float]:
    found = [
        np.concatenate(
            [np.ravel(g) for g in jax.tree.leaves(jax.grad(loss_of)(params, x[rows]))]
        )
        for rows in groups
    ]
    each = np.stack(found).astype(float)
    return np.square(each).sum(1).mean(), np.square(each.mean(0)).sum()


def stacked(layers: Any) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def in_loop(params: Any, x: Any) -> Any:
    """`step` on stacked layers."""

    def loss_of(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - 1.0) ** 2)

    return step(params, x, loss_of)


@pytest.mark.parametrize(
    ("cluster", "replicas", "microbatches", "schedule"),
    [("2:cpu", 1, 4, "1f1b"), ("4:cpu", 2, 2, "1f1b"), ("4:cpu", 2, 2, "interleaved")],
)
def test_norms_are_those_of_microbatches_and_replicas(
    cluster: str, replicas: int, microbatches: int, schedule: str
) -> None:
    loop = schedule == "interleaved"
    run = autopar.parallelize(
        in_loop if loop else step, cluster=cluster, stages=2,
        microbatches=microbatches, schedule=schedule, noise_scale=True, seconds=None,
    )  # fmt: skip
    params = stacked(state()) if loop else state()
    for seed in (1, 2):
        before = jax.tree.map(np.asarray, params)
        params, loss = run(params, batch(seed))
    found = run.noise_scale
    parts = np.arange(ROWS).reshape(replicas, -1)
    groups = [part[m::microbatches] for part in parts for m in range(microbatches)]
    if loop:
        before = [jax.tree.map(lambda p, k=k: p[k], before) for k in range(LAYERS)]
    local, total = expected(before, batch(2), groups)

    assert len(run.plan.stages) == 2
    assert found.groups == replicas * microbatches
    assert (found.steps, found.biased, found.left_out) == (2, False, ())
    assert found.local == pytest.approx(local, rel=1e-4)
    assert found.total == pytest.approx(total, rel=1e-4)
    assert np.isfinite(float(loss))


def plain(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def square(tree: Any) -> float:
    return sum(
        float(np.square(np.asarray(x, float)).sum()) for x in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize("every", [1, 2])
def test_what_codecs_of_stages_send_is_measured_before_and_after(every: int) -> None:
    run = autopar.parallelize(
        plain, cluster="4x1:cpu,network=100Mb/s", stages=2, microbatches=2,
        compression="topk:ratio=0.1", noise_scale=NoiseOptions(every=every),
        axis_names=("data",), pins={"x": P("data")}, seconds=None,
    )  # fmt: skip
    before = jax.tree.map(np.asarray, state(32))
    after, _ = run(state(32), batch(1, 32))
    found = run.noise_scale
    parts = np.arange(ROWS).reshape(2, -1)
    groups = [part[m::2] for part in parts for m in range(2)]
    local, total = expected(before, batch(1, 32), groups)
    moved = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 0.1, before, after)

    assert len(run.plan.stages) == 2
    assert sum(r.codec != "dense" for r in run.telemetry.values()) == LAYERS
    assert (found.groups, found.steps, found.left_out) == (4, 1, ())
    assert found.local == pytest.approx(local, rel=1e-4)
    assert found.total == pytest.approx(total, rel=1e-4)
    assert found.excess == pytest.approx(square(moved) - total, rel=1e-3)
    run(after, batch(2, 32))
    assert run.noise_scale.steps == 3 - every


def tied(w: Any, x: Any) -> Any:
    """The first weights are also the last weights, so two stages compute parts of a
    gradient.
    """

    def loss_of(w: Any) -> Any:
        h = jnp.tanh(x @ w["tied"])
        for k in ("a", "b"):
            h = h + jnp.tanh(h @ w[k])
        return jnp.mean((h @ w["tied"].T - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def test_what_two_stages_make_together_is_left_out_and_named() -> None:
    run = autopar.parallelize(
        tied, cluster="2:cpu", stages=2, microbatches=2, noise_scale=True, seconds=None
    )
    w = {k: s["w"] for k, s in zip(("tied", "a", "b"), state(), strict=False)}
    run(w, batch())

    assert run.noise_scale.left_out == ("w/tied",)
    assert run.noise_scale.biased


def test_nothing_to_compare_is_refused() -> None:
    options: dict[str, Any] = {"cluster": "2:cpu", "stages": 2, "microbatches": 1}
    run = autopar.parallelize(step, noise_scale=True, **options)
    with pytest.raises(PlanError, match="microbatches= of at least 2"):
        run(state(), batch())
    run = autopar.parallelize(
        step,
        noise_scale=NoiseOptions(preconditioned=True),
        **options | {"microbatches": 2},
    )
    with pytest.raises(PlanError, match="several stages"):
        run(state(), batch())
