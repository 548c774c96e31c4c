"""Tests codecs of plans with replicas that have unequal shares of microbatches."""

from __future__ import annotations

import dataclasses
from typing import Any

import compressed_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_cases import case_of, on_host, spoilt
from jax.sharding import PartitionSpec

import autopar
from autopar import Cluster, PlanError
from autopar.compression.codecs.registry import parse_codec

MIXED = "1x4:cpu+1x4:cpu,efficiency=0.2"
SHARES = [3, 1]
STEPS = 3
# The devices of a replica are data-parallel, or hold parts of the state, or of both.
NAMES = ["data_parallel", "sharded_state", "tensor_parallel", "scanned_layers"]


def on_replicas(name: str) -> cases.Case:
    return dataclasses.replace(case_of(name), cluster=MIXED)


def trained(name: str, codec: str, steps: int = STEPS, **options: Any) -> Any:
    """The step, its state and its losses after some steps on replicas."""
    case = on_replicas(name)
    step = case.parallel(codec, microbatches=SHARES, **options)
    return step, *case.train(step, case.state(), case.batches(steps))


def audit_of(step: Any, name: str) -> Any:
    case = case_of(name)
    structs = jax.eval_shape(lambda: (*case.state(), case.batch(0)))
    return autopar.audit(case.step, *structs, plan=step.plan)


@pytest.mark.parametrize("name", NAMES)
def test_a_lossless_codec_trains_as_one_device(name: str) -> None:
    step, _, losses = trained(name, "dense")

    np.testing.assert_allclose(losses, cases.plain_losses(name, STEPS), rtol=1e-5)
    assert {g.codec for g in step.plan.gradients} == {"dense"}
    assert all("replica" in g.axes for g in step.plan.gradients)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_says_what_is_sent(name: str) -> None:
    step, _, losses = trained(name, "int8")

    np.testing.assert_allclose(losses, cases.plain_losses(name, STEPS), rtol=2e-2)
    assert "int8" in {g.codec for g in step.plan.gradients}
    assert audit_of(step, name).agrees
    report = step.telemetry
    wire = sum(g.wire_bytes for g in step.plan.gradients)
    assert sum(r.wire_bytes for r in report.values()) == pytest.approx(wire)


def test_the_error_is_that_of_the_codec() -> None:
    """An update of plain SGD shows the gradient, with one part from each replica."""

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(
            w
        )
        return w - grad, loss

    w = 0.1 * jax.random.normal(jax.random.key(0), (64, 64))
    x = jax.random.normal(jax.random.key(1), (512, 64))
    plain = np.asarray(jax.jit(step)(w, x)[0] - w)

    def error(codec: str, shares: Any, cluster: str) -> float:
        run = autopar.parallelize(
            step, cluster=cluster, compression=codec, microbatches=shares, donate=False,
            pins={"x": PartitionSpec("data"), "w": PartitionSpec()},
            axis_names=("data",),
        )  # fmt: skip
        sent = np.asarray(run(w, x)[0] - w)
        assert {g.codec for g in run.plan.gradients} == {codec}
        return float(np.linalg.norm(sent - plain) / np.linalg.norm(plain))

    expected = parse_codec("int8").error((64, 64))
    equal = error("int8", 4, "2x1:cpu,network=1Gb/s")
    found = error("int8", SHARES, MIXED)
    # The parts are encoded, and so is their sum.
    assert 0 < found < 2 * expected
    assert found == pytest.approx(equal, rel=0.2)


def test_what_is_not_sent_is_sent_later() -> None:
    """Error feedback: the residuals of all replicas are part of the next steps."""
    case = on_replicas("data_parallel")
    step = case.parallel("int4", microbatches=4)
    state, losses = case.train(step, case.state(), case.batches(STEPS))
    assert len(step.plan.replicas) == 2
    before = residual_sums(step.compression_state)
    assert all(np.abs(r).max() > 0 for r in before.values())
    state = step.replan(Cluster.parse("4x1:cpu,network=1Gb/s"), state)
    step.prepare(*state, case.batch(0))
    after = residual_sums(step.compression_state)

    for name, residual in before.items():
        np.testing.assert_allclose(
            after[name], residual, rtol=1e-6, atol=1e-6 * np.abs(residual).max()
        )
    _, more = case.train(step, state, case.batches(2, start=STEPS))
    assert more[-1] < losses[0]


def residual_sums(state: Any) -> dict[str, Any]:
    return {
        name: np.asarray(kept["residual"], np.float64).sum(0)
        for name, kept in state["gradients"].items()
        if not isinstance(kept["residual"], tuple)
    }


def test_sums_in_each_microbatch_are_sent_once_over_replicas() -> None:
    step, *_ = trained("sharded_state", "dense", 1)
    case = on_replicas("sharded_state")
    edited = step.plan.with_stage(sums_each_microbatch=True)
    run = autopar.parallelize(case.step, plan=edited)
    _, losses = case.train(run, case.state(), case.batches(STEPS))

    np.testing.assert_allclose(
        losses, cases.plain_losses("sharded_state", STEPS), rtol=1e-5
    )
    assert {g.axes for g in run.plan.gradients} == {("replica",)}
    assert audit_of(run, "sharded_state").agrees


def test_a_step_that_is_not_finite_is_skipped() -> None:
    case = on_replicas("data_parallel")
    step, state, _ = trained("data_parallel", "int8")
    before = on_host(state)
    state, (loss,) = case.train(step, state, [spoilt(case.batch(3))])

    assert np.isnan(loss)
    with pytest.warns(UserWarning, match="not finite"):
        step.compression_state  # noqa: B018
    jax.tree.map(np.testing.assert_array_equal, before, on_host(state))


def test_codecs_are_chosen_where_the_link_between_groups_is_slow() -> None:
    case = case_of("data_parallel")
    structs = jax.eval_shape(lambda: (*case.state(), case.batch(0)))
    data = Cluster.parse(MIXED).to_data()
    data["between"]["bandwidth_bytes_per_s"] = 1e6
    slow = Cluster.from_data(data)
    plans = {
        mode: autopar.plan(
            case.step, *structs, cluster=slow, compression=mode, microbatches=SHARES,
            axis_names=("data",), pins=case.pins,
        )
        for mode in ("auto", "none")
    }  # fmt: skip
    assert any(g.codec not in ("", "dense") for g in plans["auto"].gradients)
    chosen, plain = (plans[m].predicted.step_s for m in ("auto", "none"))
    assert chosen < plain
    assert "codecs save" in plans["auto"].compression.reason
    assert "other layouts" not in plans["auto"].compression.reason
    assert plans["auto"].predicted.step_s == max(
        r.step_s for r in plans["auto"].replicas
    )


def test_a_saved_plan_keeps_its_codecs(tmp_path: Any) -> None:
    step, _, losses = trained("data_parallel", "int8")
    step.plan.save(tmp_path / "plan.json")
    case = on_replicas("data_parallel")
    again = autopar.parallelize(case.step, plan=str(tmp_path / "plan.json"))
    _, found = case.train(again, case.state(), case.batches(STEPS))
    assert found == losses


def test_layouts_are_kept_while_codecs_change() -> None:
    step, *_ = trained("data_parallel", "int8", 1)
    case = on_replicas("data_parallel")
    structs = jax.eval_shape(lambda: (*case.state(), case.batch(0)))
    plan = autopar.plan(
        case.step, *structs, cluster=MIXED, layouts=step.plan, compression="int4"
    )
    assert plan.inputs == step.plan.inputs
    assert [r.microbatches for r in plan.replicas] == SHARES
    assert "int4" in {g.codec for g in plan.gradients}
    with pytest.raises(PlanError, match="equal devices"):
        autopar.plan(case.step, *structs, cluster="8:cpu", layouts=step.plan)


class Asking:
    """A policy that requests other codecs after the first step."""

    every = 1

    def __init__(self) -> None:
        self.steps = 0

    def observe(self, seen: Any) -> Any:
        self.steps += 1
        return dict.fromkeys(seen.gradients, "int4") if self.steps == 1 else None


def test_a_policy_changes_codecs() -> None:
    step, _, losses = trained("data_parallel", "int8", policy=Asking())

    assert "int4" in {g.codec for g in step.plan.gradients}
    np.testing.assert_allclose(
        losses, cases.plain_losses("data_parallel", STEPS), rtol=2e-2
    )
