"""Tests that users' hints apply to the mesh of each stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import PlanError

WIDTH = 16
ROWS = {"x": np.ones((16, WIDTH), "f4")}


def descended(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def chain(params, batch):
    x = batch["x"]
    for w in params["ws"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def loop(params, batch):
    x, _ = jax.lax.scan(
        lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["ws"]
    )
    return jnp.mean(x**2)


def planned(loss=chain, **options):
    ws = [jnp.ones((WIDTH, WIDTH)) for _ in range(4)]
    params = {"ws": jnp.stack(ws) if loss is loop else ws}
    asked = {"cluster": "8:cpu", "stages": 2, "microbatches": 2, **options}
    return autopar.plan(descended(loss), params, ROWS, **asked)


def test_pins_and_names_of_axes_hold_on_every_stage():
    names, spec = ("rows", "columns"), P(None, "columns")
    plan = planned(axis_names=names, pins={"params/*": spec})
    for number, stage in enumerate(plan.stages):
        assert stage.axis_names == names
        own = [stage.inputs[f"params/ws/{2 * number + k}"] for k in (0, 1)]
        assert own == [((), ("columns",))] * 2


def test_a_pin_of_stacked_layers_is_one_of_each_piece():
    pins = {"params/ws": P(None, "columns", None)}
    plan = planned(loop, axis_names=("rows", "columns"), pins=pins)
    found = [stage.inputs for stage in plan.stages]
    assert [x[f"params/ws@{2 * k}:{2 * k + 2}"] for k, x in enumerate(found)] == [
        ((), ("columns",), ())
    ] * 2


def test_as_many_axes_as_are_asked_for():
    with pytest.raises(PlanError, match="max_axes=1 contradicts axis_names"):
        planned(max_axes=1, axis_names=("rows", "columns"))
    assert {len(s.axis_names) for s in planned(max_axes=1).stages} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pins": {"weights/*": P("data")}}, "matches no input of any stage"),
        ({"pins": {"params/*": P("nobody")}}, "nobody"),
        ({"axis_names": ("a", "b", "c", "d")}, "4 mesh axes"),
    ],
)
def test_hints_that_no_stage_can_keep_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        planned(**options)


def test_the_stages_and_layouts_of_a_plan_are_kept():
    names = ("rows", "columns")
    pins = {"params/*": P(None, "columns")}
    first = planned(axis_names=names, pins=pins, schedule="gpipe")
    # Without the plan there would be other layouts, and another schedule.
    again = planned(layouts=first, compression="int8", stages=None, microbatches=None)
    assert [stage.inputs for stage in again.stages] == [s.inputs for s in first.stages]
    assert (again.schedule, again.microbatches) == ("gpipe", 2)
    assert again.pipeline.parts == first.pipeline.parts
    assert {g.codec for g in again.gradients} <= {"int8", "dense"}
    assert again.solver.status == "layouts as they were given"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 4}, "stages=4: the plan given as layouts= has 2 stages"),
        ({"microbatches": 4}, "microbatches=4: the plan given"),
        ({"cluster": "2:cpu"}, "no slice"),
        ({"pins": {"nobody": P()}}, "matches no input of any stage"),
    ],
)
def test_what_contradicts_the_plan_that_is_kept_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        planned(layouts=planned(), **options)
