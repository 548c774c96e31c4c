"""Codecs for which other layouts are better."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.goodput import Following, Loop, scaled
from autopar.goodput.following import codecs_of
from autopar.goodput.studies import exchange_part, worth_studying
from autopar.goodput.ways import Made, Ways

CODEC = "int8:rounding=stochastic"
ROWS, WIDTH, HIDDEN = 768, 128, 512
ONE_GBIT = "4x1:cpu,network=1Gb/s,network_latency=1us"


def loss_of(weights: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.relu(batch["x"] @ weights["up"])
    return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)


OPTIMIZER = scaled(optax.sgd(0.1), "none", base_batch=768)


def step_of(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


BATCH = {"x": struct(ROWS, WIDTH), "y": struct(ROWS, WIDTH)}


def ways_of(**options: Any) -> tuple[Ways, Made]:
    """Two layers of which all activations are smaller than all gradients."""
    kept: dict[str, Any] = {"pins": {}, "noise_scale": True, "cluster": ONE_GBIT}
    given = kept | options
    step = autopar.parallelize(step_of, axis_names=("data",), seconds=None, **given)
    step.prepare(jax.eval_shape(created), BATCH)
    ways = Ways(
        step, base_batch=ROWS, max_batch=2 * ROWS, codecs=codecs_of((CODEC,), "none")
    )
    return ways, ways.running(ROWS)


@pytest.fixture(scope="module")
def split() -> tuple[Ways, Made]:
    return ways_of()


def weights(plan: autopar.Plan) -> set[Any]:
    return {spec for path, spec in plan.inputs.items() if path.startswith("state/w/")}


WHOLE = {((), ())}


def test_layouts_that_suit_a_codec_are_found(split: tuple[Ways, Made]) -> None:
    ways, made = split
    assert weights(made.plan) != WHOLE  # activations travel, not gradients
    kept = ways._studied(made, CODEC, layouts=False)
    free = ways._studied(made, CODEC, layouts=True)
    assert kept is not None
    assert free is not None
    assert weights(kept.plan) == weights(made.plan)
    assert weights(free.plan) == WHOLE
    assert free.plan.predicted.step_s < 0.9 * kept.plan.predicted.step_s


def test_a_way_with_other_layouts_is_judged_by_their_own_work(
    split: tuple[Ways, Made],
) -> None:
    ways, made = split
    ways.study(made, layouts=True)
    found = ways.others(made, (), 1)
    free = ways._anchors.get(ways._anchor(made, CODEC))
    assert free is not None
    for rows in (ROWS, 2 * ROWS):
        way = next(w for k, w in found.items() if (k.rows, k.codecs) == (rows, CODEC))
        assert way.terms == free.terms(rows, 1)


def test_what_is_searched_for_pays(split: tuple[Ways, Made]) -> None:
    ways, made = ways_of()
    spare_s = 1000 * made.plan.seconds.total
    assert exchange_part(made) > 0.1
    for each_s, layouts in ((0.0, True), (spare_s, False)):
        said = worth_studying(ways, made, 0.0, spare_s=spare_s, each_s=each_s)
        assert (said.studies, said.layouts) == (layouts, layouts)
    # Where sums are all that travels, other layouts have less to save than a search.
    pins = {"state/*": PartitionSpec(), "batch/*": PartitionSpec("data")}
    ways, made = ways_of(pins=pins)
    assert exchange_part(made) < 0.01


def test_given_layouts_stay(split: tuple[Ways, Made]) -> None:
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
