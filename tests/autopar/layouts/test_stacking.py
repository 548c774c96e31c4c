"""Tests deferred sums: the step's results stay equal, and bytes are as predicted."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import planner_cases
import planner_harness as harness
import pytest
from jax.sharding import PartitionSpec
from pairwise import paired_work_s
from planner_steps import normal, training

from autopar.cluster import Cluster
from autopar.cost.estimate import work_of
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import shards
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.planner.record import restore
from autopar.steps.analysis import analyse

# Those whose ways differ; the others lead over the same operators.
NAMES = (
    "cond",
    "conv_batchnorm",
    "data_movement",
    "embedding",
    "microbatches",
    "mlp_bfloat16",
    "scan_remat_layers",
    "scan_time",
)
LOOPS = ("microbatches", "scan_layers", "scan_time")
TRIES = 16
BYTES_TOLERANCE = 1e-6
TIMES, ROWS, WIDTH, HIDDEN = 6, 64, 8, 12
WORKERS = 8


@functools.cache
def prepared(name: str) -> harness.Case:
    return harness.prepare(*planner_cases.workload(name))


def ways(plan: Assignment) -> int:
    """The number of ways to reshard in a plan."""
    return len({way.deferral.ends for way in plan.stackings.values()})


def waiting_plan(case: harness.Case, name: str, sizes: tuple[int, ...]) -> Assignment:
    """A random plan that defers sums: two sums if such a plan is soon found, or one."""
    plans: list[Assignment] = []
    for k in range(TRIES):
        draw = random.Random(f"{name} {k}")
        plans.append(harness.random_plan(case, sizes, draw))
        if ways(plans[-1]) > 1:
            break
    return max(plans, key=ways)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_whose_sums_wait_equals_the_plain_step(name: str) -> None:
    """Every sum that may wait does, in whatever operators lie on its way."""
    case = harness.all_waiting(prepared(name))
    plan = waiting_plan(case, name, harness.MESHES[NAMES.index(name) % 3])
    assert ways(plan)
    flat, want = harness.plain(case)

    got = harness.compiled(harness.lowered(case, plan))(*flat)

    # bfloat16 has 8 bits of mantissa, and each part of a sum is rounded to them.
    harness.check_equal(got, want, 2e-2 if name == "mlp_bfloat16" else 1e-4)


@pytest.mark.parametrize("name", LOOPS)
def test_sums_out_of_loops_cost_what_is_predicted(name: str) -> None:
    """As plans are: only what a loop would sum again and again is put off."""
    case = prepared(name)
    for k, sizes in enumerate(harness.MESHES * 2):
        plan = harness.random_plan(case, sizes, random.Random(f"{name} {k}"))

        check_traffic(case, plan)


@pytest.mark.parametrize("name", ["microbatches", "scan_time"])
def test_what_adds_partial_sums_works_on_the_whole_of_them(name: str) -> None:
    """Its work is split as the program holds the values, not as they end up."""
    case = prepared(name)
    split = paired = 0
    for k, sizes in enumerate(harness.MESHES * 8):
        plan = harness.random_plan(case, sizes, random.Random(f"{name} {k}"))
        pricer = harness.pricer_of(sizes)
        makers = {c for s in plan.stackings.values() for c in s.deferral.contributions}
        found = work_of(plan, pricer)
        for done, parts in zip(found.table.works, found.parts.tolist(), strict=True):
            op = done.op
            held = plan.partial_layout(op.outputs[0])
            if held is None or op.index in makers:
                continue
            kept = {f for d in op.rule.results[0] for f in d}
            if len(kept) < len(op.rule.sizes):
                continue
            assert parts == shards(held[1], sizes)
            split += parts < shards(plan.home_layout(op.outputs[0]), sizes)
        if all_wait(plan):
            paired += bool(plan.stackings)
            work_s = found.planned_s.sum() + found.kernel_s.sum()
            assert paired_work_s(plan, pricer) == pytest.approx(work_s, rel=1e-12)
    assert split
    assert paired


def all_wait(plan: Assignment) -> bool:
    """Whether every partial sum in a loop is deferred."""
    loops = [d for d in plan.analysis.deferrals if d.hoisted]
    makers = [plan.graph.operators[c] for d in loops for c in d.contributions]
    partial = {op.outputs[0] for op in makers if plan.partial_of(op)}
    return partial <= set(plan.stackings)


def check_traffic(case: harness.Case, plan: Assignment) -> harness.Traffic:
    predicted = harness.predicted(plan)
    audited = harness.audited(harness.lowered(case, plan))

    assert set(predicted) == set(audited)
    for key, nbytes in predicted.items():
        assert audited[key] == pytest.approx(nbytes, rel=BYTES_TOLERANCE), key
    return predicted


def recurrent() -> Any:
    """One step of a small LSTM on sequences, (time, batch, features)."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(carried: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            h, c = carried
            gates = x @ params["in"] + h @ params["rec"]
            i, f, o, g = jnp.split(gates, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((ROWS, HIDDEN)), jnp.zeros((ROWS, HIDDEN))
        _, out = jax.lax.scan(cell, start, batch["x"])
        return jnp.mean((out @ params["out"] - batch["y"]) ** 2)

    params = {
        "in": normal(0, WIDTH, 4 * HIDDEN),
        "rec": normal(1, HIDDEN, 4 * HIDDEN),
        "out": normal(2, HIDDEN, WIDTH),
    }
    x, y = (normal(k, TIMES, ROWS, WIDTH) for k in (3, 4))
    return training(loss, params, {"x": x, "y": y})


@functools.cache
def data_parallel() -> tuple[harness.Case, Assignment]:
    """The LSTM's step under a plan that splits only the batch."""
    step, args = recurrent()
    analysis = analyse(step, args)
    plan = plan_analysis(
        analysis,
        Cluster.parse(f"{WORKERS}:cpu"),
        PlanOptions(
            axis_names=("x",),
            max_axes=1,
            pins={"params/*": PartitionSpec(), "batch/*": PartitionSpec(None, "x")},
            seconds=None,
            split_batch=False,
            stages=1,
            microbatches=1,
            remat=0,
        ),
    )
    case = harness.prepare(step, args)
    return case, restore(analysis, plan)


def all_reduced(sums: int) -> float:
    """Bytes that a device sends if recurrent weights' gradients are summed ``sums``
    times.

    A ring of n devices sends 2 (n - 1) / n of an array. The gradient of the last layer
    and the loss are sent, too.
    """
    recurrent = (WIDTH + HIDDEN) * 4 * HIDDEN
    elements = sums * recurrent + HIDDEN * WIDTH + 1
    return 2 * (WORKERS - 1) / WORKERS * 4 * elements


def test_a_recurrent_gradient_is_summed_once() -> None:
    """Not once for each of the T times of a sequence."""
    case, plan = data_parallel()

    found = check_traffic(case, plan)

    assert found == {("all_reduce", ("x",)): pytest.approx(all_reduced(1))}


def test_without_waiting_it_would_be_summed_every_time() -> None:
    case, plan = data_parallel()
    none = dataclasses.replace(plan.analysis, deferrals=())
    eager = dataclasses.replace(plan, analysis=none)

    found = check_traffic(case, eager)

    assert found == {("all_reduce", ("x",)): pytest.approx(all_reduced(TIMES))}


def test_the_recurrent_step_stays_the_same() -> None:
    case, plan = data_parallel()
    flat, want = harness.plain(case)

    got = harness.compiled(harness.lowered(case, plan))(*flat)

    harness.check_equal(got, want, 1e-5)


@pytest.mark.parametrize("name", ["scan_layers", "mlp_sgd"])
def test_outside_of_loops_nothing_waits_unasked(name: str) -> None:
    """The compiler sums such gradients where they are made; codecs ask for more."""
    case = prepared(name)
    for k, sizes in enumerate(harness.MESHES):
        plan = harness.random_plan(case, sizes, random.Random(f"{name} {k}"))

        assert plan.stackings == {}
        (some, *_) = [d for d in plan.analysis.deferrals if d.gradients]
        codecs = dict.fromkeys(some.ends, "dense")
        asked = dataclasses.replace(plan, codecs=codecs)
        assert set(asked.stackings) in (set(), set(some.members))
