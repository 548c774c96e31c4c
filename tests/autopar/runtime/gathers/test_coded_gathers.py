"""Tests steps whose sharded parameters are gathered as codes.

The reference is a program of one device that computes with rounded parameters, and
updates the exact ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compression.cut_codes import CutCode
from autopar.errors import PlanError
from autopar.layouts.gathering import GatherCodec, coded_gather
from autopar.layouts.layout import reshard_steps
from autopar.planner.codecs.gathers import UPDATED
from autopar.planner.edited import carried_out
from autopar.plans import Plan
from autopar.reports.explain import bind_plan
from autopar.steps.analysis import analyse
from autopar_passes.layouts import constrain, mesh_sharding

CLUSTER, WIDTH, LAYERS, ROWS = "2x4:cpu,network=1Gb/s", 128, 3, 4096
BOTH = ("hosts", "local")
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def weights() -> Any:
    shape = (LAYERS, WIDTH, WIDTH)
    return jax.random.normal(jax.random.key(0), shape) / WIDTH**0.5


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    x, y = np.random.default_rng(seed).standard_normal((2, ROWS, WIDTH))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w), None


def mean_loss(x: Any, batch: Any) -> Any:
    return jnp.mean((x - batch["y"]) ** 2)


def scanned(params: Any, batch: Any) -> Any:
    return mean_loss(jax.lax.scan(layer, batch["x"], params)[0], batch)


def scanned_again(params: Any, batch: Any) -> Any:
    body = jax.checkpoint(layer)
    return mean_loss(jax.lax.scan(body, batch["x"], params)[0], batch)


def chained(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for w in params:
        x, _ = layer(x, w)
    return mean_loss(x, batch)


def chain_weights() -> Any:
    return list(weights())


def trained_by(loss: Any, rounded: Callable[[Any], Any] = lambda p: p) -> Any:
    """A step of AdamW whose gradients are those at rounded parameters."""

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(jax.tree.map(rounded, params), batch)
        updates, moments = ADAM.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def first(params: Any) -> Any:
    return params, ADAM.init(params)


def run(step: Any, state: Any, count: int = 3) -> tuple[Any, list[float]]:
    losses: list[float] = []
    for seed in range(count):
        state, loss = step(state, batch(seed))
        losses.append(float(loss))
    return jax.device_get(state), losses


def rounding(codec: str) -> Callable[[Any], Any]:
    """Rounds blocks of rows; a row is a whole number of blocks, in any layout."""

    def rounded(w: Any) -> Any:
        code = CutCode(codec, (1, w.size), str(w.dtype))
        return code.decode(code.encode(w.reshape(1, -1))).reshape(w.shape)

    return rounded


def asked(made: Any, **options: Any) -> dict[str, Any]:
    dims = (None, BOTH) if made is weights else (BOTH,)
    return {
        "cluster": CLUSTER, "axis_names": BOTH, "seconds": 2, "stages": 1,
        "microbatches": 1, "remat": 0,
        "pins": {"state/0*": P(*dims), "batch/*": P(BOTH)}, **options,
    }  # fmt: skip


def planned(loss: Any, made: Any, **options: Any) -> Any:
    return autopar.parallelize(trained_by(loss), **asked(made, **options))


STEPS = {
    "chained": (chained, chain_weights),
    "scanned": (scanned, weights),
    "checkpointed": (scanned_again, weights),
}


@pytest.mark.parametrize("name", STEPS)
def test_equals_one_device_with_rounded_parameters(name: str) -> None:
    """Losses and the state are those of exact parameters, used rounded."""
    loss, made = STEPS[name]
    codec = f"int4:block={WIDTH}"
    step = planned(loss, made, gather_codecs=codec)
    state, losses = run(step, first(made()))
    assert step.plan.stage.gathers
    assert step.plan.worth.scheme.startswith("FSDP")
    reference = jax.jit(trained_by(loss, rounding(codec)))
    wanted, wanted_losses = run(reference, first(made()))
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        state,
        wanted,
    )
    exact = run(jax.jit(trained_by(loss)), first(made()))[1]
    assert max(np.abs(np.subtract(exact, losses))) > 1e-3


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("name", STEPS)
def test_programs_send_the_predicted_bytes(name: str, compression: str) -> None:
    loss, made = STEPS[name]
    args = jax.eval_shape(lambda: first(made())), jax.eval_shape(batch)
    hints = asked(made, compression=compression)
    dense = autopar.plan(trained_by(loss), *args, **hints)
    plan = autopar.plan(trained_by(loss), *args, **hints, gather_codecs="int8")
    audit = autopar.audit(trained_by(loss), *args, plan=plan, compiled=True)
    assert audit.agrees, str(audit)
    decided = plan.stage.gathers
    # A scale of two bytes for each block of 256 bytes.
    sent = sum(g.wire_bytes for g in decided)
    assert sent == pytest.approx(
        (1 + 2 / 256) / 4 * sum(g.dense_bytes for g in decided)
    )
    assert plan.predicted.communication_bytes < dense.predicted.communication_bytes
    assert plan.predicted.step_s < dense.predicted.step_s


# The layouts before and after a gather on a mesh of 2 x 4 devices, the shape of the
# array, its dtype, and the codec.
GATHERS = [
    (((0, 1), ()), ((), ()), (16, 64), "float32", "int8"),
    (((1, 0), (), ()), ((1,), (), ()), (8, 32, 3), "bfloat16", "int4:block=32"),
    (((), (0,)), ((), ()), (3, 100), "float32", "fp8"),
    (((1,), (0,)), ((1,), ()), (8, 64), "float32", "sign"),
]


@pytest.mark.parametrize(("before", "after", "shape", "dtype", "codec"), GATHERS)
def test_gathers_what_each_shard_decodes_to(
    before: Any, after: Any, shape: tuple[int, ...], dtype: str, codec: str
) -> None:
    """The gathered array consists of the shards, each encoded by itself."""
    sizes = 2, 4
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), BOTH)
    (step,) = reshard_steps(before, after, (), "", sizes)
    chosen = GatherCodec(codec, frozenset({0}))
    gather = coded_gather(chosen, shape, dtype, before, step, sizes)
    assert gather is not None
    array = jax.random.normal(jax.random.key(1), shape, dtype)
    found = jax.jit(lambda x: gather(constrain(x, mesh, before), mesh))(array)
    assert found.sharding.is_equivalent_to(mesh_sharding(mesh, after), array.ndim)
    wanted = np.array(array)
    parts = [math.prod(sizes[a] for a in axes) for axes in before]
    size = [n // p for n, p in zip(shape, parts, strict=True)]
    for corner in np.ndindex(*parts):
        where = tuple(
            slice(k * n, (k + 1) * n) for k, n in zip(corner, size, strict=True)
        )
        code = CutCode(codec, (1, math.prod(size)), dtype)
        row = code.encode(array[where].reshape(1, -1))
        assert row.shape == (1, gather.code_bytes)
        wanted[where] = code.decode(row).reshape(size)
    np.testing.assert_array_equal(found, wanted)
    fast = GatherCodec(codec, frozenset({1}) - set(step.axes))
    assert coded_gather(fast, shape, dtype, before, step, sizes) is None


def test_chooses_codes_only_for_slow_links() -> None:
    args = jax.eval_shape(lambda: first(chain_weights())), jax.eval_shape(batch)

    def gathers(cluster: str, **options: Any) -> Any:
        hints = asked(chain_weights, **options) | {"cluster": cluster}
        return autopar.plan(trained_by(chained), *args, **hints).stage.gathers

    slow, fast = "2x4:cpu,network=100Mb/s", "2x4:cpu,network=10TB/s"
    found = gathers(slow, gather_codecs="auto")
    assert {(g.codec, g.axes) for g in found} == {("int8", ("hosts",))}
    assert len(found) == LAYERS
    assert not gathers(slow)
    assert not gathers(slow, gather_codecs="auto", error_budget=1e-3)
    assert not gathers(fast, gather_codecs="auto")


def test_plans_say_why_no_gather_is_encoded() -> None:
    plan, _ = plan_of(pins={"state/0*": P(), "batch/*": P(BOTH)})
    assert not any(g.codec for g in plan.stage.gathers)
    assert "no parameter is sharded over slow links" in " ".join(plan.decided)
    args = jax.eval_shape(lambda: first(chain_weights())), jax.eval_shape(batch)
    hints = {"cluster": CLUSTER, "gather_codecs": "auto", "error_budget": 1e-3}
    kept = autopar.plan(trained_by(chained), *args, layouts=plan, **hints)
    assert "no codec is within error_budget" in " ".join(kept.decided)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gather_codecs": "powersgd:rank=2"}, "take a codec of blocks"),
        ({"gather_codecs": "int8:rounding=stochastic"}, "leave rounding="),
        ({"gather_codecs": "int7"}, "int7"),
        ({"gather_codecs": "int8", "stages": 2}, "one stage"),
        ({"gather_codecs": "int8", "error_budget": 0.1}, "leave it out"),
    ],
)
def test_refuses(options: dict[str, Any], why: str) -> None:
    args = jax.eval_shape(lambda: first(chain_weights())), jax.eval_shape(batch)
    hints = asked(chain_weights) | options
    with pytest.raises(PlanError, match=why):
        autopar.plan(trained_by(chained), *args, **hints)


def plan_of(loss: Any = chained, made: Any = chain_weights, **options: Any) -> Any:
    """A plan with int8 gathers, and the step's analysis."""
    args = jax.eval_shape(lambda: first(made())), jax.eval_shape(batch)
    hints = asked(made, gather_codecs="int8") | options
    step = trained_by(loss)
    return autopar.plan(step, *args, **hints), analyse(step, args)


def test_edited_codecs_are_carried_out() -> None:
    plan, analysis = plan_of()

    def edited(codec: str) -> Any:
        known = plan.stage.gathers
        return plan.with_stage(
            gathers=tuple(msgspec.structs.replace(g, codec=codec) for g in known)
        )

    made = carried_out(analysis, Plan.from_json(json.dumps(edited("int4").to_json())))
    assert {g.codec for g in made.stage.gathers} == {"int4"}
    assert "gathers changed by hand" in made.solver.status
    assert made.predicted.communication_bytes < plan.predicted.communication_bytes
    with pytest.raises(PlanError, match="take a codec of blocks"):
        carried_out(analysis, edited("topk"))


def test_copies_within_a_host_are_gathered_exactly() -> None:
    """Codes cross only the slow links; decoded shards are gathered within hosts."""
    inner = ("local", "hosts")
    plan, analysis = plan_of(pins={"state/0*": P(inner), "batch/*": P(BOTH)})
    copies = tuple(
        msgspec.structs.replace(c, axes=(("local",), ()), reuse=c.backward)
        if c.name.startswith("state/0")
        else c
        for c in plan.copies
    )
    made = carried_out(analysis, plan.with_stage(copies=copies))
    args = jax.eval_shape(lambda: first(chain_weights())), jax.eval_shape(batch)
    audit = autopar.audit(trained_by(chained), *args, plan=made, compiled=True)
    assert audit.agrees, str(audit)
    bound = bind_plan(analysis, made, made.cluster.read())
    gathers = [
        c for c in bound.collectives if c.step.kind == "all_gather" and c.step.axes
    ]
    # The first layer's parameter is read once, and has no copy.
    assert {c.step.axes for c in gathers if c.code is not None} == {(0,), (1, 0)}
    within = [c for c in gathers if c.step.axes == (1,)]
    assert within
    assert all(c.code is None for c in within)


def test_what_an_update_reads_is_gathered_exactly() -> None:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(chained)(params, batch)
        drift = jax.tree.map(lambda w: w @ (w.T @ w) - w, params)
        moved = jax.tree.map(lambda w, g, d: w - 0.1 * (g + d), params, grads, drift)
        return moved, value

    args = jax.eval_shape(chain_weights), jax.eval_shape(batch)
    pins = {"params/*": P(BOTH), "batch/*": P(BOTH)}
    hints = asked(chain_weights, gather_codecs="int8", pins=pins)
    plan = autopar.plan(step, *args, **hints)
    reasons = {g.reason for g in plan.stage.gathers}
    assert reasons <= {"", UPDATED}
    read = {g.name for g in plan.stage.gathers if g.reason}
    assert read
    assert "exact (the update reads" in str(plan)
