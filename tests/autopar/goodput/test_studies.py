"""Tests codecs for which other layouts are better."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from sharing_links import in_one_host

import autopar
from autopar import Cluster
from autopar.goodput import Following, Loop, scale_updates
from autopar.goodput.following import codecs_of
from autopar.goodput.studies import worth_studying
from autopar.goodput.ways import Key, PlannedWay, Ways
from autopar.runtime import changing_batches

CODEC = "int8:rounding=stochastic"
ROWS, WIDTH, HIDDEN = 768, 128, 512
ONE_GBIT = in_one_host(Cluster.parse("4x1:cpu,network=1Gb/s,network_latency=1us"))


def loss_of(weights: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.relu(batch["x"] @ weights["up"])
    return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)


OPTIMIZER = scale_updates(optax.sgd(0.1), "none", base_batch=768)


def step_of(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


BATCH = {"x": struct(ROWS, WIDTH), "y": struct(ROWS, WIDTH)}


def ways_of(
    base: int = ROWS, most: int = 2 * ROWS, codecs: Any = (CODEC,), **options: Any
) -> tuple[Ways, PlannedWay]:
    """Two layers; with `ROWS` rows, all activations are smaller than all gradients."""
    kept: dict[str, Any] = {"pins": {}, "noise_scale": True, "cluster": ONE_GBIT}
    given = kept | options
    step = autopar.parallelize(step_of, axis_names=("data",), seconds=None, **given)
    batch = {name: struct(base, WIDTH) for name in BATCH}
    step.prepare(jax.eval_shape(created), batch)
    ways = Ways(step, base_batch=base, max_batch=most, codecs=codecs_of(codecs, "none"))
    return ways, ways.running(base)


@pytest.fixture(scope="module")
def split() -> tuple[Ways, PlannedWay]:
    return ways_of()


def weights(plan: autopar.Plan) -> set[Any]:
    return {spec for path, spec in plan.inputs.items() if path.startswith("state/w/")}


WHOLE = {((), ())}


def calls(ways: Ways, rows: int) -> Any:
    batch = {name: struct(rows, WIDTH) for name in BATCH}
    return changing_batches.call_of(ways.step, (jax.eval_shape(created), batch), {})


def test_layouts_that_suit_a_codec_are_found(split: tuple[Ways, PlannedWay]) -> None:
    ways, made = split
    assert weights(made.plan) != WHOLE  # activations travel, not gradients
    ways.study(made, layouts=True)
    kept, free = ways.anchors.of(made.curve, "none", CODEC)
    assert weights(kept.plan) == weights(made.plan)
    assert weights(free.plan) == WHOLE
    assert free.plan.predicted.step_s < 0.9 * kept.plan.predicted.step_s
    # A way is judged by the work of its own layouts.
    found = ways.others(made, (), 1)
    for rows in (ROWS, 2 * ROWS):
        assert found[Key(rows, 1, CODEC)].terms == free.terms(rows, 1)


def test_layouts_that_suit_a_larger_batch_are_found() -> None:
    """With few rows all devices do the same, as sums take longer."""
    base, most = 8, 1 << 15
    ways, made = ways_of(
        base=base,
        most=most,
        codecs=(),
        cluster=in_one_host(
            Cluster.parse("4x1:cpu,network=0.2Gb/s,network_latency=1ms")
        ),
    )
    assert weights(made.plan) == WHOLE
    assert made.plan.predicted.communication_s == 0.0
    assert made.curve.lost_part(most) > 0.7
    before = ways.others(made, (), 1)
    ways.study(made, layouts=True, call_of=lambda rows: calls(ways, rows))
    after = ways.others(made, (), 1)
    key = Key(most, 1, "none")
    assert after[key].terms.predicted_s < 0.5 * before[key].terms.predicted_s
    small = Key(2 * base, 1, "none")
    assert after[small].terms == before[small].terms
    assert ways.searches(made) == 0
    # What it was judged by is what it is planned as.
    call = calls(ways, most)
    planned = ways.make(key, call, made)
    assert planned is not None
    expected = pytest.approx(after[key].terms.predicted_s, rel=0.02)
    assert planned.plan.predicted.step_s == expected


def test_what_is_searched_for_pays(split: tuple[Ways, PlannedWay]) -> None:
    ways, made = ways_of()
    spare_s = 1000 * made.plan.seconds.total
    assert made.curve.lost_part(ROWS) > 0.5
    for each_s, layouts in ((0.0, True), (spare_s, False)):
        said = worth_studying(ways, made, 0.0, spare_s=spare_s, each_s=each_s)
        assert (said.studies, said.layouts) == (layouts, layouts)
    # Where sums are all that travels, other layouts have next to nothing to save.
    pins = {"state/*": PartitionSpec(), "batch/*": PartitionSpec("data")}
    ways, made = ways_of(pins=pins)
    assert max(made.curve.lost_part(rows) for rows in (ROWS, 8 * ROWS)) < 0.02


def test_given_layouts_stay(split: tuple[Ways, PlannedWay]) -> None:
    ways, made = ways_of(layouts=split[1].plan)
    said = worth_studying(ways, made, 1.0, spare_s=1e6, each_s=0.0)
    assert (said.studies, said.layouts) == (True, False)


def numbers(rows: int, seed: int = 0) -> Any:
    x = np.random.default_rng(seed).standard_normal((2, rows, WIDTH), np.float32)
    return {"x": x[0], "y": np.tanh(x[0]) + 0.1 * x[1]}


def created() -> Any:
    keys = jax.random.split(jax.random.key(0))
    w = {
        "up": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return {"w": w, "opt": OPTIMIZER.init(w)}


def test_a_run_begins_with_the_layouts_that_suit_its_codec() -> None:
    step = autopar.parallelize(
        step_of, axis_names=("data",), seconds=None, cluster=ONE_GBIT
    )
    rule = Following(
        base_batch=ROWS, max_batch=ROWS, codecs=codecs_of((CODEC,), "none")
    )
    loop = Loop(step, rule)
    state = step.init(created, others=(BATCH,))
    assert weights(step.plan) != WHOLE
    state = loop.begin(state, numbers(ROWS))
    assert loop.way.codecs == CODEC
    assert weights(step.plan) == WHOLE
    alone, single = created(), jax.jit(step_of)
    for seed in range(4):
        state, loss = step(state, numbers(ROWS, seed))
        alone, expected = single(alone, numbers(ROWS, seed))
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
