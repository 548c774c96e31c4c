"""Tests plans, steps and clusters in a notebook: one line of text, and a short cell."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
import small_step
import stage_plans

import autopar
from autopar.plans.records import PipelineData
from autopar.reports.notebook import MOST_PARTS, largest_inputs, picture, two_dims

AXES = {"data": 2, "tensor": 4}


def fills(svg: str, number: int) -> list[str]:
    """The colours of a drawing, row by row; drawing 0 is the mesh."""
    drawing = ElementTree.fromstring(svg)[number]
    paths = [x for x in drawing.iter() if x.tag.endswith("path")]
    return [path.attrib["fill"] for path in paths]


def test_a_plan_in_one_line() -> None:
    plan = small_step.plan("8:cpu")
    expected = (
        r"<Plan 8:cpu, mesh x=8, step \d[\d.]* us, \d[\d.]* k?B on each device, "
        r"(best found, )?proved (optimal|within [\d.]+% of the optimum), no codecs, "
        r"x \(8\) unused>"
    )
    assert re.fullmatch(expected, repr(plan))
    assert repr(plan) == f"{plan!r}" != str(plan)


def test_codecs_are_counted() -> None:
    assert ", codecs int8 x2>" in repr(stage_plans.make_plan())


def test_codecs_of_stage_cuts_are_listed() -> None:
    """Without codecs of gradients the line does not say 'no codecs'."""
    plan = stage_plans.make_plan()
    cuts = PipelineData(
        layers=(0, 1),
        parts=(0, 1),
        activation_codecs=("int8",),
        cotangent_codecs=("int4",),
    )
    stages = tuple(msgspec.structs.replace(s, gradients=()) for s in plan.stages)
    coded = msgspec.structs.replace(plan, stages=stages, pipeline=cuts)
    assert ", cuts activations int8, cotangents int4>" in repr(coded)


def test_a_step_in_one_line() -> None:
    step = autopar.parallelize(small_step.step, cluster="8:cpu")
    assert repr(step) == "<ParallelStep step, no plan yet>"
    step.prepare(*small_step.structs())
    assert repr(step) == f"<ParallelStep step, {step.plan!r}>"
    plan = small_step.plan("8:cpu")
    given = autopar.parallelize(small_step.step, plan=plan)
    assert repr(given) == f"<ParallelStep step, {plan!r}>"


@pytest.mark.parametrize(
    "plan", [small_step.plan("2x4:cpu"), stage_plans.make_plan()], ids=["one", "two"]
)
def test_a_cell_is_short_and_well_formed(plan: autopar.Plan) -> None:
    text = plan._repr_html_()
    root = ElementTree.fromstring(text)
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]

    assert len(text) < 8000
    assert str(plan.cluster) in cells
    assert not re.search(r"(src|href)=", text)
    assert text.count("<svg") == len(plan.stages)
    for stage in plan.stages:
        assert set(largest_inputs(plan, stage).inputs) <= set(cells)


def test_the_largest_inputs_are_few() -> None:
    plan = small_step.plan("8:cpu")
    names = [f"params/{word}" for word in "abcdefghijkl"]
    inputs = dict.fromkeys(names, ((),))
    stage = plan.with_stage(inputs=inputs).stage
    shapes = {name: (k,) for k, name in enumerate(names)}
    many = msgspec.structs.replace(
        plan, shapes=shapes, roles=dict.fromkeys(names, "parameter")
    )
    assert list(largest_inputs(many, stage).inputs) == names[-8:]


def test_parts_have_the_colours_of_their_devices() -> None:
    svg = picture(AXES, [("same", (("data",), ("tensor",))), ("whole", ((), ()))])
    mesh = fills(svg, 0)

    assert len(set(mesh)) == 8
    assert fills(svg, 1) == mesh
    assert fills(svg, 2) == ["#bbb"]


def test_several_axes_split_one_dimension() -> None:
    """Major to minor: the first parts lie along the last axis."""
    svg = picture(AXES, [("x", (("data", "tensor"),)), ("y", (("tensor", "data"),))])
    mesh = fills(svg, 0)

    assert fills(svg, 1) == mesh
    assert fills(svg, 2) == [mesh[i * 4 + j] for j in range(4) for i in range(2)]


def test_large_meshes_have_few_cells() -> None:
    svg = picture({"data": 128, "tensor": 8}, [("x", (("data",), ()))])

    # A device of the mesh is a square; it is drawn 64 devices long at most.
    assert len(fills(svg, 0)) == 64 * 8
    assert "h1.5v1.5h-1.5z" in svg
    assert len(fills(svg, 1)) == MOST_PARTS


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((), ((), ())),
        ((("a",), ()), (("a",), ())),
        (((), ("a",)), ((), ("a",))),
        (((), ("a",), ("b",)), (("a",), ("b",))),
        (((), (), ("a", "b")), ((), ("a", "b"))),
    ],
)
def test_split_dimensions_are_drawn(spec: object, expected: object) -> None:
    assert two_dims(spec) == expected
