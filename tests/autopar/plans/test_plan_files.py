"""Tests plans as values: calls are repeatable, and errors explain bad files."""

from __future__ import annotations

import json
import pathlib
import resource
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import step_forms as forms
from step_forms import FORMS

import autopar
from autopar import Plan, PlanError, TraceError
from autopar.plans import SCHEMA

CLUSTER = forms.cheap("2x4:cpu")


def made(name: str = "plain", **options: Any) -> Plan:
    form = FORMS[name]
    state = form.create(jax.random.key(0))
    args = (*form.arguments(state), forms.batch_structs())
    options = {"cluster": CLUSTER, "seconds": None, **options}
    return autopar.plan(form.step, *args, **options)


def without_seconds(plan: Plan) -> dict[str, Any]:
    data = plan.to_json()
    data["solver"].pop("seconds")
    data.pop("seconds")
    return data


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_same_call_gives_the_same_plan(name: str) -> None:
    first, second = made(name), made(name)
    assert without_seconds(first) == without_seconds(second)
    assert first.fingerprint == second.fingerprint


def test_arrays_and_structs_give_the_same_plan() -> None:
    state = jax.eval_shape(forms.create_plain, jax.random.key(0))
    plan = autopar.plan(
        forms.plain_step, *state, next(forms.batches(1)), cluster=CLUSTER, seconds=None
    )
    assert without_seconds(plan) == without_seconds(made())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        {"stages": 2, "microbatches": 2},
    ],
)
def test_saving_and_loading_loses_nothing(
    tmp_path: pathlib.Path, options: dict[str, Any]
) -> None:
    plan = made(**options)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert (loaded.digest, loaded.changed_parts) == (plan.digest, ())
    loaded.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (
        tmp_path / "plan.json"
    ).read_bytes()


def test_a_plan_that_cannot_be_saved_leaves_the_one_before(
    tmp_path: pathlib.Path,
) -> None:
    """No half of a file, as where a disk is full; links and modes stay."""
    plan, target, link = made(), tmp_path / "plan.json", tmp_path / "link.json"
    target.write_text("what was there before")
    target.chmod(0o640)
    link.symlink_to(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(OSError, match=r"too large: .*plan\.json"):
            plan.save(link)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == "what was there before"
    assert {x.name for x in tmp_path.iterdir()} == {"plan.json", "link.json"}
    plan.save(link)
    assert Plan.load(target) == plan
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640


def test_inputs_and_shapes_are_those_of_the_step() -> None:
    plan = made()
    state = forms.create_plain(jax.random.key(0))
    leaves = jax.tree.leaves((*state, forms.batch_structs()))
    assert [tuple(x.shape) for x in leaves] == list(plan.shapes.values())
    for path, spec in plan.inputs.items():
        assert len(spec) == len(plan.shapes[path])
        for size, axes in zip(plan.shapes[path], spec, strict=True):
            parts = np.prod([plan.mesh["axes"][a] for a in axes], dtype=int)
            assert size % parts == 0


class TestBadFiles:
    def test_missing(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(PlanError, match=r"none\.json: cannot be read: No such"):
            Plan.load(tmp_path / "none.json")

    @pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"schema": "x"}'])
    def test_no_plan(self, tmp_path: pathlib.Path, text: str) -> None:
        file = tmp_path / "plan.json"
        file.write_text(text)
        with pytest.raises(PlanError, match=r"plan\.json: not a plan.*Plan\.save"):
            Plan.load(file)

    def test_a_field_is_missing(self, tmp_path: pathlib.Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({"schema": SCHEMA, "version": "0"}))
        with pytest.raises(PlanError, match=r"not a plan.*missing required field"):
            Plan.load(file)

    def test_another_schema(self, tmp_path: pathlib.Path) -> None:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({**made().to_json(), "schema": SCHEMA + 1}))
        with pytest.raises(PlanError, match=f"has schema {SCHEMA + 1}.*again"):
            Plan.load(file)

    @pytest.mark.parametrize(
        "change",
        [
            {"nodes": ()},
            {"mesh": {"axes": {"other": 8}}},
            {"copies": "swap"},
            {"inputs": {}},
        ],
    )
    def test_edited_by_hand(self, change: dict[str, Any]) -> None:
        """A plan that no longer fits itself is refused, not half applied."""
        plan = made()
        if "copies" in change:
            wrong = msgspec.structs.replace(plan.nodes[0], axes=(("data",),) * 7)
            change = {"nodes": (wrong, *plan.nodes[1:])}
        wrong = plan.with_stage(**change)
        step = autopar.parallelize(forms.plain_step, plan=wrong)
        with pytest.raises(PlanError, match=r"autopar\.plan"):
            step(*forms.create_plain(jax.random.key(0)), next(forms.batches(1)))


class TestBadCalls:
    def test_a_step_that_jax_cannot_trace(self) -> None:
        def step(state: Any, batch: Any) -> Any:
            if batch["x"].sum() > 0:
                return state, 0.0
            return state, 1.0

        with pytest.raises(TraceError, match=r"'step' cannot be traced.*(?s:.)*try:"):
            autopar.plan(step, jnp.ones(3), forms.batch_structs(), cluster=CLUSTER)

    def test_a_step_with_other_arguments(self) -> None:
        with pytest.raises(TraceError, match="'plain_step' cannot be traced"):
            autopar.plan(forms.plain_step, jnp.ones(3), cluster=CLUSTER)

    def test_arguments_that_are_no_arrays(self) -> None:
        with pytest.raises(TraceError, match=r"'<lambda>' cannot be called.*'b/0' is"):
            autopar.plan(lambda s, b: s, jnp.ones(3), ["text"], cluster=CLUSTER)

    def test_a_batch_that_no_axis_divides(self) -> None:
        state = forms.create_plain(jax.random.key(0))
        args = (forms.plain_step, *state, forms.batch_structs(25))
        with pytest.raises(PlanError, match=r"is 25 .*\n.*batch of 32.*split_batch"):
            autopar.plan(*args, cluster=CLUSTER, axis_names=("a", "b"))

        plan = autopar.plan(*args, cluster=CLUSTER, split_batch=False, seconds=5)
        assert plan.inputs["batch/x"][0] == ()
        step = autopar.parallelize(forms.plain_step, plan=plan)
        batch = next(forms.batches(1, rows=25))
        want = forms.plain_step(*state, batch)[-1]
        got = step(*state, batch)[-1]
        np.testing.assert_allclose(got, want, rtol=1e-5)
