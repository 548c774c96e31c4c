"""Tests steps with microbatches, planned and run on simulated devices."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.cost.live import SUMS, live
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.assignment import Assignment
from autopar.planner.record import restore
from autopar.steps.analysis import analyse

ROWS, MANY, WIDTH = 64, 8192, 64
DATA = {"batch": PartitionSpec("data"), "w*": PartitionSpec()}


def step(w: Any, batch: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ w["up"]) @ w["down"] - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda a, b: a - 0.5 * b, w, grads), loss


def state() -> Any:
    draw = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    return {k: jnp.asarray(0.1 * draw.standard_normal(shape), jnp.float32)
            for k in ("up", "down")}  # fmt: skip


def batch(rows: int = ROWS) -> Any:
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, WIDTH)).astype(np.float32)


def losses(run: Any, count: int = 3, rows: int = ROWS) -> list[float]:
    w, found = state(), []
    for _ in range(count):
        w, loss = run(w, batch(rows))
        found.append(float(loss))
    return found


@functools.cache
def plain() -> tuple[float, ...]:
    return tuple(losses(jax.jit(step)))


def parallel(count: int | str | None, **options: Any) -> Any:
    return autopar.parallelize(
        step, cluster="local", microbatches=count, axis_names=("data",), **options
    )


@pytest.mark.parametrize("count", [2, 4])
def test_losses_are_those_of_the_whole_batch(count: int) -> None:
    run = parallel(count, pins=DATA)
    found = losses(run)

    np.testing.assert_allclose(found, plain(), rtol=2e-5)
    assert run.plan.microbatches == count
    assert run.plan.inputs["batch"] == (("data",), ())
    assert f"{count} microbatches" in str(run.plan)


def shapes_of(rows: int) -> Any:
    return jax.eval_shape(lambda: (state(), jnp.asarray(batch(rows))))


def wide(count: int, compression: str) -> tuple[autopar.Plan, Assignment]:
    """A plan under which each device has all weights and a part of the rows."""
    shapes = shapes_of(MANY)
    plan = autopar.plan(
        step, *shapes, cluster="8:cpu", axis_names=("data",), pins=DATA,
        microbatches=count, compression=compression,
    )  # fmt: skip
    return plan, restore(analyse(step, shapes), plan)


def test_partial_gradients_wait_for_the_last_microbatch() -> None:
    plan, assignment = wide(4, "none")
    due = {v for s in assignment.stackings.values() for v in s.deferral.ends}

    # Its two weights, each summed once a step whatever the number of microbatches.
    assert len(due) == 2
    whole, _ = wide(1, "none")
    sent, at_once = plan.predicted, whole.predicted
    assert sent.communication_bytes < 1.01 * at_once.communication_bytes


def test_codecs_send_the_added_up_gradients() -> None:
    plan, _ = wide(2, "int8")
    assert {g.codec for g in plan.gradients} == {"int8"}

    run = autopar.parallelize(step, plan=plan)
    plainly = losses(jax.jit(step), rows=8192)

    np.testing.assert_allclose(losses(run, rows=8192), plainly, rtol=1e-3)
    assert set(run.telemetry) == {"w/up", "w/down"}


def test_the_compiler_communicates_what_the_plan_says() -> None:
    shapes = shapes_of(ROWS)
    plan = autopar.plan(
        step, *shapes, cluster="8:cpu", pins=DATA, axis_names=("data",), microbatches=4
    )
    audit = autopar.audit(step, *shapes, plan=plan)

    assert audit.agrees


SPLIT = {"batch": PartitionSpec("data"), "w*": PartitionSpec("data")}


def summed(each: bool, compression: str = "none") -> autopar.Plan:
    """Weights that are split; gradients are summed in each microbatch, or once."""
    plan = autopar.plan(
        step, *shapes_of(MANY), cluster="8:cpu", pins=SPLIT, axis_names=("data",),
        microbatches=4, compression=compression,
    )  # fmt: skip
    return plan.with_stage(sums_each_microbatch=each)


def test_gradients_summed_in_each_microbatch_are_kept_split() -> None:
    run = autopar.parallelize(step, plan=summed(True))
    once = autopar.parallelize(step, plan=summed(False))
    expected = losses(jax.jit(step), rows=MANY)

    np.testing.assert_allclose(losses(run, rows=MANY), expected, rtol=2e-5)
    np.testing.assert_allclose(losses(once, rows=MANY), expected, rtol=2e-5)
    assert run.plan.stage.sums_each_microbatch
    assert "4 microbatches, gradients summed in each" in str(run.plan)
    audits = [
        autopar.audit(step, *shapes_of(MANY), plan=r.plan, compiled=False)
        for r in (run, once)
    ]
    assert all(audit.agrees for audit in audits)
    # The sums of four microbatches, of weights of which a device keeps an eighth.
    part = 2 * WIDTH * WIDTH * 4 * 7 / 8
    sent, sent_once = (p.plan.predicted.communication_bytes for p in (run, once))
    assert sent > sent_once + 3 * part - 1
    kept, kept_once = (_sums_kept(r.plan) for r in (run, once))
    assert kept_once > 1.5 * kept


def _sums_kept(plan: autopar.Plan) -> float:
    """Bytes of the sums of gradients that a device keeps between microbatches."""
    assignment = restore(analyse(step, shapes_of(MANY)), plan)
    found = live(assignment, plan.cluster.read().device)
    ends = {v for d in assignment.analysis.deferrals for v in d.gradients}
    own = [k for k, v in enumerate(found.values) if int(v) in ends]
    return float(sum(found.nbytes[k] for k in own if found.kinds[k] != SUMS))


def test_codecs_need_sums_that_wait() -> None:
    run = autopar.parallelize(step, plan=summed(True, "int8"))
    with pytest.raises(PlanError, match="set sums_each_microbatch to false"):
        losses(run, 1, rows=MANY)


def test_sums_in_each_microbatch_are_for_microbatches() -> None:
    shapes = shapes_of(ROWS)
    plan = autopar.plan(step, *shapes, cluster="8:cpu", microbatches=1)
    with pytest.raises(PlanError, match="two microbatches or more"):
        plan.with_stage(sums_each_microbatch=True)


def test_a_saved_plan_is_run_with_its_microbatches(tmp_path: Path) -> None:
    made = parallel(4, pins=DATA)
    losses(made, 1)
    made.plan.save(tmp_path / "plan.json")
    run = autopar.parallelize(step, plan=str(tmp_path / "plan.json"))

    np.testing.assert_allclose(losses(run), plain(), rtol=2e-5)
    assert run.plan.microbatches == 4


def test_layouts_are_kept_with_their_microbatches() -> None:
    shapes = shapes_of(ROWS)
    more = shapes_of(2 * ROWS)
    first = autopar.plan(step, *shapes, cluster="8:cpu", pins=DATA, microbatches=2)
    kept = autopar.plan(step, *more, cluster="8:cpu", layouts=first)

    assert kept.microbatches == 2
    assert kept.inputs == first.inputs
    with pytest.raises(PlanError, match="leave microbatches out"):
        autopar.plan(step, *more, cluster="8:cpu", layouts=first, microbatches=4)


def test_a_smaller_last_batch_runs() -> None:
    run = parallel(4, pins=DATA)
    w, _ = run(state(), batch())
    found, expected = run(w, batch(40))[1], None
    w, _ = jax.jit(step)(state(), batch())
    expected = jax.jit(step)(w, batch(40))[1]

    np.testing.assert_allclose(found, expected, rtol=2e-5)


def deep(w: Any, batch: Any) -> Any:
    """A step whose activations need most of the memory."""

    def loss_of(w: Any) -> Any:
        h = batch
        for _ in range(12):
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - grad, loss


def deep_plan(memory: float, count: int | str) -> autopar.Plan:
    cluster = autopar.Cluster.parse("1x2:h100")
    device = cluster.device
    shapes = (
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        jax.ShapeDtypeStruct((65536, 256), jnp.float32),
    )
    small = {"memory_bytes": int(memory), "memory_reserve": 0.0}
    fields = {k: v for k, v in small.items() if hasattr(device, k)}

    cluster = dataclasses.replace(cluster, device=dataclasses.replace(device, **fields))
    return autopar.plan(deep, *shapes, cluster=cluster, microbatches=count, remat=0)


def test_auto_takes_as_many_as_memory_needs() -> None:
    roomy = deep_plan(80e9, "auto")
    need = roomy.predicted.peak_memory_bytes
    tight = deep_plan(0.5 * need, "auto")

    assert roomy.microbatches == 1
    assert tight.microbatches > 1
    assert tight.predicted.peak_memory_bytes <= 0.5 * need


def wide_state(memory: float, compression: str = "none") -> autopar.Plan:
    """A step whose gradients need most of the memory."""
    shapes = (
        [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    )

    def loss_of(w: Any, x: Any) -> Any:
        for one in w:
            x = jnp.tanh(x @ one)
        return jnp.mean(x**2)

    def train(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(w, x)
        return jax.tree.map(lambda a, b: a - b, w, grads), loss

    return autopar.plan(
        train, *shapes, cluster=f"8:h100,memory={int(memory)}B", microbatches=4,
        remat=0, axis_names=("data",), pins={"x": PartitionSpec("data")},
        compression=compression,
    )  # fmt: skip


def test_sums_are_taken_in_each_microbatch_where_memory_needs_it() -> None:
    roomy = wide_state(80e9)
    need = roomy.predicted.peak_memory_bytes
    tight = wide_state(0.8 * need)

    assert not roomy.stage.sums_each_microbatch
    assert tight.stage.sums_each_microbatch
    assert tight.predicted.peak_memory_bytes <= 0.8 * need
    assert tight.predicted.communication_bytes > roomy.predicted.communication_bytes
    with pytest.raises(InfeasibleError):
        wide_state(0.8 * need, "int8")
    auto = wide_state(0.8 * need, "auto")
    assert auto.stage.sums_each_microbatch
    assert not any(g.codec for g in auto.gradients)


@pytest.mark.parametrize("part", [0.95, 0.8, 0.6])
def test_a_loop_of_the_step_itself_has_no_microbatches_to_sum_in(part: float) -> None:
    """Sums of weights that layers share wait in a loop of the step's own."""
    shapes = (
        [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
    )

    def train(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def layer(x: Any, _: Any) -> Any:
                for one in w:
                    x = jnp.tanh(x @ one)
                return x, None

            return jnp.mean(jax.lax.scan(layer, x, None, length=4)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda a, b: a - b, w, grads), loss

    def plan(memory: float) -> autopar.Plan:
        return autopar.plan(
            train, *shapes, cluster=f"8:h100,memory={int(memory)}B", microbatches=1,
            remat=0, stages=1, axis_names=("data",), pins={"x": PartitionSpec("data")},
        )  # fmt: skip

    need = plan(80e9).predicted.peak_memory_bytes
    try:
        found = plan(part * need)
    except InfeasibleError:
        return
    assert not found.stage.sums_each_microbatch
    assert found.predicted.peak_memory_bytes <= part * need


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "many"])
def test_a_wrong_number_is_refused(count: Any) -> None:
    with pytest.raises(PlanError, match="into how many microbatches"):
        autopar.parallelize(step, microbatches=count)


def test_a_wrong_way_to_split_is_refused() -> None:
    with pytest.raises(PlanError, match="expected 'refuse', or 'microbatch'"):
        autopar.parallelize(step, coupled="ignore")


def test_microbatches_beside_a_plan_are_refused() -> None:
    plan, _ = wide(2, "none")
    with pytest.raises(PlanError, match="microbatches= has no effect with plan="):
        autopar.parallelize(step, plan=plan, microbatches=4)


def spread(w: Any, batch: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return jnp.sum(jax.nn.relu(1 - jnp.std(batch @ w, axis=0)))

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - grad, loss


def test_what_is_of_each_microbatch_stands_in_the_plan() -> None:
    shapes = jax.eval_shape(lambda: (state()["up"], jnp.asarray(batch())))
    with pytest.raises(PlanError, match="depends on the others"):
        autopar.plan(spread, *shapes, cluster="8:cpu", microbatches=2)
    plan = autopar.plan(
        spread, *shapes, cluster="8:cpu", microbatches=2, coupled="microbatch"
    )

    assert plan.local
    assert "of each microbatch alone" in str(plan)
    run = autopar.parallelize(spread, plan=plan)
    w, x = state()["up"], batch()
    parts = [spread(w, x[m::2])[1] for m in range(2)]
    np.testing.assert_allclose(run(w, x)[1], sum(parts) / 2, rtol=1e-5)
