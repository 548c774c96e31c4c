"""Tests that random plans run the step, and communicate what they predict.

The solver would choose only good plans. These tests choose strategies at random, so
that every sharding of every operator occurs in some case.
"""

from __future__ import annotations

import functools
import random

import planner_cases
import planner_harness as harness
import pytest
from property_tests import meshes_of

NAMES = planner_cases.names()
# What the compiler does equals the prediction to rounding; no case needs more.
BYTES_TOLERANCE = 1e-6


@functools.cache
def prepared(name: str) -> harness.Case:
    return harness.prepare(*planner_cases.workload(name))


@pytest.mark.parametrize("name", NAMES)
def test_predicted_traffic_is_what_the_compiler_does(name: str) -> None:
    for sizes in meshes_of(harness.MESHES, NAMES.index(name)):
        plan = harness.random_plan(prepared(name), sizes, random.Random(name))

        predicted = harness.predicted(plan)
        audited = harness.audited(harness.lowered(prepared(name), plan))

        assert set(predicted) == set(audited)
        for key, nbytes in predicted.items():
            assert audited[key] == pytest.approx(nbytes, rel=BYTES_TOLERANCE), key


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_step_equals_the_plain_step(name: str) -> None:
    """Meshes of several axes find most: the compiler's errors hide on one axis."""
    sizes = harness.MESHES[1 + NAMES.index(name) % 2]
    case = prepared(name)
    plan = harness.random_plan(case, sizes, random.Random(f"{name} run"))
    flat, want = harness.plain(case)

    got = harness.compiled(harness.lowered(case, plan))(*flat)

    # bfloat16 has 8 bits of mantissa, and sums of it are taken in another order.
    harness.check_equal(got, want, 2e-2 if name == "mlp_bfloat16" else 1e-4)


@pytest.mark.parametrize("sizes", harness.MESHES)
def test_a_replicated_plan_communicates_nothing(sizes: tuple[int, ...]) -> None:
    case = prepared("mlp_sgd")
    plan = harness.random_plan(case, sizes, random.Random(0), replicated=True)

    assert harness.predicted(plan) == {}
    assert harness.audited(harness.lowered(case, plan)) == {}


def test_state_leaves_as_it_came() -> None:
    case = prepared("mlp_adamw_clip")
    plan = harness.random_plan(case, (2, 4), random.Random(3))

    carried = [i for i in case.graph.inputs if i.output >= 0]
    assert carried
    for given in carried:
        assert plan.output(given.output) == plan.home_layout(given.value)
