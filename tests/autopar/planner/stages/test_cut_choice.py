"""Tests the choice of codecs for stage cuts: budget, speed, and the least error."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import CutCode
from autopar.errors import PlanError
from autopar.planner.stages.cut_choice import (
    COTANGENT_WEIGHT,
    DEFAULT_CUT_BUDGET,
    OFFERED,
)

WIDTH, ROWS = 64, 512
SLOW, FAST = "network=50Mb/s", "network=100Gb/s"


def step(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def planned(network: str, width: int = WIDTH, rows: int = ROWS, **options: Any) -> Any:
    row = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 8
    asked = {
        "cluster": f"{options.get('stages', 2)}x1:cpu,{network}", "stages": 2,
        "microbatches": 4, "axis_names": ("data",), "pins": {"batch/*": P("data")},
        "seconds": 1, **options,
    }  # fmt: skip
    return autopar.plan(step, params, {"x": row, "y": row}, **asked)


def codecs_of(plan: Any) -> tuple[str, ...]:
    return (*plan.pipeline.activation_codecs, *plan.pipeline.cotangent_codecs)


def error_of_pair(activations: str, cotangents: str) -> float:
    errors = [0.0 if c == "dense" else parse_codec(c).error((1, WIDTH))
              for c in (activations, cotangents)]  # fmt: skip
    return math.hypot(errors[0], COTANGENT_WEIGHT * errors[1])


def error_of(plan: Any) -> float:
    data = plan.pipeline
    pairs = zip(data.activation_codecs, data.cotangent_codecs, strict=True)
    return math.hypot(*(error_of_pair(*pair) for pair in pairs))


def test_nothing_is_encoded_over_fast_links() -> None:
    plan = planned(FAST, cut_codecs="auto")
    assert codecs_of(plan) == ()
    assert plan.predicted.step_s == planned(FAST).predicted.step_s
    assert any("cut codecs: none" in text for text in plan.decided)


@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1, None, 1.0])
def test_the_choice_is_the_fastest_within_the_budget(budget: float | None) -> None:
    """All combinations of codecs of one cut are tried."""
    plan = planned(SLOW, cut_codecs="auto", cut_error_budget=budget)
    most = DEFAULT_CUT_BUDGET if budget is None else budget
    assert error_of(plan) <= most
    allowed = [
        pair
        for pair in itertools.product(("dense", *OFFERED), repeat=2)
        if error_of_pair(*pair) <= most and pair != ("dense", "dense")
    ]
    known = [
        planned(SLOW, cut_codecs="/".join(pair)).predicted.step_s for pair in allowed
    ]
    best = min([*known, planned(SLOW).predicted.step_s])
    assert plan.predicted.step_s <= 1.002 * best


def test_with_a_larger_budget_one_cut_sends_an_eighth_of_the_bytes() -> None:
    asked: dict[str, Any] = {"width": 128, "microbatches": 1, "cut_codecs": "auto"}
    assert codecs_of(planned(SLOW, **asked)) == ("int8", "eden:levels=8")
    plan = planned(SLOW, **asked, cut_error_budget=0.08)
    assert codecs_of(plan) == ("eden:levels=32", "eden:levels=6")
    codes = [CutCode(c, (ROWS, 128), "float32") for c in codecs_of(plan)]
    assert 8 * sum(c.nbytes for c in codes) <= sum(c.dense_bytes for c in codes)


def test_several_cuts_share_the_budget() -> None:
    plan = planned(SLOW, stages=4, cut_codecs="auto")
    assert len(codecs_of(plan)) == 6
    assert error_of(plan) <= DEFAULT_CUT_BUDGET
    assert plan.predicted.step_s < planned(SLOW, stages=4).predicted.step_s / 2
    (said,) = [text for text in plan.decided if text.startswith("cut codecs")]
    assert f"error {error_of(plan):.3f}" in said


def test_where_sending_takes_all_time_the_smallest_codes_are_taken() -> None:
    """With one microbatch nothing overlaps, so activations and cotangents count."""
    plan = planned(SLOW, microbatches=1, cut_codecs="auto", cut_error_budget=10.0)
    assert codecs_of(plan) == ("eden:levels=6", "eden:levels=6")


def test_layouts_of_a_plan_are_kept_with_chosen_codecs() -> None:
    exact = planned(SLOW)
    plan = planned(SLOW, layouts=exact, cut_codecs="auto")
    assert codecs_of(plan) == codecs_of(planned(SLOW, cut_codecs="auto"))
    assert [s.inputs for s in plan.stages] == [s.inputs for s in exact.stages]
    assert codecs_of(planned(SLOW, layouts=plan)) == ()


@pytest.mark.parametrize("codecs", ["none", "int8", "auto"])
def test_the_search_of_stages_counts_the_bytes_of_codes(codecs: str) -> None:
    """With codecs, two stages are faster than one over a link that is too slow for
    exact values. Where the link is faster, the pipeline with codecs is not slower.
    """
    asked = {
        "cluster": "2x1:cpu,network=100Mb/s", "stages": "auto", "microbatches": None,
        "width": 256, "rows": 1024, "axis_names": None, "pins": None,
        "cut_codecs": codecs,
    }  # fmt: skip
    plan = planned(SLOW, **asked)
    assert len(plan.stages) == (1 if codecs == "none" else 2)
    assert codecs == "none" or set(codecs_of(plan)) != {"dense"}
    asked["cluster"] = "2x1:cpu,network=400Mb/s"
    faster = planned(SLOW, **asked)
    assert len(faster.stages) == 2
    assert faster.predicted.step_s < plan.predicted.step_s


def test_one_stage_has_nothing_to_choose() -> None:
    plan = planned(FAST, stages=1, cut_codecs="auto", microbatches=1)
    assert plan.pipeline is None


def test_a_plan_of_one_stage_says_that_codecs_are_not_used() -> None:
    plan = planned(FAST, stages="auto", cluster="1:cpu", cut_codecs="int8", pins={})
    assert len(plan.stages) == 1
    assert any("one stage is fastest and has no cuts" in t for t in plan.decided)


def test_a_budget_is_for_auto() -> None:
    with pytest.raises(PlanError, match="bounds what cut_codecs='auto' chooses"):
        planned(SLOW, cut_codecs="int8", cut_error_budget=0.1)
