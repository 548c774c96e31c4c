"""Tests edited plans of several stages: they are carried out, or refused by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Plan, PlanError
from autopar.planner.edited import carried_out
from autopar.steps.analysis import Analysis, analyse

WIDTH, ROWS = 64, 64
Change = Callable[[dict[str, Any]], object]


def layers(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.numpy.tanh(x @ w)
    return x


def loop(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (x + jax.numpy.tanh(x @ w), None), x, params)[0]


def step_of(model: Any) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jax.numpy.mean((model(params, batch["x"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(model: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    stacked = 0.1 * random.standard_normal((4, WIDTH, WIDTH)).astype(np.float32)
    x, y = random.standard_normal((2, ROWS, WIDTH)).astype(np.float32)
    return stacked if model is loop else list(stacked), {"x": x, "y": y}


@functools.cache
def planned(model: Any = layers, compression: str = "none") -> tuple[Analysis, Plan]:
    step, args = step_of(model), arguments(model)
    plan = autopar.plan(
        step, *args, cluster="4:cpu", stages=2, microbatches=4, schedule="1f1b",
        pins={"batch/*": P("data"), "received/*": P("data"), "params*": P()},
        axis_names=("data",), compression=compression, seconds=5,
    )  # fmt: skip
    return analyse(step, args), plan


def changed(plan: Plan, change: Change) -> Plan:
    """The plan, read from its file after an edit by hand."""
    data = json.loads(msgspec.json.encode(plan))
    change(data)
    return Plan.from_json(json.dumps(data), "edited.json")


def carried(change: Change, compression: str = "none") -> Plan:
    analysis, plan = planned(layers, compression)
    return carried_out(analysis, changed(plan, change), seconds=5)


def check_trains(model: Any, plan: Plan) -> None:
    """Compares two steps with those of one device."""
    step, (state, batch) = step_of(model), arguments(model)
    run, plain = autopar.parallelize(step, plan=plan, donate=False), jax.jit(step)
    other = state
    for _ in range(2):
        (state, loss), (other, expected) = run(state, batch), plain(other, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state,
        other,
    )


def test_layouts_of_inputs_are_planned_for_in_their_stage() -> None:
    analysis, plan = planned()
    edited = plan.edit({"params/0": P("data"), "params/1": P("data")})
    found = carried_out(analysis, edited, seconds=5)
    assert found.solver.status == (
        "edited: stage 0: layouts of 2 inputs changed by hand; "
        "layouts as they were given"
    )
    assert found.stages[0].inputs == edited.stages[0].inputs
    assert found.stages[1] == plan.stages[1]
    assert found.predicted.step_s > plan.predicted.step_s
    assert found.changed_parts == ()
    check_trains(layers, edited)


def test_layouts_are_kept_after_edits() -> None:
    _, plan = planned()
    step, args = step_of(layers), arguments(layers)
    edited = plan.edit({"params/3": P("data")})
    kept = autopar.plan(step, *args, cluster="4:cpu", layouts=edited)
    assert kept.stages[1].inputs["params/3"] == (("data",), ())
    assert kept.solver.status.startswith("edited: stage 1: layouts of 1 input")


def test_pieces_of_one_array_are_edited_alike() -> None:
    analysis, plan = planned(loop)
    edited = plan.edit({"params": P(None, "data")})
    found = carried_out(analysis, edited, seconds=5)
    for stage, pieces in zip(found.stages, ("0:2", "2:4"), strict=True):
        assert stage.inputs[f"params@{pieces}"] == ((), ("data",), ())
    check_trains(loop, edited)
    with pytest.raises(PlanError, match="pieces of one array, and have different"):
        carried_out(analysis, plan.edit({"params@2:4": P(None, "data")}))


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_the_schedule_is_that_of_a_plan_made_with_it(schedule: str) -> None:
    found = carried(lambda data: data.update(schedule=schedule))
    _, plan = planned()
    other = autopar.plan(
        step_of(layers), *arguments(layers), cluster="4:cpu", stages=2,
        microbatches=4, schedule=schedule, axis_names=("data",), seconds=5,
        pins={"batch/*": P("data"), "received/*": P("data"), "params*": P()},
    )  # fmt: skip
    assert found.stages == plan.stages
    assert found.predicted == other.predicted
    assert found.pipeline == other.pipeline
    check_trains(layers, found)


def test_layers_are_computed_again_where_the_file_says_so() -> None:
    _, plan = planned()
    assert plan.pipeline is not None
    found = carried(lambda data: data["pipeline"].update(recomputed=[0, 1]))
    assert found.pipeline is not None
    assert found.pipeline.recomputed == (0, 1)
    assert found.pipeline.backward_s[0] > plan.pipeline.backward_s[0]
    assert found.pipeline.memory_bytes[0] < plan.pipeline.memory_bytes[0]
    assert found.pipeline.memory_bytes[1] == plan.pipeline.memory_bytes[1]
    check_trains(layers, found)


def test_axes_of_meshes_get_other_names() -> None:
    def rename(data: dict[str, Any]) -> None:
        text = json.dumps(data["stages"]).replace('"data"', '"rows"')
        data["stages"] = json.loads(text)

    _, plan = planned(layers, "int8")
    found = carried(rename, "int8")
    assert [stage.axis_names for stage in found.stages] == [("rows",), ("rows",)]
    assert [g.codec for g in found.gradients] == [g.codec for g in plan.gradients]
    assert found.predicted == plan.predicted


@pytest.mark.parametrize(
    "fields",
    [{"codec": "int4"}, {"feedback": True}, {"average_every": 3}, {"bucket": 2}],
)
def test_gradients_are_sent_as_the_file_says(fields: dict[str, Any]) -> None:
    def change(data: dict[str, Any]) -> None:
        every = (g for stage in data["stages"] for g in stage["gradients"])
        next(g for g in every if g["name"] == "params/2").update(fields)

    _, plan = planned(layers, "int8")
    found = carried(change, "int8")
    assert found.compression.mode == "edited"
    for one, other in zip(found.gradients, plan.gradients, strict=True):
        for field, value in fields.items():
            expected = value if one.name == "params/2" else getattr(other, field)
            assert getattr(one, field) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schedule="interleaved"), "2 parts in 2 stages"),
        (lambda d: d.update(microbatches=2), "other microbatches are another plan"),
        (lambda d: d["pipeline"].update(recomputed=[4]), "layers 0 to 3"),
        (lambda d: d["pipeline"].update(parts=[0, 1]), "only recomputed can be edited"),
        (lambda d: d["pipeline"]["homes"].update({"params/0": 1}), "'params/0' is on"),
        (lambda d: d["stages"][0].update(devices=[1, 0]), "other devices are another"),
        (lambda d: d["stages"][0].update(name="x"), "it numbers the stages"),
        (lambda d: d["stages"][0].update(mesh={"axes": {"x": 2}}), "is not one of x"),
        (
            lambda d: d["stages"][1]["nodes"][0].update(axes=[["data"], ["data"]]),
            "uses a mesh axis twice|gives axes",
        ),
    ],
)
def test_what_cannot_be_edited(change: Change, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        carried(change)
