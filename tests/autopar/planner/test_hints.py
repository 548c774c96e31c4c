"""Tests that pins are kept, and that the step's results stay right."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_forms as forms
from flax import linen
from jax.sharding import PartitionSpec as P
from step_forms import FORMS

import autopar
from autopar import PlanError

CLUSTER = forms.cheap("2x4:cpu")


def planned(**options: Any) -> autopar.Plan:
    options = {"cluster": CLUSTER, "seconds": None, **options}
    state = forms.create_plain(jax.random.key(0))
    return autopar.plan(forms.plain_step, *state, forms.batch_structs(), **options)


def spec(plan: autopar.Plan, path: str) -> P:
    entries = [
        axes[0] if len(axes) == 1 else axes or None for axes in plan.inputs[path]
    ]
    return P(*entries)


@pytest.mark.parametrize(
    "pin",
    [P(), P("data"), P("tensor"), P(None, "data"), P(None, ("tensor", "data")),
     P("data", "tensor"), P(("data", "tensor"), None)],
)  # fmt: skip
def test_a_pin_is_kept(pin: P) -> None:
    plan = planned(pins={"params/up": pin})
    mesh = jax.sharding.AbstractMesh(plan.axis_sizes, plan.axis_names)
    got = jax.sharding.NamedSharding(mesh, spec(plan, "params/up"))
    assert got.is_equivalent_to(jax.sharding.NamedSharding(mesh, pin), 2)


def test_patterns_pin_many() -> None:
    plan = planned(pins={"opt_state/0/*/up": P("tensor"), "batch/*": P("data")})
    for path in ("opt_state/0/mu/up", "opt_state/0/nu/up"):
        assert plan.inputs[path] == (("tensor",), ())
    for path in ("batch/x", "batch/y"):
        assert plan.inputs[path] == (("data",), ())


def test_hints_never_make_a_plan_faster() -> None:
    free = planned()
    for pins in ({"params/*": P()}, {"batch/*": P("tensor")}, {"*/up": P("data")}):
        assert planned(pins=pins).predicted.step_s >= 0.9999 * free.predicted.step_s


def test_a_pinned_step_trains_as_the_plain_step() -> None:
    form = FORMS["plain"]
    pins = {"params/up": P("tensor"), "batch/*": P("data"), "opt_state/*/down": P()}
    step = autopar.parallelize(form.step, cluster=CLUSTER, pins=pins, seconds=5)
    state = form.create(jax.random.key(0))
    losses = form.losses(step, state, forms.batches(3))
    np.testing.assert_allclose(losses, forms.plain_losses(form, 3), rtol=1e-5)
    assert step.plan.inputs["params/up"] == (("tensor",), ())


def test_pins_choose_among_the_meshes() -> None:
    """One level of 8 devices: a mesh of one axis has no 'tensor'."""
    plan = planned(cluster=forms.cheap("8:cpu"), pins={"params/up": P(None, "tensor")})
    assert plan.axis_names == ("data", "tensor")
    assert plan.inputs["params/up"] == ((), ("tensor",))


def test_pins_go_on_after_a_replan() -> None:
    form = FORMS["plain"]
    step = autopar.parallelize(
        form.step, cluster=CLUSTER, pins={"params/up": P("data")}, seconds=5
    )
    batch = next(forms.batches(1))
    state, _ = form.advance(step, form.create(jax.random.key(0)), batch)
    state = step.replan(forms.cheap("4:cpu"), state)
    assert step.plan.inputs["params/up"][0] == ("data",)
    form.advance(step, state, batch)


class TestAxisNames:
    def test_they_name_the_mesh(self) -> None:
        plan = planned(axis_names=("rows", "columns"), pins={"batch/x": P("rows")})
        assert plan.axis_names == ("rows", "columns")
        assert plan.inputs["batch/x"] == (("rows",), ())

    def test_their_number_is_that_of_the_axes(self) -> None:
        plan = planned(cluster=forms.cheap("8:cpu"), axis_names=("a", "b", "c"))
        assert plan.mesh == {"axes": {"a": 2, "b": 2, "c": 2}}

    def test_too_many(self) -> None:
        with pytest.raises(PlanError, match="cannot be cut into 3"):
            planned(cluster=forms.cheap("4:cpu"), axis_names=("a", "b", "c"))

    def test_too_few(self) -> None:
        with pytest.raises(autopar.ClusterError, match="too few"):
            planned(axis_names=("a",))


class TestBadPins:
    def test_no_such_input(self) -> None:
        with pytest.raises(PlanError, match=r"'nothing' matches no input.*params/bias"):
            planned(pins={"nothing": P()})

    def test_no_such_axis(self) -> None:
        with pytest.raises(PlanError, match=r"'params/up'.*'model'.*axis_names"):
            planned(pins={"params/up": P("model")})

    def test_too_many_entries(self) -> None:
        with pytest.raises(PlanError, match="more entries"):
            planned(pins={"params/bias": P(None, "data")})

    def test_an_axis_twice(self) -> None:
        with pytest.raises(PlanError, match="twice"):
            planned(pins={"params/up": P("data", "data")})

    def test_sizes_that_do_not_divide(self) -> None:
        with pytest.raises(PlanError, match="48 cannot be split 5 ways"):
            planned(cluster=forms.cheap("5:cpu"), pins={"params/bias": P("data")},
                    split_batch=False)  # fmt: skip

    def test_two_that_contradict(self) -> None:
        with pytest.raises(PlanError, match="another pin"):
            planned(pins={"params/up": P("data"), "params/u*": P("tensor")})


class TestLogicalAxes:
    RULES = (("embed", "data"), ("mlp", "tensor"))

    def create(self) -> Any:
        return functools.partial(forms.create_linen, logical=True)

    def test_boxed_names_pin_parameters_and_moments(self) -> None:
        state = jax.eval_shape(self.create(), jax.random.key(0))
        plan = autopar.plan(
            forms.linen_step, state, forms.batch_structs(), cluster=CLUSTER,
            logical_axis_rules=self.RULES, seconds=5,
        )  # fmt: skip
        for prefix in ("params", "opt_state/0/mu", "opt_state/0/nu"):
            path = f"state/{prefix}/Dense_0/kernel/value"
            assert plan.inputs[path] == (("data",), ("tensor",))

    def test_pins_come_before_rules(self) -> None:
        path = "state/params/Dense_0/kernel/value"
        state = jax.eval_shape(self.create(), jax.random.key(0))
        plan = autopar.plan(
            forms.linen_step, state, forms.batch_structs(), cluster=CLUSTER,
            logical_axis_rules=self.RULES, pins={path: P()}, seconds=5,
        )  # fmt: skip
        assert plan.inputs[path] == ((), ())

    def test_the_decorator_takes_them(self) -> None:
        step = autopar.parallelize(
            forms.linen_step, cluster=CLUSTER, logical_axis_rules=self.RULES, seconds=5
        )
        example = forms.batch_structs()
        state = step.init(self.create(), jax.random.key(0), batch=example)
        kernel = state.params["Dense_0"]["kernel"]
        assert isinstance(kernel, linen.LogicallyPartitioned)
        assert kernel.value.sharding.spec == P("data", "tensor")
        want = jax.jit(forms.linen_step)(
            self.create()(jax.random.key(0)), next(forms.batches(1))
        )[1]
        got = step(state, next(forms.batches(1)))[1]
        np.testing.assert_allclose(got, want, rtol=1e-5)

    def test_steps_without_names_are_left_alone(self) -> None:
        plan = planned(logical_axis_rules=self.RULES)
        assert plan.nodes == planned().nodes
        assert jnp.isfinite(plan.predicted.step_s)
