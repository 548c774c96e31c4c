"""Tests plans of several stages that are written by hand."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pytest
from golden import assert_golden
from stage_plans import make_plan, make_stage

from autopar import Cluster, PlanError
from autopar.plans import SCHEMA, Plan, Seconds
from autopar.reports.html import render_html
from autopar.reports.table import render
from autopar.runtime.placement import abstract_mesh, device_mesh

PLAN = make_plan()


def test_saving_and_loading_loses_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(path).digest == PLAN.digest
    assert Plan.from_json(msgspec.json.encode(PLAN)) == PLAN


def test_the_table_shows_each_stage() -> None:
    assert_golden(render(PLAN), "two_stages.txt")


def test_the_page_shows_each_stage() -> None:
    page = render_html(PLAN, [])
    assert "2 stages, 1f1b of 4 microbatches" in page
    front = page.index("<h2>stage 0, front: devices 0 to 3, mesh data=4</h2>")
    back = page.index("<h2>stage 1, back: devices 4 to 7, mesh data=4</h2>")
    assert front < page.index("<td>batch/front</td>") < back
    assert back < page.index("<td>batch/back</td>")


def test_devices_apart_are_listed_one_by_one() -> None:
    even, odd = make_stage("a", (0, 2)), make_stage("b", (1, 3))
    assert "stage 1, b: devices 1, 3, mesh data=2" in render(make_plan(even, odd))


@pytest.mark.parametrize(
    "name",
    ["stage", "mesh", "inputs", "outputs", "nodes", "copies", "axis_names",
     "axis_sizes"],
)  # fmt: skip
def test_what_works_on_one_stage_does_not_take_the_first(name: str) -> None:
    with pytest.raises(PlanError, match=r"has 2 stages; .*'front', 'back'"):
        getattr(PLAN, name)


def test_a_plan_of_two_stages_is_not_run() -> None:
    for use in (device_mesh, abstract_mesh):
        with pytest.raises(PlanError, match="2 stages"):
            use(PLAN)
    with pytest.raises(PlanError, match="2 stages"):
        PLAN.with_stage(nodes=())


def test_an_edit_goes_to_the_stages_that_have_the_input() -> None:
    path = "batch/back"
    assert path not in PLAN.stages[0].inputs
    edited = PLAN.edit({path: (None, "data")})
    assert edited.stages[0] == PLAN.stages[0]
    assert edited.stages[1].inputs[path] == ((), ("data",))
    assert edited.changed_parts == ("inputs",)
    with pytest.raises(PlanError, match=r"'params/left' matches no input; .*batch"):
        PLAN.edit({"params/left": ()})


def test_one_stage_is_reached_through_the_plan() -> None:
    stage = make_stage("step", (0, 1))
    plan = make_plan(stage)
    assert plan.stage is plan.stages[0] == stage
    assert plan.inputs is plan.stage.inputs
    assert plan.outputs is plan.stage.outputs
    assert plan.nodes is plan.stage.nodes
    assert plan.copies is plan.stage.copies
    assert plan.gradients is plan.stage.gradients
    assert plan.mesh == {"axes": {"data": 2}}
    assert (plan.axis_names, plan.axis_sizes) == (("data",), (2,))
    assert plan.with_stage(name="other").stage.name == "other"
    with pytest.raises(TypeError, match="no field 'layers'"):
        plan.with_stage(layers=())


class TestImpossible:
    """What is wrong in any plan is refused when it is made, changed or read."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"devices": ()}, "no devices"),
            ({"devices": (0, 0)}, "different positions"),
            ({"devices": (-1, 0)}, "different positions"),
            ({"devices": (0, 1)}, r"has 4 devices, and the stage has 2"),
            ({"mesh": {}}, r"its mesh is \{\}; write it like"),
            ({"mesh": {"axes": {}}}, r"the stage has 4"),
            ({"mesh": {"axes": {"data": 0}}}, "write it like"),
            ({"mesh": {"axes": {"data": 4}, "more": {}}}, "write it like"),
        ],
    )
    def test_stages(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            msgspec.structs.replace(PLAN.stages[0], **change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"microbatches": 0}, "microbatches must be 1 or more, not 0"),
            ({"schedule": "zigzag"}, "unknown schedule 'zigzag'; .*none, gpipe, 1f1b"),
            ({"schedule": "none"}, r"'none' does not go with 2 stages"),
            ({"stages": ()}, "at least one stage"),
            ({"stages": (PLAN.stages[0],)}, r"'1f1b' does not go with 1 stages"),
            ({"stages": (PLAN.stages[0],) * 2}, "'front' and 'front' share device 0"),
        ],
    )
    def test_plans(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            msgspec.structs.replace(PLAN, **change)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("stages", 1, "devices"), [], r"no devices.*\$\.stages\[1\]"),
            (("stages", 0, "colour"), 1, r"unknown field `colour`.*\$\.stages\[0\]"),
            (("colour",), 1, "unknown field `colour`"),
            (("stages", 0, "nodes", 0, "axis"), 1,
             r"unknown field `axis`.*\$\.stages\[0\]\.nodes\[0\]"),
            (("stages", 0, "gradients", 0, "codec"), 1, r"gradients\[0\]\.codec"),
            (("schedule",), "zigzag", "unknown schedule"),
            (("stages", 1, "devices"), [4, 5, 6, 8], "has device 8, and 2x4:cpu has"),
            (("cluster", "data", "levels"), [], "cluster.data is no cluster"),
            (("cluster", "data", "colour"), 1, "unknown field"),
        ],
    )  # fmt: skip
    def test_files(self, path: tuple[Any, ...], value: Any, message: str) -> None:
        data = PLAN.to_json()
        text = json.dumps(changed(data, path, value))
        with pytest.raises(PlanError, match=message):
            Plan.from_json(text, "plan.json")


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """JSON data with one value replaced or added."""
    data = json.loads(json.dumps(data))
    *to, last = path
    inner = data
    for key in to:
        inner = inner[key]
    inner[last] = value
    return data


class TestDigest:
    def test_times_do_not_count(self) -> None:
        slow = Seconds(trace=9.0, graph=9.0, solve=9.0, total=27.0)
        solver = msgspec.structs.replace(PLAN.solver, seconds=9.0)
        assert make_plan(seconds=slow, solver=solver).digest == PLAN.digest
        assert len(PLAN.digest) == 16

    def test_everything_else_does(self) -> None:
        stages = (PLAN.stages[0], make_stage("back", (4, 5, 7, 6)))
        others = [
            make_plan(*stages),
            make_plan(microbatches=8),
            make_plan(schedule="gpipe"),
            make_plan(structure=""),
            make_plan(options={"layers": "2"}),
        ]
        assert len({PLAN.digest, *(plan.digest for plan in others)}) == 6


class TestEdited:
    """A plan knows which of its parts were changed since it was made."""

    @pytest.mark.parametrize(
        ("path", "value", "part"),
        [
            (("stages", 1, "inputs", "batch/back"), [[], ["data"]], "inputs"),
            (("stages", 0, "nodes", 0, "axes"), [[], []], "nodes"),
            (("stages", 0, "gradients", 0, "codec"), "int4", "gradients"),
            (("predicted", "step_s"), 1.0, "predicted"),
            (("cluster", "text"), "8:cpu", "cluster"),
            (("fingerprint",), "", "fingerprint"),
            (("shapes", "batch/back"), [1, 1], "shapes"),
        ],
    )
    def test_parts(self, path: tuple[Any, ...], value: Any, part: str) -> None:
        assert Plan.from_json(json.dumps(PLAN.to_json())).changed_parts == ()
        text = json.dumps(changed(PLAN.to_json(), path, value))
        plan = Plan.from_json(text)
        assert plan.changed_parts == (part,)
        assert plan.with_checks().changed_parts == ()

    def test_what_says_how_it_was_made_is_no_edit(self) -> None:
        solver = msgspec.structs.replace(PLAN.solver, status="by hand")
        plan = msgspec.structs.replace(PLAN, target="train.py:step", solver=solver)
        assert plan.changed_parts == ()

    def test_without_sums_nothing_is_known(self) -> None:
        assert (
            msgspec.structs.replace(PLAN, checks={}, fingerprint="").changed_parts == ()
        )


def schema_1(cluster: str = "8:cpu") -> dict[str, Any]:
    """The same plan of one stage in schema 1."""
    data = make_plan(make_stage("step", tuple(range(8))), microbatches=1).to_json()
    (stage,) = data.pop("stages")
    for new in ("structure", "microbatches", "schedule", "checks"):
        del data[new]
    for new in (
        "name", "devices", "gathers", "attention", "rematerialisation",
        "sums_each_microbatch",
    ):  # fmt: skip
        del stage[new]
    return data | stage | {"schema": 1, "cluster": cluster}


class TestSchema1:
    def test_it_is_one_stage(self) -> None:
        plan = Plan.from_json(json.dumps(schema_1()))
        assert plan.schema == SCHEMA
        assert plan.stage == make_stage("step", tuple(range(8)))
        assert plan.cluster.read() == Cluster.parse("8:cpu")
        assert (plan.structure, plan.microbatches, plan.schedule) == ("", 1, "none")
        assert plan.fingerprint == PLAN.fingerprint
        assert Plan.from_json(msgspec.json.encode(plan)) == plan

    def test_a_custom_cluster_is_not_known(self) -> None:
        text = json.dumps(schema_1("2x4:mine (custom 01234567)"))
        with pytest.raises(
            PlanError, match=r"old.json: has schema 1.*'2x4:mine.*again"
        ):
            Plan.from_json(text, "old.json")

    @pytest.mark.parametrize("field", ["mesh", "nodes", "predicted", "cluster"])
    def test_fields_must_be_there(self, field: str) -> None:
        data = schema_1()
        del data[field]
        with pytest.raises(PlanError, match="not a plan"):
            Plan.from_json(json.dumps(data))

    def test_unknown_fields_are_refused(self) -> None:
        with pytest.raises(PlanError, match="unknown field `colour`"):
            Plan.from_json(json.dumps(schema_1() | {"colour": 1}))
