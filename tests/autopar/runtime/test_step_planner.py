"""Tests that planning a step needs only shapes and a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
import small_step
import step_forms as forms
from jax.sharding import PartitionSpec

from autopar import Cluster
from autopar.planner.options import PlanOptions
from autopar.runtime.agreement import content_digest
from autopar.runtime.step_planner import Analysed, StepPlanner
from autopar.steps.spares import Spares
from autopar_passes.program.trace import open_arguments

FOUR = Cluster.parse("4:cpu")


def planner(**options: Any) -> StepPlanner:
    return StepPlanner(small_step.step, PlanOptions(**options), capacity=2)


def analysed(found: StepPlanner, args: tuple[Any, ...]) -> Analysed:
    return found.analyse_structs(open_arguments(found.step, args))


def test_no_device_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("devices", "local_devices", "process_count", "process_index"):
        monkeypatch.setattr(jax, name, None)
    found = planner()
    plan = found.plan(
        analysed(found, small_step.structs()), Cluster.parse("64x8:h100,memory=1GB")
    )
    assert "64x8" in str(plan.cluster)


def test_the_plan_is_that_of_autopar_plan() -> None:
    found = planner()
    plan = found.plan(analysed(found, small_step.structs()), FOUR)
    assert content_digest(plan) == content_digest(small_step.plan("4:cpu"))


def test_an_analysis_is_made_once_for_a_signature() -> None:
    found = planner()
    first = analysed(found, small_step.structs())
    assert analysed(found, small_step.structs()) is first
    assert first.analysis.pytrees.program is not None
    other = analysed(found, small_step.structs(rows=48))
    assert other.key != first.key
    assert analysed(found, small_step.structs()) is first


def test_analyses_are_bounded() -> None:
    found = planner()
    first = analysed(found, small_step.structs())
    for rows in (32, 40):
        analysed(found, small_step.structs(rows))
    again = analysed(found, small_step.structs())
    assert again is not first
    assert again.key == first.key


def test_options_hold() -> None:
    found = planner(pins={"w": PartitionSpec("x")}, axis_names=("x",), max_axes=1)
    plan = found.plan(analysed(found, small_step.structs()), FOUR)
    assert plan.inputs["w"] == (("x",), ())


def test_logical_axes_become_pins() -> None:
    """A pin that was given wins over a rule."""
    rules = (("embed", None), ("mlp", "x"))
    state = jax.eval_shape(
        lambda k: forms.create_linen(k, logical=True), jax.random.key(0)
    )
    options = PlanOptions(logical_axis_rules=rules)
    found = StepPlanner(forms.linen_step, options)
    hints = analysed(found, (state, forms.batch_structs())).hints
    path = "state/params/Dense_0/kernel/value"
    assert hints.pins is not None
    assert hints.pins[path] == PartitionSpec(None, "x")
    assert hints.logical_axis_rules is None

    own = dataclasses.replace(options, pins={path: PartitionSpec()})
    found = StepPlanner(forms.linen_step, own)
    assert analysed(found, (state, forms.batch_structs())).hints.pins == {
        **hints.pins,
        path: PartitionSpec(),
    }


def test_other_codecs_for_one_plan() -> None:
    found = planner()
    step = analysed(found, small_step.structs())
    with pytest.warns(UserWarning, match="'int8' is used for no gradient"):
        plan = found.plan(step, FOUR, PlanOptions(compression="int8"))
    assert plan.compression.mode == "int8"
    assert found.plan(step, FOUR).compression.mode == "none"


def test_spare_copies_are_planned_for_from_now_on() -> None:
    """Analyses without them are dropped, and kept where nothing changes."""
    found, spares = planner(), Spares(always=1, split=2)
    first = analysed(found, small_step.structs())
    found.hold(found.options.spares)
    assert analysed(found, small_step.structs()) is first

    found.hold(spares)
    assert found.options.spares == spares
    again = analysed(found, small_step.structs())
    assert again is not first
    assert again.analysis.spares == spares
    found.hold(spares)
    assert analysed(found, small_step.structs()) is again
