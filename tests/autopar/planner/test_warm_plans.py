"""Tests that warm plans are as good as cold plans, and respect the options."""

from __future__ import annotations

from typing import Any

import pytest
import step_forms as forms
from jax.sharding import PartitionSpec

from autopar import Cluster, InfeasibleError, PlanError
from autopar.planner import warm
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.warm import can_be_warm, warm_plan
from autopar.plans import Plan
from autopar.steps.analysis import Analysis, analyse

EIGHT = forms.cheap("8:cpu")


@pytest.fixture(scope="module", params=["plain", "linen"])
def analysis(request: Any) -> Analysis:
    import jax

    form = forms.FORMS[request.param]
    state = jax.eval_shape(form.create, jax.random.key(0))
    return analyse(form.step, (*form.arguments(state), forms.batch_structs()))


@pytest.fixture(scope="module")
def running(analysis: Analysis) -> Plan:
    return plan_analysis(analysis, EIGHT)


@pytest.mark.parametrize("text", ["6:cpu", "4:cpu", "2x4:h100", "2x3:v100"])
def test_as_good_as_a_cold_plan(
    analysis: Analysis, running: Plan, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given time; how far it comes in a second is another question."""
    monkeypatch.setattr(warm, "MESH_S", 30.0)
    monkeypatch.setattr(warm, "ALL_S", 60.0)
    cluster = Cluster.parse(text)
    cold = plan_analysis(analysis, cluster)
    found = warm_plan(analysis, cluster, PlanOptions(), running)
    assert found.fingerprint == cold.fingerprint
    assert found.predicted.step_s <= 1.01 * cold.predicted.step_s


def test_options_hold(analysis: Analysis, running: Plan) -> None:
    """Pins, names of axes, microbatches and codecs are those that were asked for."""
    path = next(p for p in running.inputs if p.endswith("batch/x"))
    options = PlanOptions(
        pins={path: PartitionSpec("rows", None)},
        axis_names=("rows", "columns"),
        microbatches=2,
        compression="dense",
    )
    found = warm_plan(analysis, forms.cheap("4:cpu"), options, running)
    assert found.axis_names == ("rows", "columns")
    assert found.inputs[path] == (("rows",), ())
    assert found.microbatches == 2
    assert found.compression.mode == "dense"


def test_what_does_not_fit(analysis: Analysis, running: Plan) -> None:
    small = forms.with_memory(forms.cheap("4:cpu"), 1000)
    with pytest.raises(InfeasibleError):
        warm_plan(analysis, small, PlanOptions(), running)


def test_a_batch_that_cannot_be_split(analysis: Analysis, running: Plan) -> None:
    with pytest.raises(PlanError, match="cannot be split"):
        warm_plan(analysis, forms.cheap("5:cpu"), PlanOptions(), running)


def test_what_only_the_whole_search_knows(running: Plan) -> None:
    assert can_be_warm(EIGHT, PlanOptions(), running)
    assert not can_be_warm(EIGHT, PlanOptions(stages=2), running)
    assert not can_be_warm(EIGHT, PlanOptions(layouts=running), running)
    groups = Cluster.parse("1x4:h100+1x4:a100")
    assert not can_be_warm(groups, PlanOptions(), running)


def test_another_number_of_microbatches_is_another_program() -> None:
    """Its nodes are others than those of the running plan, which gives no start."""
    import following_cases as cases
    import jax

    step = cases.parallel()
    state = jax.eval_shape(cases.create)
    found = analyse(step.__wrapped__, (state, cases.source(0, 32)))
    before = plan_analysis(found, EIGHT, PlanOptions(axis_names=("data",)))
    options = PlanOptions(axis_names=("data",), microbatches=2)
    warm = warm_plan(found, EIGHT, options, before)
    assert warm.microbatches == 2
