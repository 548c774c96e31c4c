"""Tests the choice between a ring and gathers of keys and values, and its price."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.sharding import PartitionSpec as P
from shared_keys import force_keys

import autopar
from autopar.layouts.layout import ReshardStep
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.steps.analysis import analyse

DEVICES, WIDTH, HEADS, KV, DIM = 8, 1024, 16, 4, 64


def grouped_step(params: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        q, k, v = (
            (x @ params[n].astype(x.dtype)).reshape(*x.shape[:2], -1, DIM)
            for n in ("q", "k", "v")
        )
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    grads = jax.grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def arguments(tokens: int) -> Any:
    heads = {"q": HEADS, "k": KV, "v": KV}
    params = {
        n: jax.ShapeDtypeStruct((WIDTH, count * DIM), jnp.float32)
        for n, count in heads.items()
    }
    return params, jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.bfloat16)


def planned(tokens: int, cluster: Any = "8:h100") -> autopar.Plan:
    return autopar.plan(
        grouped_step, *arguments(tokens), cluster=cluster, axis_names=("sequence",),
        max_axes=1, stages=1, microbatches=1, remat=0, seconds=2,
        pins={"x": P(None, "sequence")},
    )  # fmt: skip


def bound(plan: autopar.Plan, tokens: int) -> BoundPlan:
    analysis = analyse(grouped_step, arguments(tokens))
    return bind_plan(analysis, plan, autopar.Cluster.parse("8:h100"))


def keys_of(plan: autopar.Plan) -> set[str]:
    return {kernel.keys for kernel in plan.stage.attention}


def exchanged(of: BoundPlan) -> list[Any]:
    """The collectives inside the attention kernels."""
    operators = of.analysis.graph.operators
    return [c for c in of.collectives if operators[c.operator].rule.exchanges]


@pytest.mark.parametrize(
    ("tokens", "keys"), [(16384, "gather"), (131072, "ring")], ids=str
)
def test_the_faster_way_is_chosen(
    tokens: int, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tokens)
    force_keys(monkeypatch, "ring" if keys == "gather" else "gather")
    other = planned(tokens)

    assert keys_of(plan) == {keys}
    assert keys_of(other) != {keys}
    assert plan.predicted.step_s < other.predicted.step_s


def test_gathers_have_the_bytes_of_a_ring_and_one_message_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 16384
    gathered = bound(planned(tokens), tokens)
    force_keys(monkeypatch, "ring")
    ring = bound(planned(tokens), tokens)

    def sent(of: BoundPlan, kind: str) -> float:
        found = (c for c in exchanged(of) if c.step.kind == kind)
        return sum(c.sent_bytes(of.pricer) for c in found)

    one = (DEVICES - 1) / DEVICES * tokens * KV * DIM
    halves = sent(gathered, "collective_permute")
    # Both passes read keys and values in 2 bytes. Their gradients have 4 bytes.
    assert sent(gathered, "all_gather") == pytest.approx(2 * 2 * 2 * one)
    assert sent(gathered, "reduce_scatter") == pytest.approx(2 * 4 * one)
    around = sent(ring, "collective_permute")
    # Where kernels deal their halves, they deal the same ones in a ring.
    assert around == pytest.approx(2 * 2 * 2 * one + 2 * 4 * one + halves)
    messages = [
        c.trips for c in exchanged(gathered) if c.step.kind != "collective_permute"
    ]
    assert messages == [1.0] * 6
    assert max(c.trips for c in exchanged(ring)) == DEVICES - 1
    assert any(c.beside for c in exchanged(ring))
    assert not any(c.beside for c in exchanged(gathered))


def test_the_solver_charges_the_seconds_that_kernels_wait() -> None:
    """Gathers hide behind no work."""
    of = bound(planned(16384), 16384)
    nbytes = 16384 * KV * DIM * 2.0
    gather_s, scatter_s = (
        of.pricer.collective_s(ReshardStep(kind, (0,), 1.0, ()), nbytes * wide)
        for kind, wide in (("all_gather", 1), ("reduce_scatter", 2))
    )
    moved = (c for c in exchanged(of) if c.step.kind != "collective_permute")

    found_s = sum(c.seconds(of.pricer) for c in moved)

    assert found_s == pytest.approx(4 * gather_s + 2 * scatter_s)


def test_a_plan_that_fits_only_with_a_ring_has_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 16384
    most = planned(tokens).predicted.peak_memory_bytes
    force_keys(monkeypatch, "ring")
    least = planned(tokens).predicted.peak_memory_bytes
    monkeypatch.undo()
    assert least < most
    cluster = autopar.Cluster.parse("8:h100")
    device = dataclasses.replace(cluster.device, memory_bytes=int((least + most) / 2))

    plan = planned(tokens, dataclasses.replace(cluster, device=device))

    assert "ring" in keys_of(plan)


def test_an_edit_of_a_plan_chooses_the_other_way() -> None:
    tokens = 16384
    plan = planned(tokens)
    data = msgspec.json.decode(msgspec.json.encode(plan))
    assert "gathered for 2 of 2 attention kernels" in str(plan)
    for kernel in data["stages"][0]["attention"]:
        kernel["keys"] = "ring"
    edited = autopar.Plan.from_json(msgspec.json.encode(data))

    made = autopar.plan(
        grouped_step, *arguments(tokens), cluster="8:h100", layouts=edited
    )

    assert keys_of(made) == {"ring"}
    assert "around a ring for 2 of 2 attention kernels" in str(made)
    assert made.predicted.step_s > plan.predicted.step_s
    for field, value, message in (
        ("keys", "both", "may be 'ring' or 'gather'"),
        ("node", 0, "no attention kernel"),
    ):
        data["stages"][0]["attention"][0][field] = value
        wrong = autopar.Plan.from_json(msgspec.json.encode(data))
        with pytest.raises(autopar.PlanError, match=message):
            autopar.plan(
                grouped_step, *arguments(tokens), cluster="8:h100", layouts=wrong
            )
        data["stages"][0]["attention"][0][field] = {"keys": "ring"}.get(field)
