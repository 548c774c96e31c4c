"""Tests that each edited part of a plan is carried out, or refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
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
from autopar.planner.edited import carried_out
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.steps.analysis import Analysis, analyse

CLUSTER = forms.cheap("2x4:cpu")
Change = Callable[[dict[str, Any]], object]


@functools.cache
def analysed() -> Analysis:
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    return analyse(forms.plain_step, (*state, forms.batch_structs(16)))


# The gradients of this step are too small for a codec.
pytestmark = pytest.mark.filterwarnings("ignore:.*used for no gradient:UserWarning")


@functools.cache
def planned(compression: str = "none") -> Plan:
    pins = {"batch/*": P("data"), "params/*": P(), "opt_state/*": P()}
    return plan_analysis(
        analysed(), CLUSTER, PlanOptions(pins=pins, seconds=5, compression=compression)
    )


def changed(plan: Plan, change: Change) -> Plan:
    """The plan, read from its file after an edit by hand."""
    data = json.loads(msgspec.json.encode(plan))
    change(data)
    return Plan.from_json(json.dumps(data), "edited.json")


def stage_of(data: dict[str, Any]) -> dict[str, Any]:
    return data["stages"][0]


def carried(plan: Plan) -> Plan:
    return carried_out(analysed(), plan, seconds=5)


def test_a_plan_that_was_not_edited_is_left_alone() -> None:
    assert carried(planned()) is planned()


class TestInputs:
    def edited(self, **layouts: Any) -> Plan:
        def change(data: dict[str, Any]) -> None:
            inputs = stage_of(data)["inputs"]
            assert layouts.keys() <= inputs.keys()
            inputs.update(layouts)

        return changed(planned(), change)

    def test_the_rest_follows(self) -> None:
        plan = self.edited(**{"params/up": [[], ["tensor"]]})
        assert plan.changed_parts == ("inputs",)
        found = carried(plan)
        assert found.inputs == plan.inputs
        assert found.outputs != plan.outputs
        assert any("tensor" in axes for axes in found.outputs.values() for axes in axes)
        restore(analysed(), found)
        assert found.changed_parts == ()
        assert found.solver.status.startswith(
            "edited: layouts of 1 input changed by hand; "
        )

    def test_costs_are_those_of_a_plan_with_these_pins(self) -> None:
        found = carried(self.edited(**{"params/up": [[], ["tensor"]]}))
        pins = {path: P(*(axes or None for axes in spec))
                for path, spec in found.inputs.items()}  # fmt: skip
        pinned = plan_analysis(analysed(), CLUSTER, PlanOptions(pins=pins, seconds=5))
        assert math.isclose(found.predicted.step_s, pinned.predicted.step_s)
        assert found.predicted.step_s != planned().predicted.step_s

    def test_the_same_through_the_plan_itself(self) -> None:
        by_hand = self.edited(**{"params/up": [["data"], ["tensor"]]})
        assert planned().edit({"params/up": P("data", "tensor")}) == by_hand

    def test_it_trains_as_one_device_does(self) -> None:
        form = FORMS["plain"]
        plan = planned().edit({"*/up": P(None, "tensor"), "*/down": P("tensor")})
        step = autopar.parallelize(form.step, plan=plan)
        state = form.create(jax.random.key(0))
        batches = list(forms.batches(3, rows=16))
        losses = form.losses(step, state, batches)
        want = form.losses(jax.jit(form.step), form.create(jax.random.key(0)), batches)
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        assert step.plan.inputs["params/up"] == ((), ("tensor",))
        assert step.plan.solver.status.startswith("edited: layouts of 6 inputs")

    def test_layouts_of_an_edited_plan_are_kept(self) -> None:
        edited = planned().edit({"params/up": P("tensor")})
        made = plan_analysis(
            analysed(), CLUSTER, PlanOptions(layouts=edited, compression="int8")
        )
        assert made.inputs == edited.inputs
        assert made.solver.status.startswith("edited: layouts of 1 input")
        assert made.compression.mode == "int8"

    def test_an_audit_agrees_with_what_is_stated_anew(self) -> None:
        state = jax.eval_shape(forms.create_plain, jax.random.key(0))
        args = (*state, forms.batch_structs(16))
        plan = planned().edit({"params/up": P("tensor")})
        assert autopar.audit(forms.plain_step, *args, plan=plan).agrees

    def test_other_inputs_move_where_nothing_fits_otherwise(self) -> None:
        """The edited input stays; some of the others, which were whole, are split."""
        need = carried(planned().edit({"batch/x": P()})).predicted.peak_memory_bytes
        device = forms.with_memory(CLUSTER, round(0.9 * need))
        found = carried_out(
            analysed(), planned().edit({"batch/x": P()}), device, seconds=5
        )
        assert found.inputs["batch/x"] == ((), ())
        assert "1 input changed by hand, others move to fit" in found.solver.status
        assert found.predicted.peak_memory_bytes <= 0.9 * need
        assert found.inputs != planned().edit({"batch/x": P()}).inputs

    @pytest.mark.parametrize(
        ("path", "spec", "message"),
        [
            ("params/up", [["model"], []], r"'params/up': no mesh axis 'model'"),
            ("params/up", [["data"], ["data"]], "uses a mesh axis twice"),
            ("params/up", [["data"]], r"P\('data'\) has 1 entries, and its shape"),
            ("batch/x", [["data", "tensor"], ["data"]], "twice"),
            ("opt_state/0/count", [["data"]], "has 1 entries, and its shape"),
        ],
    )
    def test_what_does_not_fit(self, path: str, spec: Any, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            carried(self.edited(**{path: spec}))

    def test_an_input_that_is_not_there(self) -> None:
        def change(data: dict[str, Any]) -> None:
            stage_of(data)["inputs"]["params/left"] = []

        with pytest.raises(PlanError, match="inputs are not those of the step"):
            carried(changed(planned(), change))

    def test_the_nodes_cannot_be_edited_too(self) -> None:
        plan = planned().edit({"params/up": P("tensor")}).with_stage(nodes=())
        with pytest.raises(PlanError, match="inputs and nodes were both edited"):
            carried(plan)


def layers_step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = jax.numpy.tanh(y @ w)
        return jax.numpy.mean(y**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


@functools.cache
def layers() -> tuple[Analysis, Plan]:
    w = jax.ShapeDtypeStruct((32, 32), np.float32)
    x = jax.ShapeDtypeStruct((16, 32), np.float32)
    analysis = analyse(layers_step, ([w] * 4, x))
    pins = {"x": P("data"), "params/*": P()}
    return analysis, plan_analysis(analysis, CLUSTER, PlanOptions(pins=pins, seconds=5))


class TestRepeatedLayers:
    """Layers that repeat share a decision."""

    def shared(self) -> list[str]:
        """The paths of the inputs that share a decision with ``params/1``."""
        analysis, _ = layers()
        homes = analysis.contraction.homes
        nodes = {i.path: homes[i.value].node for i in analysis.graph.inputs}
        return [path for path in nodes if nodes[path] == nodes["params/1"]]

    def test_what_shares_a_decision_follows(self) -> None:
        analysis, plan = layers()
        assert len(self.shared()) > 1
        found = carried_out(analysis, plan.edit({"params/1": P("tensor")}))
        assert {found.inputs[path] for path in self.shared()} == {(("tensor",), ())}
        follow = f", {len(self.shared()) - 1} that share a decision follow"
        assert follow in found.solver.status

    def test_two_that_share_one_cannot_differ(self) -> None:
        analysis, plan = layers()
        one, other = self.shared()[:2]
        edited = plan.edit({one: P("tensor"), other: P("data")})
        said = rf"'{one}' as P\('tensor'\) and '{other}' as P\('data'\)"
        with pytest.raises(PlanError, match=said):
            carried_out(analysis, edited)


class TestNodes:
    def with_axes(self, number: int, axes: Any) -> Plan:
        def change(data: dict[str, Any]) -> None:
            node = stage_of(data)["nodes"][number]
            node["axes"] = axes + [[]] * (len(node["factors"]) - len(axes))

        return changed(planned(), change)

    def node_of(self, path: str) -> int:
        given = next(i for i in analysed().graph.inputs if i.path == path)
        return analysed().contraction.homes[given.value].node

    def test_one_that_contradicts_an_input_is_named_with_it(self) -> None:
        number = self.node_of("params/up")
        name = planned().nodes[number].name
        plan = self.with_axes(number, [["tensor"]])
        with pytest.raises(PlanError) as error:
            carried(plan)
        assert "input 'params/up' is P()" in str(error.value)
        assert f"node '{name}' says P('tensor')" in str(error.value)

    def test_one_that_does_not_is_priced_anew(self) -> None:
        number = next(
            k for k, n in enumerate(planned().nodes)
            if n.kind == "contraction" and n.axes[0] == ("data",)
        )  # fmt: skip
        plan = self.with_axes(number, [[]])
        found = carried(plan)
        assert found.nodes == plan.nodes
        assert found.inputs == plan.inputs
        assert found.predicted.step_s > planned().predicted.step_s
        assert found.solver.status == (
            "edited: nodes changed by hand; layouts as they were given"
        )

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ([["model"]], "mesh axis 'model' is not one of"),
            ([["data"], ["data"]], "uses a mesh axis twice"),
        ],
    )
    def test_what_does_not_fit(self, axes: Any, message: str) -> None:
        number = next(
            k for k, n in enumerate(planned().nodes) if n.kind == "contraction"
        )
        with pytest.raises(PlanError, match=message):
            carried(self.with_axes(number, axes))


class TestCopies:
    def change(self, **fields: Any) -> Plan:
        def change(data: dict[str, Any]) -> None:
            copy = next(c for c in stage_of(data)["copies"] if not c["backward"])
            copy.update(fields)

        return changed(planned(), change)

    def test_a_layout_is_priced_anew(self) -> None:
        copy = next(c for c in planned().copies if not c.backward)
        axes = [[], ["tensor"]] if copy.axes != ((), ("tensor",)) else [[], []]
        plan = self.change(axes=axes)
        found = carried(plan)
        assert found.copies == plan.copies
        assert found.solver.status.startswith("edited: copies changed by hand")

    def test_one_that_nothing_reads(self) -> None:
        with pytest.raises(PlanError, match="nothing reads the copy"):
            carried(self.change(producer=9999))

    def test_a_layout_that_does_not_divide(self) -> None:
        with pytest.raises(PlanError, match="that the planner does not consider"):
            carried(self.change(axes=[["tensor", "data"], ["tensor"]][:1] + [[]] * 3))


class TestGradients:
    def change(self, **fields: Any) -> Plan:
        def change(data: dict[str, Any]) -> None:
            gradients = stage_of(data)["gradients"]
            next(g for g in gradients if g["name"] == "params/up").update(fields)

        return changed(planned("int8"), change)

    def codecs(self, plan: Plan) -> dict[str, str]:
        return {g.name: g.codec for g in plan.gradients}

    def test_a_codec_is_priced_anew(self) -> None:
        before = planned("int8")
        assert set(self.codecs(before).values()) == {"dense"}  # they are small
        found = carried(self.change(codec="int4"))
        assert self.codecs(found) == self.codecs(before) | {"params/up": "int4"}
        sent = {g.name: g.wire_bytes for g in found.gradients}
        was = {g.name: g.wire_bytes for g in before.gradients}
        assert sent["params/up"] < was["params/up"]
        assert sent["params/down"] == was["params/down"]
        assert found.predicted != before.predicted
        assert found.compression.mode == "edited"
        assert found.compression.error > before.compression.error
        assert found.changed_parts == ()

    def test_back_to_what_it_was_costs_what_it_did(self) -> None:
        there = carried(self.change(codec="int4"))

        def back(data: dict[str, Any]) -> None:
            gradients = stage_of(data)["gradients"]
            next(g for g in gradients if g["name"] == "params/up")["codec"] = "dense"

        found = carried(changed(there, back))
        assert found.predicted == planned("int8").predicted
        assert self.codecs(found) == self.codecs(planned("int8"))

    @pytest.mark.parametrize(
        "fields", [{"feedback": True}, {"average_every": 7}, {"bucket": 3}]
    )
    def test_how_it_is_sent_is_kept(self, fields: dict[str, Any]) -> None:
        found = carried(self.change(**fields))
        gradient = next(g for g in found.gradients if g.name == "params/up")
        for name, value in fields.items():
            assert getattr(gradient, name) == value

    def test_its_numbers_are_stated_anew(self) -> None:
        found = carried(self.change(wire_bytes=1.0, error=0.0, saved_s=9.0))
        assert found.gradients == planned("int8").gradients

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"codec": "gzip"}, r"gradients: 'params/up': unknown codec"),
            ({"codec": "int8:blocks=1"}, r"gradients: 'params/up': .*'blocks'"),
            ({"name": "params/left"}, r"only in one of them: params/left, params/up"),
            ({"shape": [1, 2]}, r"'params/up' is value .* of shape \(16, 48\)"),
            ({"value": 0}, "the edited plan says 0"),
        ],
    )
    def test_what_does_not_fit(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            carried(self.change(**fields))

    def test_codecs_stay_where_inputs_are_edited(self) -> None:
        coded = carried(self.change(codec="int4"))
        found = carried(coded.edit({"params/bias": P("tensor")}))
        assert self.codecs(found) == self.codecs(coded)
        assert found.compression.reason == "codecs as they were given"
        assert found.changed_parts == ()


class TestNumbers:
    def test_predictions_are_stated_anew(self) -> None:
        def change(data: dict[str, Any]) -> None:
            data["predicted"]["step_s"] = 1.0
            data["predicted"]["peak_memory_bytes"] = 1.0

        plan = changed(planned(), change)
        assert plan.changed_parts == ("predicted",)
        found = carried(plan)
        assert found.stages == planned().stages
        for name in found.predicted.__struct_fields__:
            got, want = (
                getattr(found.predicted, name),
                getattr(planned().predicted, name),
            )
            assert math.isclose(got, want, rel_tol=1e-9)

    def test_another_cluster_has_other_costs(self) -> None:
        def change(data: dict[str, Any]) -> None:
            for level in data["cluster"]["data"]["level"]:
                level["latency_s"] = 1.0
            data["cluster"]["text"] = text

        text = slow_text()
        found = carried(changed(planned(), change))
        assert found.predicted.communication_s > planned().predicted.communication_s
        assert found.nodes == planned().nodes

    def test_the_text_of_a_cluster_alone(self) -> None:
        def change(data: dict[str, Any]) -> None:
            data["cluster"]["text"] = "2x4:h100"

        with pytest.raises(PlanError, match=r"cluster.text is '2x4:h100'.*data counts"):
            carried(changed(planned(), change))


def slow_text() -> str:
    """The text of the cluster with links whose latency is a second."""
    levels = tuple(
        dataclasses.replace(level, link=dataclasses.replace(level.link, latency_s=1.0))
        for level in CLUSTER.levels
    )
    return str(dataclasses.replace(CLUSTER, levels=levels))


def _set(*path: Any, value: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        *to, last = path
        inner: Any = data
        for key in to:
            inner = inner[key]
        inner[last] = value

    return change


class TestMesh:
    def test_axes_get_other_names(self) -> None:
        def rename(data: dict[str, Any]) -> None:
            text = json.dumps(data["stages"]).replace('"tensor"', '"model"')
            data["stages"] = json.loads(text)

        found = carried(changed(planned("int8"), rename))
        assert found.axis_names == ("data", "model")
        assert found.predicted == planned("int8").predicted

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ({"data": 2, "model": 4}, "mesh axis 'tensor' is not one of data, model"),
            ({"data": 4, "tensor": 2}, "does not fit the cluster"),
        ],
    )
    def test_what_does_not_fit(self, axes: dict[str, int], message: str) -> None:
        change = _set("stages", 0, "mesh", value={"axes": axes})
        with pytest.raises(PlanError, match=message):
            carried(changed(planned(), change))


REFUSED = {
    "outputs": _set("stages", 0, "outputs", "[0]/up", value=[["data"], []]),
    "devices": _set("stages", 0, "devices", value=[7, 6, 5, 4, 3, 2, 1, 0]),
    "name": _set("stages", 0, "name", value="first"),
    "rematerialisation": _set("stages", 0, "rematerialisation", value=["tanh"]),
    "microbatches": _set("microbatches", value=2),
    "compression": _set("compression", "mode", value="int8"),
    "roles": _set("roles", "batch/x", value="parameter"),
    "shapes": _set("shapes", "batch/x", value=[32, 16]),
    "structure": _set("structure", value="0" * 16),
    "fingerprint": _set("fingerprint", value="0" * 16),
    "unsupported_ops": _set("unsupported_ops", value=["fft"]),
    "assumed": _set("assumed", value=["while: 3"]),
}


@pytest.mark.parametrize("part", REFUSED)
def test_what_cannot_be_edited_is_named(part: str) -> None:
    with pytest.raises(PlanError, match=f"the plan's {part} was edited"):
        carried(changed(planned(), REFUSED[part]))


def test_a_plan_without_sums_cannot_contradict_itself() -> None:
    """Nothing tells which part of it was edited."""
    plan = planned().edit({"params/up": P("tensor")})
    plan = msgspec.structs.replace(plan, checks={})
    with pytest.raises(PlanError, match=r"input 'params/up' is P\('tensor'\), node"):
        restore(analysed(), carried(plan))


def test_an_edited_plan_of_another_step_is_refused() -> None:
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    other = analyse(forms.plain_step, (*state, forms.batch_structs(32)))
    plan = planned().edit({"params/up": P("tensor")})
    with pytest.raises(PlanError, match="only the batch differs"):
        carried_out(other, plan)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"nothing": P()}, r"'nothing' matches no input; .*params/bias"),
        ({"params/up": P("model")}, "'params/up': no mesh axis 'model'"),
        ({"params/bias": P(None, "data")}, "more entries than shape"),
        ({"params/up": P("data", "data")}, "twice"),
    ],
)
def test_edits_by_name_are_checked(layouts: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned().edit(layouts)
