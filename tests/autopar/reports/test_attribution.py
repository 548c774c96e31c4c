"""Tests that the parts of a step add up to the step."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar.cluster import Cluster
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.reports.attribution import (
    AGAIN,
    CODECS,
    COMPUTE,
    HIDDEN,
    OUTSIDE,
    WAYS,
    AttributedTime,
    attribute,
    part_lines,
    step_of,
)
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.steps.analysis import analyse


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(64, name="down")(jnp.tanh(linen.Dense(64, name="up")(x)))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for k in range(2):
            x = x + linen.remat(Block)(name=f"block_{k}")(x)
        return x


def net_workload() -> Any:
    x = jnp.ones((128, 64))
    params = Net().init(jax.random.key(0), x)
    return training(lambda p, b: jnp.mean(Net().apply(p, b) ** 2), params, x)


def bound(workload: Any, cluster: str, compression: str = "none") -> BoundPlan:
    analysis, made_for = analyse(*workload), Cluster.parse(cluster)
    options = PlanOptions(seconds=2.0, compression=compression)
    return bind_plan(analysis, plan_analysis(analysis, made_for, options), made_for)


@functools.cache
def mlp(cluster: str, compression: str = "none") -> BoundPlan:
    params, batch = mlp_params(256, 512), mlp_batch(4096, 256)
    return bound(
        training(mlp_loss, params, batch, optax.adam(0.1)), cluster, compression
    )


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(
    ("cluster", "compression", "expected"),
    [
        ("2x2:cpu", "none", set()),
        ("2x2:h100,network=1Gb/s", "none", {HIDDEN}),
        ("2x2:cpu,network=1Mb/s", "int8", {CODECS}),
    ],
)
def test_parts_add_up_to_the_step(
    by: str, cluster: str, compression: str, expected: set[str]
) -> None:
    found = mlp(cluster, compression)
    parts = attribute(found, by)
    predicted = found.plan.predicted
    assert math.isclose(step_of(parts), predicted.step_s)
    assert expected <= {part.what for part in parts if part.whole}
    hidden = -sum(part.seconds for part in parts if part.what == HIDDEN)
    assert math.isclose(hidden, predicted.hidden_s, abs_tol=1e-15)
    if not compression.startswith("int"):
        moved = sum(p.seconds for p in parts if not p.whole and p.what != COMPUTE)
        assert math.isclose(moved, predicted.communication_s)


def test_repeated_layers_share_a_row_and_rematerialisation_is_told() -> None:
    found = bound(net_workload(), "4:cpu")
    parts = attribute(found, "layer")
    assert math.isclose(step_of(parts), found.plan.predicted.step_s)
    names = {name for part in parts for name in part.names}
    assert {"Net/block_0/up", "Net/block_1/up"} <= names
    blocks = [p for p in parts if p.names == ("Net/block_0/up", "Net/block_1/up")]
    assert {p.phase for p in blocks} == {"forward", "backward"}
    assert AGAIN in {p.what for p in blocks}
    assert "rematted_computation" not in "".join(names)
    assert "Net/block_{0,1}/up" in "\n".join(part_lines(parts, 20))


def test_what_does_not_fit_the_table_is_the_rest() -> None:
    parts = [
        AttributedTime(COMPUTE, (f"layer{c}",), "forward", s)
        for c, s in zip("abcd", (4, 3, 2, 1), strict=True)
    ]
    parts.append(AttributedTime(HIDDEN, (), "", -2.0))
    rows = [line.split() for line in part_lines(parts, 2)]
    assert [row[0] for row in rows] == [
        "what",
        "compute",
        "compute",
        "the",
        "hidden",
        "step",
    ]
    assert rows[3][2:] == ["2", "rows", "3.00", "s", "38", "%"]
    assert rows[4][-3:] == ["s", "-25", "%"]
    assert rows[5] == ["step", "8.00", "s", "100", "%"]


def test_operators_without_a_module_have_a_row() -> None:
    parts = attribute(mlp("2:cpu"), "layer")
    assert {name for part in parts for name in part.names} == {OUTSIDE}
