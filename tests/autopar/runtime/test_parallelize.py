"""Tests the decorator: a planned step trains like the plain step."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_forms as forms
from flax import nnx
from step_forms import FORMS, Form

import autopar
from autopar import PlanError

CLUSTER = forms.cheap("2x4:cpu")
RTOL = 1e-5


def planned(form: Form, **options: Any) -> Any:
    if "plan" not in options:
        options = {"cluster": CLUSTER, "seconds": 5, **options}
    return autopar.parallelize(form.step, **options)


def made(form: Form, step: Any) -> Any:
    return step.init(form.create, jax.random.key(0), batch=forms.batch_structs())


def leaves(state: Any) -> list[Any]:
    if type(state) is tuple and isinstance(state[0], nnx.Module):
        state = nnx.state(state)
    return jax.tree.leaves(state)


@pytest.fixture(params=sorted(FORMS))
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_trains_as_the_plain_step(form: Form) -> None:
    step = planned(form)
    state = made(form, step)

    losses = form.losses(step, state, forms.batches(5))

    np.testing.assert_allclose(losses, forms.plain_losses(form, 5), rtol=RTOL)
    assert losses[-1] < losses[0]
    assert math.prod(step.plan.axis_sizes) == 8


def test_state_made_outside_is_moved(form: Form) -> None:
    step = planned(form)
    state = form.create(jax.random.key(0))

    losses = form.losses(step, state, forms.batches(3, convert=jnp.asarray))

    np.testing.assert_allclose(losses, forms.plain_losses(form, 3), rtol=RTOL)


def test_state_is_created_in_its_shards(form: Form) -> None:
    step = planned(form)
    state = made(form, step)

    found = leaves(state)
    for leaf, (path, spec) in zip(found, step.plan.inputs.items(), strict=False):
        axes = jax.sharding.PartitionSpec(*(a or None for a in spec))
        want = jax.sharding.NamedSharding(leaf.sharding.mesh, axes)
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), path
        assert len(leaf.sharding.device_set) == 8
        if any(spec):
            assert not leaf.is_fully_replicated, path


def test_the_plan_splits_state_and_batch() -> None:
    """Otherwise the tests here would show little."""
    step = planned(FORMS["linen"])
    made(FORMS["linen"], step)
    split = {path for path, spec in step.plan.inputs.items() if any(spec)}
    assert "batch/y" in split
    assert any(path.startswith("state/params") for path in split)


def test_no_leaf_is_whole_without_a_plan() -> None:
    form = FORMS["plain"]
    step = planned(form)
    state = step.init(form.create, jax.random.key(0))
    for leaf in leaves(state):
        whole = all(n % 8 for n in leaf.shape)
        assert leaf.is_fully_replicated == whole

    losses = form.losses(step, state, forms.batches(3))
    np.testing.assert_allclose(losses, forms.plain_losses(form, 3), rtol=RTOL)


def test_state_is_donated() -> None:
    form = FORMS["linen"]
    step = planned(form)
    state = made(form, step)
    new, _ = step(state, next(forms.batches(1)))

    assert all(leaf.is_deleted() for leaf in leaves(state))
    assert not any(leaf.is_deleted() for leaf in leaves(new))


def test_state_from_init_is_planned_for_once(form: Form) -> None:
    """Also where a module is made anew each time that a state is created."""
    step = planned(form)
    state = made(form, step)
    before = step.plan
    form.advance(step, state, next(forms.batches(1)))
    assert step.plan is before


def test_donate_false_keeps_the_state() -> None:
    form = FORMS["plain"]
    step = planned(form, donate=False)
    state = made(form, step)
    batch = next(forms.batches(1))

    first = step(*state, batch)[-1]
    assert step(*state, batch)[-1] == first


def test_a_batch_is_never_donated() -> None:
    form = FORMS["plain"]
    step = planned(form)
    state = made(form, step)
    batch = next(forms.batches(1, convert=jnp.asarray))
    for _ in range(2):
        state, _ = form.advance(step, state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))


def test_an_array_may_stand_twice_in_the_state() -> None:
    """Such as a moving average that starts as the parameters themselves."""

    def step(state: Any, batch: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))
        w = state["w"] - 0.1 * grad(state["w"])
        return {"w": w, "mean": 0.9 * state["mean"] + 0.1 * w}, w.sum()

    w = jnp.eye(forms.WIDTH)
    run = autopar.parallelize(step, cluster=CLUSTER, seconds=5)
    state, batch = {"w": w, "mean": w}, next(forms.batches(1))
    want, _ = step(state, batch)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = jax.device_put(w, place)
    for given in (state, {"w": whole, "mean": whole}):
        got, _ = run(given, batch)
        np.testing.assert_allclose(got["mean"], want["mean"], rtol=RTOL, atol=1e-6)


def test_arguments_by_name() -> None:
    form = FORMS["plain"]
    step = planned(form, donate=False)
    params, opt_state = made(form, step)
    batch = next(forms.batches(1))
    want = step(params, opt_state, batch)[-1]
    assert step(params, batch=batch, opt_state=opt_state)[-1] == want


def test_another_batch_shape_plans_anew() -> None:
    form = FORMS["plain"]
    step = planned(form)
    state = made(form, step)
    state, _ = form.advance(step, state, next(forms.batches(1)))
    first = step.plan
    state, loss = form.advance(step, state, next(forms.batches(1, rows=48)))

    assert step.plan.shapes["batch/x"] == (48, forms.WIDTH)
    assert np.isfinite(loss)
    form.advance(step, state, next(forms.batches(1)))
    assert step.plan is first


def test_a_given_plan_is_not_solved_again(
    form: Form, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Saved and loaded, a plan gives the same losses."""
    args = form.arguments(form.create(jax.random.key(0)))
    plan = autopar.plan(form.step, *args, forms.batch_structs(), cluster=CLUSTER)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    first = planned(form, plan=plan)
    state = first.init(form.create, jax.random.key(0))
    want = form.losses(first, state, forms.batches(3))
    monkeypatch.setattr("autopar.planner.solving.solve", None)
    step = planned(form, plan=loaded)
    assert step.plan is loaded
    state = step.init(form.create, jax.random.key(0))

    assert form.losses(step, state, forms.batches(3)) == want
    np.testing.assert_allclose(want, forms.plain_losses(form, 3), rtol=RTOL)


def test_lower_gives_the_planned_program(form: Form) -> None:
    step = planned(form)
    lowered = step.lower(
        *form.arguments(form.create(jax.random.key(0))), forms.batch_structs()
    )
    compiled = lowered.compile()
    assert "num_partitions=8" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes > 0


def test_replan_loses_nothing(form: Form) -> None:
    """Training goes on over 8, 4, 6 and 8 devices as if nothing had happened."""
    step = planned(form)
    state = made(form, step)
    losses: list[float] = []
    for k, batch in enumerate(forms.batches(8)):
        if k and k % 2 == 0:
            count = (4, 6, 8)[k // 2 - 1]
            state = step.replan(forms.cheap(f"{count}:cpu"), state)
            assert {len(x.sharding.device_set) for x in leaves(state)} == {count}
            assert math.prod(step.plan.axis_sizes) == count
        state, loss = form.advance(step, state, batch)
        losses.append(float(loss))

    np.testing.assert_allclose(losses, forms.plain_losses(form, 8), rtol=RTOL)


def test_replan_to_local_devices() -> None:
    form = FORMS["linen"]
    step = planned(form)
    state = made(form, step)
    state, _ = step(state, next(forms.batches(1)))
    state = step.replan(autopar.Cluster.local(devices=4), state)
    state, loss = step(state, next(forms.batches(1)))
    assert np.isfinite(loss)
    assert step.plan.cluster.text.startswith("4")


def test_a_decorated_step_can_be_planned(form: Form) -> None:
    args = (*form.arguments(form.create(jax.random.key(0))), forms.batch_structs())
    bare, decorated = (
        autopar.plan(step, *args, cluster=CLUSTER, seconds=None)
        for step in (form.step, planned(form))
    )
    assert decorated.nodes == bare.nodes


def test_under_a_trace_it_is_the_plain_step() -> None:
    form = FORMS["plain"]
    step = planned(form)
    state, batch = form.create(jax.random.key(0)), next(forms.batches(1))
    want = jax.jit(form.step)(*state, batch)[-1]
    assert jax.jit(step)(*state, batch)[-1] == want
    with pytest.raises(PlanError, match="no plan yet"):
        _ = step.plan


def test_static_parts_of_a_model_are_part_of_the_step() -> None:
    """The same arrays with dropout off are another step."""
    form = FORMS["nnx"]
    step = planned(form)
    model, optimizer = made(form, step)
    batch = next(forms.batches(1))
    step(model, optimizer, batch)
    model.eval()
    reference = nnx.clone(model)
    want = jnp.mean((reference(batch["x"]) - batch["y"]) ** 2)

    assert float(step(model, optimizer, batch)) == pytest.approx(float(want), rel=1e-5)


def test_nnx_inputs_are_named_by_their_arguments() -> None:
    form = FORMS["nnx"]
    args = (*form.create(jax.random.key(0)), forms.batch_structs())
    plan = autopar.plan(form.step, *args, cluster=CLUSTER)
    assert {path.split("/")[0] for path in plan.inputs} == {
        "model",
        "optimizer",
        "batch",
    }
    assert any(path.startswith("model/up/kernel") for path in plan.inputs)


class TestErrors:
    """Each says what to do."""

    def test_both_cluster_and_plan(self) -> None:
        form = FORMS["plain"]
        args = (*form.create(jax.random.key(0)), forms.batch_structs())
        plan = autopar.plan(form.step, *args, cluster=CLUSTER)
        with pytest.raises(PlanError, match="not both"):
            autopar.parallelize(form.step, cluster=CLUSTER, plan=plan)

    def test_unknown_option(self) -> None:
        with pytest.raises(TypeError, match="meshes"):
            autopar.parallelize(forms.plain_step, cluster=CLUSTER, meshes=3)

    @pytest.mark.parametrize("value", [8, "float32"])
    def test_a_value_that_the_creation_of_the_state_needs(self, value: Any) -> None:
        def create(key: jax.Array, value: Any) -> jax.Array:
            shape, dtype = (value, "float32") if value == 8 else (8, value)
            return jax.random.normal(key, (shape,), dtype)

        step = autopar.parallelize(lambda w, batch: w + batch.sum(), cluster=CLUSTER)
        with pytest.raises(PlanError, match=rf"\({value!r}\).*init\(lambda key:"):
            step.init(create, jax.random.key(0), value)

    def test_an_error_of_the_creation_itself_is_raised_as_it_is(self) -> None:
        def create(key: jax.Array, value: int) -> jax.Array:
            raise TypeError(f"no state for {value} and {key}")

        step = autopar.parallelize(lambda w, batch: w + batch.sum(), cluster=CLUSTER)
        with pytest.raises(TypeError, match="no state for"):
            step.init(create, jax.random.key(0), 8)

    def test_no_plan_yet(self) -> None:
        step = planned(FORMS["plain"])
        with pytest.raises(PlanError, match="no plan yet"):
            _ = step.plan
        with pytest.raises(PlanError, match="no plan yet"):
            step.replan(CLUSTER, None)

    def test_more_devices_than_exist(self) -> None:
        step = planned(FORMS["plain"], cluster=forms.cheap("16:cpu"), split_batch=False)
        with pytest.raises(PlanError, match=r"16 devices .*jax_num_cpu_devices', 16"):
            step(*forms.create_plain(jax.random.key(0)), next(forms.batches(1)))

    def test_a_plan_of_another_step(self) -> None:
        args = (*forms.create_plain(jax.random.key(0)), forms.batch_structs())
        plan = autopar.plan(forms.plain_step, *args, cluster=CLUSTER)
        state = forms.create_linen(jax.random.key(0))
        other = planned(FORMS["linen"], plan=plan)
        with pytest.raises(PlanError, match=r"another step.*autopar\.plan"):
            other(state, next(forms.batches(1)))
        with pytest.raises(PlanError, match="another step"):
            other.init(forms.create_linen, jax.random.key(0))

    def test_replan_with_part_of_the_state(self) -> None:
        form = FORMS["plain"]
        step = planned(form)
        _, opt_state = made(form, step)
        with pytest.raises(PlanError, match=r"\(params, opt_state\)"):
            step.replan(forms.cheap("4:cpu"), opt_state)
