"""Tests a plan's layouts at another batch size: kept, priced anew, or refused."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import step_forms as forms
from jax.sharding import PartitionSpec as P
from step_forms import FORMS

import autopar
from autopar import Plan, PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis, rebatch_plan
from autopar.steps.analysis import Analysis, analyse

CLUSTER = forms.cheap("2x4:cpu")
PINS = {"batch/*": P("data"), "params/up": P(None, "tensor")}


@functools.cache
def analysed(rows: int) -> Analysis:
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    return analyse(forms.plain_step, (*state, forms.batch_structs(rows)))


@functools.cache
def planned(rows: int = 16, wide: bool = False) -> Plan:
    pins = PINS | ({"batch/*": P(("data", "tensor"))} if wide else {})
    return plan_analysis(analysed(rows), CLUSTER, PlanOptions(pins=pins, seconds=5))


@pytest.mark.parametrize("rows", [24, 32])
def test_layouts_stay_and_costs_do_not(rows: int) -> None:
    before = planned()
    plan = plan_analysis(analysed(rows), CLUSTER, PlanOptions(layouts=before))
    assert plan.inputs == before.inputs
    assert plan.outputs == before.outputs
    assert [n.axes for n in plan.nodes] == [n.axes for n in before.nodes]
    assert plan.copies == before.copies
    assert plan.shapes["batch/x"] == (rows, forms.WIDTH)
    assert plan.fingerprint == analysed(rows).fingerprint != before.fingerprint
    assert plan.structure == before.structure
    assert plan.changed_parts == ()
    assert plan.predicted.step_s > before.predicted.step_s
    assert plan.solver.status == "layouts as they were given"


def test_the_batch_it_was_made_for_costs_what_it_did() -> None:
    there = plan_analysis(analysed(32), CLUSTER, PlanOptions(layouts=planned()))
    back = plan_analysis(analysed(16), CLUSTER, PlanOptions(layouts=there))
    want, got = planned().predicted, back.predicted
    for field in want.__struct_fields__:
        assert math.isclose(getattr(got, field), getattr(want, field), rel_tol=1e-9)
    assert back.stages == planned().stages


def test_costs_are_those_of_a_plan_with_the_same_layouts() -> None:
    """The carried plan is priced as if its layouts were found at its own batch."""
    carried = plan_analysis(analysed(32), CLUSTER, PlanOptions(layouts=planned()))
    again = plan_analysis(analysed(32), CLUSTER, PlanOptions(layouts=carried))
    assert again.predicted == carried.predicted


@pytest.mark.parametrize("rows", [24, 32])
def test_a_carried_plan_trains_as_one_device_does(rows: int) -> None:
    form = FORMS["plain"]
    step = autopar.parallelize(form.step, cluster=CLUSTER, layouts=planned())
    state = form.create(jax.random.key(0))
    losses = form.losses(step, state, forms.batches(3, rows=rows))
    plain = jax.jit(form.step)
    expected = form.losses(
        plain, form.create(jax.random.key(0)), forms.batches(3, rows=rows)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert step.plan.inputs == planned().inputs


@pytest.mark.parametrize(("rows", "wide", "parts"), [(6, True, 8), (9, False, 2)])
def test_a_size_that_does_not_divide_is_named(
    rows: int, wide: bool, parts: int
) -> None:
    message = rf"input 'batch/x' \(was 16x16\): a dimension of {rows} cannot be split "
    with pytest.raises(PlanError, match=message + f"{parts} ways .*data=2"):
        plan_analysis(analysed(rows), CLUSTER, PlanOptions(layouts=planned(16, wide)))


def test_a_plan_is_used_for_another_batch_only_when_asked() -> None:
    step = autopar.parallelize(forms.plain_step, plan=planned())
    state = forms.create_plain(jax.random.key(0))
    with pytest.raises(PlanError, match=r"only the batch differs; .*layouts=plan"):
        step(*state, next(forms.batches(1, rows=32)))


def test_nothing_changes_at_the_same_batch() -> None:
    assert rebatch_plan(analysed(16), planned()) is planned()


def test_edits_are_still_edits() -> None:
    edited = planned().edit({"params/up": P("tensor")})
    carried = rebatch_plan(analysed(32), edited)
    assert carried.changed_parts == ("inputs",)
    plan = plan_analysis(analysed(32), CLUSTER, PlanOptions(layouts=edited))
    assert plan.inputs["params/up"] == (("tensor",), ())
    assert plan.solver.status.startswith("edited: layouts of 1 input")


class TestOtherSteps:
    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """The same step except for one operator."""
        batch = {"x": jax.numpy.cos(batch["x"]), "y": batch["y"]}
        return forms.plain_step(params, opt_state, batch)

    def test_of_another_structure(self) -> None:
        state = jax.eval_shape(forms.create_plain, jax.random.key(0))
        other = analyse(self.step, (*state, forms.batch_structs(32)))
        with pytest.raises(PlanError, match="belongs to another step"):
            plan_analysis(other, CLUSTER, PlanOptions(layouts=planned()))

    def test_of_other_weights(self) -> None:
        """It is another step, not one whose batch does not divide."""

        def thinner(array: Any) -> Any:
            shape = [6 if size == forms.HIDDEN else size for size in array.shape]
            return jax.ShapeDtypeStruct(shape, array.dtype)

        state = jax.eval_shape(forms.create_plain, jax.random.key(0))
        other = jax.tree.map(thinner, state)
        found = analyse(forms.plain_step, (*other, forms.batch_structs(16)))
        with pytest.raises(PlanError, match="belongs to another step"):
            plan_analysis(found, CLUSTER, PlanOptions(layouts=planned()))

    def test_of_which_only_the_fingerprint_is_known(self) -> None:
        """Plans of schema 1 do not say their structure."""
        old = msgspec.structs.replace(planned(), structure="", checks={})
        with pytest.raises(PlanError, match="belongs to another step"):
            plan_analysis(analysed(32), CLUSTER, PlanOptions(layouts=old))
        kept = plan_analysis(analysed(16), CLUSTER, PlanOptions(layouts=old))
        assert kept.inputs == planned().inputs


def test_layouts_that_do_not_fit_the_memory_are_refused() -> None:
    small = forms.with_memory(CLUSTER, 5000)
    with pytest.raises(PlanError, match=r"these layouts need .* GB on each device"):
        plan_analysis(analysed(32), small, PlanOptions(layouts=planned()))


def test_the_cluster_must_have_the_mesh() -> None:
    with pytest.raises(PlanError, match="mesh data=2 tensor=4 does not fit"):
        plan_analysis(
            analysed(16), forms.cheap("3:cpu"), PlanOptions(layouts=planned())
        )


def test_axis_names_are_those_of_the_layouts() -> None:
    with pytest.raises(PlanError, match="has the mesh axes data, tensor; leave"):
        plan_analysis(
            analysed(16), CLUSTER, PlanOptions(layouts=planned(), axis_names=("a", "b"))
        )


def test_max_axes_must_allow_the_layouts() -> None:
    with pytest.raises(PlanError, match=r"max_axes=1: .* data, tensor; leave max_axes"):
        plan_analysis(analysed(16), CLUSTER, PlanOptions(layouts=planned(), max_axes=1))


def test_a_plan_with_a_copy_that_is_not_considered_is_written_down() -> None:
    """What the layouts of another batch cost is a number, in the report as well."""

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            out = jax.numpy.tanh(batch["x"] @ w["a"]) @ w["b"]
            return ((out - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - g, w, grads), value

    def at(rows: int) -> Analysis:
        one = jax.ShapeDtypeStruct((64, 64), np.float32)
        given = jax.ShapeDtypeStruct((rows, 64), np.float32)
        return analyse(step, ({"a": one, "b": one}, {"x": given, "y": given}))

    cluster = autopar.Cluster.parse("8:cpu")
    options = PlanOptions(pins={"batch/*": P("data")}, axis_names=("data",))
    before = plan_analysis(at(32), cluster, options)
    plan = plan_analysis(at(64), cluster, PlanOptions(layouts=before))
    assert math.isfinite(plan.solver.cost)
    assert Plan.from_json(msgspec.json.encode(plan)).digest == plan.digest
